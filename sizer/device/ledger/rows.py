"""The ledger's rows, one for each comparison: columns, statistics, tables in SQL, changes of earlier files, and filters.

Errors are signed: estimate less measured, over measured.
"""

from __future__ import annotations

import contextlib
import sqlite3
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from sizer.device.comparison.comparison import Comparison, rank_of, world_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """One comparison in a line. Figures (bytes) are None if the device has no such counter or the work did not end."""

    id: int
    measured_at: str
    architecture: str
    class_name: str
    family: str
    mode: str
    dtype: str
    batch: int
    ranks: int  # number of ranks that train together, 1 for one GPU
    rank: int | None  # the measured rank
    query: str
    device_name: str
    device_kind: str
    torch: str
    holds: bool
    verdict: str
    estimated_peak_allocated_bytes: int
    measured_peak_allocated_bytes: int | None
    estimated_peak_reserved_bytes: int
    measured_peak_reserved_bytes: int | None
    estimated_process_bytes: int
    measured_process_bytes: int | None

    @property
    def place(self) -> str:
        """Return the rank and the number of ranks, "1 of 2"; empty for one GPU."""
        return "" if self.rank is None else f"{self.rank} of {self.ranks}"


COLUMNS = tuple(field.name for field in fields(LedgerRow))


def row_from(values: Sequence[Any]) -> LedgerRow:
    """Return the row with these column values, in the order of COLUMNS; SQLite stores True as 1."""
    found: dict[str, Any] = dict(zip(COLUMNS, values, strict=True))
    return LedgerRow(**found | {"holds": bool(found["holds"])})


def columns_of(comparison: Comparison) -> dict[str, Any]:
    """Return the columns of a comparison except its id."""
    measurement, estimate = comparison.measurement, comparison.estimate
    complete = measurement.out_of_memory is None and measurement.failure is None
    figures: dict[str, object] = {}
    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "process_bytes"):
        row = comparison.find(name) if complete else None
        figures[f"estimated_{name}"] = getattr(estimate, name)
        figures[f"measured_{name}"] = None if row is None else row.measured_bytes
    return {
        "measured_at": measurement.measured_at,
        "architecture": comparison.architecture,
        "class_name": comparison.class_name,
        "family": comparison.family,
        "mode": comparison.mode,
        "dtype": measurement.dtype,
        "batch": measurement.batch,
        "ranks": world_of(comparison),
        "rank": rank_of(comparison),
        "query": measurement.query,
        "device_name": measurement.device.name or measurement.device.device,
        "device_kind": measurement.device.kind,
        "torch": measurement.versions.get("torch", ""),
        "holds": comparison.holds,
        "verdict": comparison.verdict,
        **figures,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedError:
    """One row of one comparison: `error` is positive if the estimate was too high."""

    quantity: str
    device: str
    family: str
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorStatistics:
    """Signed errors (fractions of the measured figure) of one quantity on one device, over `count` comparisons.

    `device` is the driver's name of the device, `family` "transformer", "CNN", "other", or "all". `median` is the median of the
    signed errors, `bias` their mean: errors of both signs cancel in it. `worst` is the error farthest from 0, with its sign.
    `median_size` is the median of absolute errors, in which the accuracy aims are stated.
    """

    quantity: str
    device: str
    family: str
    count: int
    median: float
    worst: float
    bias: float
    median_size: float


def error_statistics(errors: Iterable[SignedError], *, by_family: bool = True) -> tuple[ErrorStatistics, ...]:
    """Return one row per quantity, device and family, in the order of first appearance.

    Without `by_family` the family is "all".
    """
    groups: dict[tuple[str, str, str], list[float]] = {}
    for one in errors:
        family = one.family if by_family else "all"
        groups.setdefault((one.quantity, one.device, family), []).append(one.error)
    return tuple(
        ErrorStatistics(
            quantity=quantity,
            device=device,
            family=family,
            count=len(found),
            median=statistics.median(found),
            worst=max(found, key=abs),
            bias=statistics.fmean(found),
            median_size=statistics.median(map(abs, found)),
        )
        for (quantity, device, family), found in groups.items()
    )


# ------------------------------------------------------------------------------------------------------------ database


BUSY_SECONDS = 20.0  # how long one process waits for another process that writes

_FIRST = (
    """CREATE TABLE comparisons (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        digest TEXT NOT NULL UNIQUE,
        added_at TEXT NOT NULL,
        measured_at TEXT NOT NULL,
        architecture TEXT NOT NULL,
        class_name TEXT NOT NULL,
        family TEXT NOT NULL,
        mode TEXT NOT NULL,
        dtype TEXT NOT NULL,
        batch INTEGER NOT NULL,
        query TEXT NOT NULL,
        device_name TEXT NOT NULL,
        device_kind TEXT NOT NULL,
        torch TEXT NOT NULL,
        holds INTEGER NOT NULL,
        verdict TEXT NOT NULL,
        estimated_peak_allocated_bytes INTEGER NOT NULL,
        measured_peak_allocated_bytes INTEGER,
        estimated_peak_reserved_bytes INTEGER NOT NULL,
        measured_peak_reserved_bytes INTEGER,
        estimated_process_bytes INTEGER NOT NULL,
        measured_process_bytes INTEGER,
        data TEXT NOT NULL
    )""",
    """CREATE TABLE figures (
        comparison INTEGER NOT NULL REFERENCES comparisons (id) ON DELETE CASCADE,
        place INTEGER NOT NULL,
        quantity TEXT NOT NULL,
        estimated_bytes INTEGER NOT NULL,
        measured_bytes INTEGER NOT NULL,
        error REAL,
        PRIMARY KEY (comparison, place)
    ) WITHOUT ROWID""",
    *(
        f"CREATE INDEX comparisons_{name} ON comparisons ({name})"
        for name in ("architecture", "mode", "dtype", "batch", "device_name", "torch", "measured_at")
    ),
    "CREATE INDEX figures_quantity ON figures (quantity)",
)

_RANKS = (
    "ALTER TABLE comparisons ADD COLUMN ranks INTEGER NOT NULL DEFAULT 1",
    "ALTER TABLE comparisons ADD COLUMN rank INTEGER",
)

# Step n brings a file from version n to n + 1; a step that was released is never changed.
MIGRATIONS: tuple[tuple[str, ...], ...] = (_FIRST, _RANKS)


def migrate(database: sqlite3.Connection) -> None:
    """Prepare a connection: foreign keys, a write-ahead log, every table in its newest form.

    Raises sqlite3.DatabaseError if the file is not a ledger or was written by a newer version of Sizer.
    """
    database.execute("PRAGMA foreign_keys = ON")
    if _version(database) == len(MIGRATIONS):
        return
    with contextlib.suppress(sqlite3.OperationalError):  # another process is just doing it
        database.execute("PRAGMA journal_mode = WAL")
    database.execute("BEGIN IMMEDIATE")
    try:
        for statements in MIGRATIONS[_version(database) :]:
            for statement in statements:
                database.execute(statement)
        database.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
        database.execute("COMMIT")
    finally:
        if database.in_transaction:
            database.execute("ROLLBACK")


def _version(database: sqlite3.Connection) -> int:
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise sqlite3.DatabaseError(f"it is of version {version}, this Sizer knows up to {len(MIGRATIONS)}")
    return version


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Criteria for rows of the ledger; None accepts all.

    `architecture` is a part of the name, in any case. `source` is the source in the query's arch ("torchvision", "hf", ...).
    `since` and `until` are ISO dates (UTC), both included. Other fields must be equal.
    """

    architecture: str | None = None
    source: str | None = None
    family: str | None = None
    mode: str | None = None
    dtype: str | None = None
    batch: int | None = None
    device_name: str | None = None
    device_kind: str | None = None
    torch: str | None = None
    holds: bool | None = None
    since: str | None = None
    until: str | None = None


def where(filter: Filter | None) -> tuple[str, dict[str, object]]:
    """Return a filter as the WHERE clause of a SELECT, and its values."""
    wanted = {} if filter is None else {name: value for name, value in asdict(filter).items() if value is not None}
    conditions = [_CONDITIONS.get(name, f"{name} = :{name}") for name in wanted]
    return f"WHERE {' AND '.join(conditions)}" if conditions else "", wanted


_CONDITIONS = {
    "architecture": "instr(lower(architecture), lower(:architecture)) > 0",
    "source": "instr(query, 'arch=' || :source || ':') > 0",
    "since": "substr(measured_at, 1, 10) >= :since",
    "until": "substr(measured_at, 1, 10) <= :until",
}

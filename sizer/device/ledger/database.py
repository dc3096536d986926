"""The ledger in SQL: its tables, the steps that bring an earlier file to this version, and the conditions of a filter."""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import asdict, dataclass

BUSY_SECONDS = 20.0  # how long one process waits for another that writes

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
    """Make a connection ready: foreign keys, a write-ahead log, every table in its newest form.

    Raises sqlite3.DatabaseError where the file is not a ledger or was written by a newer version of Sizer.
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
    """Which rows are asked for; None takes all. `architecture` is a part of the name, whatever its case; `source` that of
    the query's arch ("torchvision", "hf", ...); `since` and `until` are ISO dates (UTC), both included; the rest must be equal."""

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
    """A filter as the WHERE clause of a SELECT, and its values."""
    wanted = {} if filter is None else {name: value for name, value in asdict(filter).items() if value is not None}
    conditions = [_CONDITIONS.get(name, f"{name} = :{name}") for name in wanted]
    return f"WHERE {' AND '.join(conditions)}" if conditions else "", wanted


_CONDITIONS = {
    "architecture": "instr(lower(architecture), lower(:architecture)) > 0",
    "source": "instr(query, 'arch=' || :source || ':') > 0",
    "since": "substr(measured_at, 1, 10) >= :since",
    "until": "substr(measured_at, 1, 10) <= :until",
}

"""The ledger: every comparison, stored in an embedded database without torch, and its exchange between machines as JSON.

    ledger = Ledger()                       # $SIZER_LEDGER, else a file in the user's data folder
    number = ledger.add(comparison)
    for row in ledger.rows(Filter(device_kind="cuda", family="CNN")):
        show(row, ledger.comparison(row.id))
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sizer.base.codec import DecodeError
from sizer.base.errors import JobError, RequestError, SizerError, quote
from sizer.base.units import format_bytes
from sizer.device.comparison.comparison import Comparison
from sizer.device.ledger.rows import (
    BUSY_SECONDS,
    COLUMNS,
    ErrorStatistics,
    Filter,
    LedgerRow,
    SignedError,
    columns_of,
    error_statistics,
    migrate,
    row_from,
    where,
)
from sizer.device.record.measurement import Measurement
from sizer.device.record.recording import Measured
from sizer.report.table import write_csv

LIMIT_CHARACTERS = 256 * 2**20
_KINDS = "the output of `measure --json`, a measurement of the suite, or an exported ledger"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportItem:
    """One measurement from another machine, with its comparison if it has one."""

    measured: Measured
    comparison: Comparison | None = None


def digest_of(measurement: Measurement) -> str:
    """Return the identity of a measurement: a hash of its whole content."""
    text = json.dumps(measurement.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_items(text: str) -> Iterator[ImportItem | str]:
    """Return an iterator over the documents in a JSON text; a string item says why a document could not be read.

    Raises RequestError if the whole is not JSON, or not of a known kind.
    """
    if len(text) > LIMIT_CHARACTERS:
        raise RequestError("the file is too long", given=f"{len(text):,} characters", allowed=f"{LIMIT_CHARACTERS:,}")
    documents = [item for document in _documents(text) for item in _items(document)]
    if not documents:
        raise RequestError("the file holds no measurement", allowed=_KINDS)
    return (_item(document) for document in documents)


def _documents(text: str) -> list[object]:
    """Return the JSON of a text: one document, or one per line."""
    try:
        return [_load(text)]
    except (ValueError, RecursionError) as error:
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            if len(lines) > 1:
                return [_load(line) for line in lines]
        except (ValueError, RecursionError):
            pass
        raise RequestError("the file is not JSON", given=quote(str(error), 100), allowed=_KINDS) from None


def _load(text: str) -> object:
    return json.loads(text, parse_constant=_refuse)


def _items(document: object) -> list[object]:
    if isinstance(document, list):
        return document
    if isinstance(document, dict) and isinstance(document.get("comparisons"), list):
        return document["comparisons"]
    return [document]


def _item(document: object) -> ImportItem | str:
    try:
        if not isinstance(document, dict):
            return f"{quote(document)} is not {_KINDS}"
        if "rows" in document:  # a comparison by itself
            return _of_comparison(document)
        if document.get("comparison") is not None:
            return _of_comparison(document["comparison"])
        if "measurement" in document:
            parts = {name: document[name] for name in ("measurement", "recording", "segments") if name in document}
            return ImportItem(measured=Measured.from_dict(parts))
        return ImportItem(measured=Measured(measurement=Measurement.from_dict(document)))
    except DecodeError as error:
        return str(error)


def _of_comparison(data: object) -> ImportItem:
    comparison = Comparison.from_dict(data)
    return ImportItem(measured=Measured(measurement=comparison.measurement), comparison=comparison)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


LOCATION_VARIABLE = "SIZER_LEDGER"
SCHEMA = 1  # of the exported JSON
LIMIT_BYTES = LIMIT_CHARACTERS  # some 5,000 comparisons
Compare = Callable[[Measured], Comparison]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    """Result of an import.

    `added` are the ids of new rows, `known` is the number of existing rows, `refused` has the reasons for refused rows.
    """

    added: tuple[int, ...]
    known: int
    refused: tuple[str, ...]


_CHOICES = ("architecture", "family", "mode", "dtype", "batch", "device_name", "device_kind", "torch")


def ledger_path() -> Path:
    """Return the path of the ledger: $SIZER_LEDGER, else `sizer/ledger.sqlite3` in the platform's user data folder."""
    if chosen := os.environ.get(LOCATION_VARIABLE):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        folder = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        folder = Path.home() / "Library" / "Application Support"
    else:
        folder = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return folder / "sizer" / "ledger.sqlite3"


class Ledger:
    """Comparisons in a SQLite file, for any number of processes and threads at once; it is created at the first write.

    Every method raises JobError if the file cannot be used: not a ledger, written by a newer version, disk full.
    """

    def __init__(self, path: Path | str | None = None):
        self.path = ledger_path() if path is None else Path(path)

    def add(self, comparison: Comparison) -> int:
        """Store a comparison and return its id; a repeated measurement replaces its old row.

        Raises JobError if the ledger is full: it would exceed the size that another machine imports.
        """
        digest = digest_of(comparison.measurement)
        values = columns_of(comparison) | {
            "digest": digest,
            "added_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "data": json.dumps(comparison.to_dict(), separators=(",", ":"), allow_nan=False),
        }
        names = ", ".join(values)
        marks = ", ".join(f":{name}" for name in values)
        changes = ", ".join(f"{name} = excluded.{name}" for name in values if name != "digest")
        with self._open(write=True) as database:
            _check_room(database, len(values["data"]))
            (number,) = database.execute(
                f"INSERT INTO comparisons ({names}) VALUES ({marks}) "
                f"ON CONFLICT (digest) DO UPDATE SET {changes} RETURNING id",
                values,
            ).fetchone()
            database.execute("DELETE FROM figures WHERE comparison = ?", (number,))
            figures = (
                (number, place, row.quantity, row.estimated_bytes, row.measured_bytes, row.error)
                for place, row in enumerate(comparison.rows)
            )
            database.executemany("INSERT INTO figures VALUES (?, ?, ?, ?, ?, ?)", figures)
        return number

    def rows(self, filter: Filter | None = None) -> tuple[LedgerRow, ...]:
        """Return the comparisons that match a filter, the newest measurement first."""
        condition, values = where(filter)
        found = self._read(
            f"SELECT {', '.join(COLUMNS)} FROM comparisons {condition} ORDER BY measured_at DESC, id DESC", values
        )
        return tuple(map(row_from, found))

    def choices(self) -> dict[str, tuple]:
        """Return the sorted values in the ledger, per field of Filter that has choices (not holds, since, until)."""
        return {
            name: tuple(row[0] for row in self._read(f"SELECT DISTINCT {name} FROM comparisons ORDER BY {name}"))
            for name in _CHOICES
        }

    def comparison(self, id: int) -> Comparison | None:
        """Return the whole comparison of a row, None if there is no such row. Raises JobError if it is no longer readable."""
        found = self._read("SELECT data FROM comparisons WHERE id = ?", (id,))
        return None if not found else _decode(found[0][0], id)

    def comparisons(self, filter: Filter | None = None) -> Iterator[Comparison]:
        """Yield every comparison that matches a filter, whole, the newest measurement first."""
        for row in self.rows(filter):
            if (found := self.comparison(row.id)) is not None:  # else deleted meanwhile
                yield found

    def delete(self, id: int) -> bool:
        """Delete a row; return whether it existed."""
        if not self.path.exists():
            return False
        with self._open(write=True) as database:
            return database.execute("DELETE FROM comparisons WHERE id = ?", (id,)).rowcount > 0

    def statistics(self, filter: Filter | None = None, *, by_family: bool = True) -> tuple[ErrorStatistics, ...]:
        """Return signed errors per quantity, device (and family) over the rows that match a filter."""
        condition, values = where(filter)
        found = self._read(
            "SELECT quantity, device_name, family, error FROM figures "
            f"JOIN (SELECT id, device_name, family FROM comparisons {condition}) ON id = comparison "
            "WHERE error IS NOT NULL ORDER BY device_name, place, comparison",
            values,
        )
        errors = (
            SignedError(quantity=q, device=device, family=family, error=error) for q, device, family, error in found
        )
        return error_statistics(errors, by_family=by_family)

    def import_json(self, text: str, *, compare: Compare | None = None) -> ImportResult:
        """Import another machine's measurements; skip known ones.

        The text is the output of `measure --json` (one object, or one per line), a suite's file, or an exported ledger. A
        measurement without a comparison is compared here by `compare`; without that it is refused. Raises RequestError if the
        text is not JSON of one of these kinds.
        """
        return self.import_items(read_items(text), compare=compare)

    def import_items(self, items: Iterable[ImportItem | str], *, compare: Compare | None = None) -> ImportResult:
        """Add new items, as `import_json` does; a string among the items says why one could not be read."""
        added, known, refused = [], 0, []
        for number, item in enumerate(items, 1):
            if isinstance(item, str):
                refused.append(f"number {number}: {item}")
            elif self._knows(digest_of(item.measured.measurement)):
                known += 1
            else:
                try:
                    added.append(self.add(_compared(item, compare)))
                except SizerError as error:
                    refused.append(f"number {number}: {error}")
        return ImportResult(added=tuple(added), known=known, refused=tuple(refused))

    def export_csv(self, filter: Filter | None = None) -> str:
        """Return the rows as CSV, one per comparison, with estimated, measured and error of every quantity."""
        rows = {row.id: asdict(row) for row in self.rows(filter)}
        header = dict.fromkeys(COLUMNS)
        found = self._read(
            "SELECT comparison, quantity, estimated_bytes, measured_bytes, error FROM figures ORDER BY place, comparison"
        )
        for number, quantity, *figures in found:
            if number in rows:
                cells = dict(
                    zip((f"{quantity}.{name}" for name in ("estimated", "measured", "error")), figures, strict=True)
                )
                header |= dict.fromkeys(cells)
                rows[number] |= cells
        return write_csv(list(header), rows.values())

    def export_json(self, filter: Filter | None = None) -> Iterator[str]:
        """Yield the comparisons as JSON for `import_json`, in parts: {"schema": 1, "comparisons": [...], "left_out": [...]}.

        They are written as stored, one at a time. A comparison that is not JSON is left out, and named at the end.
        """
        yield f'{{"schema": {SCHEMA}, "comparisons": ['
        left_out, between = [], ""
        for row in self.rows(filter):
            for (data,) in self._read(
                "SELECT data FROM comparisons WHERE id = ?", (row.id,)
            ):  # none if deleted in the meantime
                try:
                    json.loads(data)
                except ValueError as error:
                    left_out.append(f"comparison {row.id} cannot be read ({quote(str(error), 200)})")
                else:
                    yield between + data
                    between = ", "
        yield f'], "left_out": {json.dumps(left_out)}}}\n'

    def _knows(self, digest: str) -> bool:
        return bool(self._read("SELECT 1 FROM comparisons WHERE digest = ?", (digest,)))

    def _read(self, statement: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple]:
        """Return the rows of a SELECT; none if there is no ledger yet."""
        if not self.path.exists():
            return []
        with self._open() as database:
            return database.execute(statement, values).fetchall()

    @contextmanager
    def _open(self, *, write: bool = False) -> Iterator[sqlite3.Connection]:
        """Open a separate connection for one operation, in a transaction if it writes. Raises JobError."""
        try:
            if write:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None)) as database:
                migrate(database)
                database.execute("BEGIN IMMEDIATE" if write else "BEGIN")
                try:
                    yield database
                    database.execute("COMMIT")
                finally:
                    if database.in_transaction:
                        database.execute("ROLLBACK")
        except (sqlite3.Error, OSError) as error:
            file = quote(str(self.path), 200)
            todo = f"set {LOCATION_VARIABLE} to another file, or move this one away"
            raise JobError(f"the ledger cannot be used ({error})", given=file, todo=todo) from error


def _check_room(database: sqlite3.Connection, more_bytes: int) -> None:
    """Raise JobError if the ledger is full."""
    pages, free, size = (
        database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    if (held := (pages - free) * size) + more_bytes > LIMIT_BYTES:
        raise JobError(
            "the ledger is full",
            given=format_bytes(held),
            allowed=format_bytes(LIMIT_BYTES),
            todo=f"delete comparisons, or begin another with {LOCATION_VARIABLE}",
        )


def _compared(item: ImportItem, compare: Compare | None) -> Comparison:
    if item.comparison is not None:
        return item.comparison
    if compare is None:
        raise RequestError("it holds no comparison", todo="import it where Sizer can make estimates")
    return compare(item.measured)


def _decode(data: str, id: int) -> Comparison:
    try:
        return Comparison.from_dict(json.loads(data))
    except (DecodeError, ValueError) as error:
        text = f"comparison {id} cannot be read by this version ({quote(str(error), 200)})"
        raise JobError(text, todo="delete it, or import the measurement again") from None

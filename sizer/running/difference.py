"""Compare two saved reports, of `sizer run` or `sizer estimate`: by phase, category, module and line. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sizer.base.errors import RequestError, quote
from sizer.base.units import format_bytes, format_more

PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes", "process_bytes")
_LIMIT_BYTES = 2**28  # limit of a file that is read
_ROWS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The bytes of one row before and after. `group` is peak, phase, category, module or line."""

    group: str
    name: str
    before_bytes: int
    after_bytes: int

    @property
    def more_bytes(self) -> int:
        """Return the growth in bytes; negative if it shrank."""
        return self.after_bytes - self.before_bytes


def read_report(path: Path) -> dict[str, Any]:
    """Return a saved report. Raises RequestError for an invalid file."""
    try:
        if path.stat().st_size > _LIMIT_BYTES:
            raise RequestError(
                "report", given=quote(str(path)), allowed=format_bytes(_LIMIT_BYTES), todo="give another file"
            )
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError("report", given=quote(str(path)), todo=error.strerror) from None
    except ValueError:
        data = None
    if not isinstance(data, dict) or not _has_figures(data):
        todo = "write one with `sizer run --json FILE` or `sizer estimate --json`"
        raise RequestError("report", given=quote(str(path)), allowed="a report with figures", todo=todo)
    return data


def find_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Return the rows of two reports that differ, the peaks always; within a group the largest change first."""
    old, new = rows_of(before), rows_of(after)
    changes = [
        Change(group=group, name=name, before_bytes=old.get((group, name), 0), after_bytes=new.get((group, name), 0))
        for group, name in dict.fromkeys((*old, *new))
    ]
    groups = list(dict.fromkeys(change.group for change in changes))
    kept = [change for change in changes if change.more_bytes or change.group == "peak"]
    return sorted(
        kept, key=lambda row: (groups.index(row.group), 0 if row.group in ("peak", "phase") else -abs(row.more_bytes))
    )


def rows_of(report: Mapping[str, Any]) -> dict[tuple[str, str], int]:
    """Return the bytes of a report by (group, name)."""
    figures = _figures(report)
    rows = {("peak", name.removesuffix("_bytes").replace("_", " ")): figures[name] for name in PEAKS}
    rows |= {("phase", use["phase"]): use["peak_allocated_bytes"] for use in figures["phases"]}
    rows |= {("category", name): size for name, size in figures["at_peak"].items() if size}
    rows |= {
        ("module", row["module"] or "outside of modules"): row["bytes"] for row in report.get("modules_at_peak", ())
    }
    for row in report.get("lines_at_peak", ()):
        name = ("line", short_line(row["line"]))
        rows[name] = rows.get(name, 0) + row["bytes"]
    return rows


def short_line(line: str) -> str:
    """Return a line's file and number without the folders that differ between machines."""
    return re.sub(r"^.*/(?=[^/]+/[^/]+$)", "", line)


def format_changes(changes: list[Change]) -> Iterator[str]:
    """Yield the changes as lines of text, a table per group."""
    group, count = "", 0
    for change in changes:
        if change.group != group:
            group, count = change.group, 0
            yield f"{group}:"
        count += 1
        if count <= _ROWS:
            sizes = f"{format_bytes(change.before_bytes):>12} {format_bytes(change.after_bytes):>12}"
            yield f"  {sizes} {format_more(change.more_bytes):>14}  {change.name}"
        elif count == _ROWS + 1:
            yield "  and more rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Allowed growth of a peak: a share of its earlier size, or bytes."""

    share: float = 0.0
    bytes: int = 0

    def allowed(self, before_bytes: int) -> int:
        """Return the largest peak allowed."""
        return int(before_bytes * (1 + self.share)) + self.bytes


def grown(changes: list[Change], tolerance: Tolerance) -> list[Change]:
    """Return the peaks of allocated and reserved memory that grew more than the tolerance."""
    peaks = [change for change in changes if change.group == "peak" and change.name != "process"]
    return [change for change in peaks if change.after_bytes > tolerance.allowed(change.before_bytes)]


def _figures(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the estimate in focus, else the first one."""
    focus = report.get("focus") or {}
    rows = report["estimates"]
    wanted = (focus.get("dtype"), focus.get("batch"))
    return next((row for row in rows if (row["dtype"], row["batch"]) == wanted), rows[0])


def _has_figures(data: Mapping[str, Any]) -> bool:
    rows = data.get("estimates")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        return False
    return all({*PEAKS, "phases", "at_peak", "dtype", "batch"} <= row.keys() for row in rows)


# --------------------------------------------------------------------------------------------------------------- sizes


_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,6})?) ?([KMGT]iB)", re.ASCII)
_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,6})?) ?%", re.ASCII)


def read_size(text: str) -> int:
    """Return the bytes of a text such as 20GiB. Raises ValueError for any other form."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f"{quote(text)} is not a size: write for example 20GiB or 512MiB")
    return int(float(found[1]) * _UNITS[found[2]])


def read_share(text: str) -> float:
    """Return the share of a text such as 1%. Raises ValueError for any other form."""
    found = _SHARE.fullmatch(text)
    if found is None:
        raise ValueError(f"{quote(text)} is not a share: write for example 1%")
    return float(found[1]) / 100

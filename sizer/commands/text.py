"""Text that a terminal can show: tables, names of figures, errors in percent, lists as JSON or lines."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence

from sizer.device.comparison.judgement import SMALLEST_PERCENT
from sizer.device.comparison.row import TENSORS
from sizer.units import format_bytes

TITLES = TENSORS | {
    "peak_allocated_bytes": "peak allocated",
    "peak_reserved_bytes": "peak reserved",
    "process_bytes": "process",
    "allocated_bytes": "allocated",
    "reserved_bytes": "reserved",
}

FITS = {True: "yes", False: "no", "uncertain": "maybe"}


def to_printable(text: str) -> str:
    """Text without control characters but line ends: a config's names must not move the cursor."""
    return "".join(one if one.isprintable() or one == "\n" else "?" for one in text)


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> Iterator[str]:
    """The lines of a table; the first `left` columns begin at the left, the others end at the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        yield to_printable("  ".join(cells).rstrip())


def size_text(size: int | None) -> str:
    """Bytes as text; "" where they are not known."""
    return "" if size is None else format_bytes(size)


def percent(error: float | None) -> str:
    """A signed error as text."""
    if error is None:
        return "nothing measured"
    if 0 < abs(error) < SMALLEST_PERCENT:
        return "< 0.01%"
    return f"{error:+.2%}" if error else "0%"


def print_list(options: argparse.Namespace, data: dict, lines: Iterable[str]) -> None:
    """Print `data` where JSON was asked for, else the lines."""
    print(json.dumps(data) if options.json else "\n".join(lines))

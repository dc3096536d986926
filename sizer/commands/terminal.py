"""Text that a terminal can show: tables, lists as JSON or lines."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence

from sizer.base.units import format_bytes


def to_printable(text: str) -> str:
    """Return a text without control characters except line ends: a config's names must not move the cursor."""
    return "".join(one if one.isprintable() or one == "\n" else "?" for one in text)


def format_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, width: int | None = None
) -> Iterator[str]:
    """Yield the lines of a table; the first `left` columns are left-aligned, the others right-aligned.

    If the table is wider than `width` terminal columns, the remaining columns follow below, after the first `left` columns
    again.
    """
    lines = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for columns in _fitting(widths, left, width):
        for line in lines:
            cells = (
                line[index].ljust(widths[index]) if index < left else line[index].rjust(widths[index])
                for index in columns
            )
            yield to_printable("  ".join(cells).rstrip())


def _fitting(widths: Sequence[int], left: int, width: int | None) -> list[list[int]]:
    """Return the columns of each part of a table, as many as fit, at least one in addition to the first `left`."""
    first = list(range(left))
    parts = [first]
    for index in range(left, len(widths)):
        together = [*parts[-1], index]
        too_wide = width is not None and sum(widths[one] + 2 for one in together) - 2 > width
        if too_wide and parts[-1] != first:
            parts.append([*first, index])
        else:
            parts[-1] = together
    return parts


def terminal_width() -> int | None:
    """Return the columns of the output terminal; None for a file or a pipe, which have no width."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def size_text(size: int | None) -> str:
    """Return bytes as text; "" if unknown."""
    return "" if size is None else format_bytes(size)


def print_list(options: argparse.Namespace, data: dict, lines: Iterable[str]) -> None:
    """Print `data` as JSON if requested, else the lines."""
    print(json.dumps(data) if options.json else "\n".join(lines))

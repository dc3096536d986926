"""Text that a terminal can show: tables, lists as JSON or lines."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence

from sizer.base.units import format_bytes


def to_printable(text: str) -> str:
    """Text without control characters but line ends: a config's names must not move the cursor."""
    return "".join(one if one.isprintable() or one == "\n" else "?" for one in text)


def format_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, width: int | None = None
) -> Iterator[str]:
    """The lines of a table; the first `left` columns begin at the left, the others end at the right.

    Where it is wider than `width` columns of a terminal, what is too much follows below, behind the first `left` columns again.
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
    """The columns of each part of a table, as many as fit, at least one beside the first `left`."""
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
    """The columns of the terminal that is written to; None where that is a file or a pipe, which has no end."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def size_text(size: int | None) -> str:
    """Bytes as text; "" where they are not known."""
    return "" if size is None else format_bytes(size)


def print_list(options: argparse.Namespace, data: dict, lines: Iterable[str]) -> None:
    """Print `data` where JSON was asked for, else the lines."""
    print(json.dumps(data) if options.json else "\n".join(lines))

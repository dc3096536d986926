"""Tables of plain text, and texts that a terminal can show."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


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

"""Rows as CSV text that a spreadsheet opens safely."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")


def write_csv(header: Sequence[str], rows: Iterable[Mapping[str, object]]) -> str:
    """CSV text (RFC 4180) of the rows in the header's order; a missing value is an empty cell.

    Numbers stay numbers. Text that a spreadsheet would take for a formula (it begins with = + - @, a tab or a line
    break) gets a leading apostrophe.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow([_cell(name) for name in header])
    writer.writerows([_cell(row.get(name)) for name in header] for row in rows)
    return text.getvalue()


def _cell(value: object) -> object:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return value
    text = str(value)
    return f"'{text}" if text.startswith(_FORMULA_STARTS) else text

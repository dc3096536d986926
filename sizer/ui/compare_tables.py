"""What tells questions apart, and their figures beside each other. Cells may quote a stranger: st.dataframe shows text as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pandas as pd
import streamlit as st

from sizer.base.units import format_both, format_bytes
from sizer.report.side_by_side import FIGURES, Side, SideBySide
from sizer.ui.palette import marked
from sizer.ui.quantities import quantity_title
from sizer.ui.tables import TO_COME

NONE = "–"
MINUS = "\N{MINUS SIGN}"
LONGEST = 60  # characters of a value: a config has thousands


def show_keys(found: SideBySide, numbers: Sequence[int]) -> None:
    """Show the keys in which the questions differ as a table, those in which they do not as one line."""
    if found.differ:
        _show(keys_frame(found, numbers))
    else:
        st.caption("These questions are the same but for the cell that is looked at.")
    same = ", ".join(f"{key} {clip(value)}" for key, value in found.same.items())
    st.text(f"The same in all: {same}.")


def show_figures(found: SideBySide, numbers: Sequence[int]) -> None:
    """Show each question's cell in focus, with its differences from the first."""
    _show(figures_frame(found, numbers))


def _show(frame: pd.DataFrame) -> None:
    st.dataframe(
        frame,
        height="content",
        column_config=dict.fromkeys(frame.columns, st.column_config.TextColumn(alignment="right")),
    )


def keys_frame(found: SideBySide, numbers: Sequence[int]) -> pd.DataFrame:
    """A row for each key in which the questions differ, a column for each question."""
    rows = [list(map(clip, values)) for values in found.differ.values()]
    return pd.DataFrame(rows, index=list(found.differ), columns=list(map(str, numbers)))


def clip(text: str) -> str:
    """The text, or its beginning where it is too long for a table."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def figures_frame(found: SideBySide, numbers: Sequence[int]) -> pd.DataFrame:
    """A row for each figure; for each question a column, and behind all but the first their differences from that one."""
    first, *others = numbers
    columns = [str(first), *(title for number in others for title in (str(number), f"{number} {MINUS} {first}"))]
    rows = {
        "cell": _cells(found, _cell),
        **{
            title(name): _cells(found, partial(_figure, name=name), name)
            for name in FIGURES
            if name != "largest_batch"
        },
        "verdict": _cells(found, _verdict),
        "largest batch": _cells(found, _largest, "largest_batch"),
    }
    return pd.DataFrame(list(rows.values()), index=list(rows), columns=columns)


def title(name: str) -> str:
    """What the page calls a figure."""
    return quantity_title(name) if name.endswith("_bytes") else name


def _cells(found: SideBySide, text: Callable[[Side], str], figure: str | None = None) -> list[str]:
    cells = [text(found.questions[0])]
    for side in found.questions[1:]:
        cells += [text(side), _difference(found.questions[0], side, figure)]
    return cells


def _difference(first: Side, side: Side, figure: str | None) -> str:
    """A signed difference with its share of the first question's figure ("−1.43 GiB, −49 %"); nothing where there is none."""
    if figure not in side.differences:
        return ""
    difference, whole = side.differences[figure], getattr(first, figure)
    if not difference:
        return "0"
    size = format_bytes(abs(difference)) if figure.endswith("_bytes") else f"{abs(difference):,}"
    sign = "+" if difference > 0 else MINUS
    return f"{sign}{size}, {sign}{_percent(abs(difference) / whole)}" if whole else f"{sign}{size}"


def _percent(share: float) -> str:
    """A share in percent, with a decimal below ten."""
    return f"{100 * share:,.{1 if share < 0.1 else 0}f}\N{NO-BREAK SPACE}%"


def _cell(side: Side) -> str:
    return _missing(side) if side.dtype is None else f"{side.dtype}, batch {side.batch:,}"


def _figure(side: Side, name: str) -> str:
    value = getattr(side, name)
    if value is None:
        return _missing(side)
    return format_both(value) if name.endswith("_bytes") else f"{value:,}"


def _verdict(side: Side) -> str:
    return _missing(side) if side.verdict is None else marked(side.verdict)


def _largest(side: Side) -> str:
    if side.fits is None or not side.searched:
        return _missing(side)
    return str(side.interval)


def _missing(side: Side) -> str:
    return NONE if side.error else TO_COME

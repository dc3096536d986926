"""What the pages look at within a query or its report: one dtype and one batch size, which the link says, and one kind of peak.

The pages share their choice: the cell in the headline of the one is the cell that the other measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import streamlit as st

from sizer.query.request import Request
from sizer.ui.peak_kinds import PEAK_KINDS, PeakKind

FOCUS = "focus"  # session state: the cell that the reader or a link has chosen; absent where nobody has
ALL = "all"
CELL = "cell"  # key of the select box of `ask_cell`

Cell = tuple[str, int]  # a dtype and a batch size


def look_at(cell: Cell | None) -> None:
    """Choose a cell, or for None the one that each report proposes."""
    st.session_state[FOCUS] = cell


def in_focus(request: Request) -> Request:
    """The request with the chosen cell in its focus, where it asks for that cell."""
    cell: Cell | None = st.session_state.get(FOCUS)
    asked_for = cell is not None and cell[0] in request.dtypes and cell[1] in request.batches
    return replace(request, focus=cell if asked_for else None)


def ask_cell(request: Request, proposed: Cell | None) -> Request:
    """The request for one of its cells, chosen with a select box: the one in focus first, else the proposed one, else its first."""
    cells = [(dtype, batch) for dtype in request.dtypes for batch in request.batches]
    st.session_state[CELL] = request.focus or (proposed if proposed in cells else cells[0])
    dtype, batch = st.selectbox(
        "Dtype and batch size", cells, format_func=_title, key=CELL, on_change=_take_cell, width=260
    )
    return replace(request, dtypes=(dtype,), batches=(batch,), focus=None)


def _title(cell: Cell) -> str:
    return f"{cell[0]}, batch {cell[1]:,}"


def _take_cell() -> None:
    look_at(st.session_state[CELL])


def ask_peak_kind() -> PeakKind:
    """The kind of peak chosen with one control; its label is for screen readers only."""
    titles = {key: kind.title for key, kind in PEAK_KINDS.items()}
    key = choose(
        "Memory", list(titles), "process", key="focus_measure", format_func=titles.get, label_visibility="collapsed"
    )
    return PEAK_KINDS[key]


def choose(label: str, options: list, default: object, *, key: str, **arguments: Any) -> Any:
    """One of the options; the default whenever there are other options than before, so that a link shows what its sender saw."""
    own_key = key_among(options, key)
    return st.segmented_control(
        label, options, default=default, key=own_key, required=True, persist_state="session", **arguments
    )


def pick(label: str, values: Sequence[str], key: str) -> str | None:
    """One of the values, or None for all of them; with other values than before it is another widget, which starts with all."""
    options = [ALL, *values]
    chosen = st.selectbox(label, options, key=key_among(options, key), persist_state="session", width=170)
    return None if chosen == ALL else chosen


def key_among(options: list, key: str) -> str:
    """The key of a control with these options: another one whenever they are others than before.

    A choice that the browser sent before it saw the new options belongs to the old control.
    """
    known, edition = st.session_state.get(f"{key}_options", (None, 0))
    if known != options:
        edition += 1
        st.session_state[f"{key}_options"] = (options, edition)
    return f"{key}_{edition}"

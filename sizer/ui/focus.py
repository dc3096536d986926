"""Focus within a report: the selected dtype and batch size, as in the link, and one of three kinds of peak.

The pages share the focus: the cell in the headline of one page is the cell that another page measures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import streamlit as st

from sizer.query.request import Request
from sizer.report.estimate import Estimate

CACHE, OUTSIDE = "allocator cache", "outside PyTorch"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakKind:
    """One kind of peak of an estimate, in bytes. `extra` names the parts that it counts in addition to tensors."""

    key: str
    title: str
    help: str
    of: Callable[[Estimate], int]
    extra: tuple[str, ...]


PEAK_KINDS: dict[str, PeakKind] = {
    kind.key: kind
    for kind in (
        PeakKind(
            key="process",
            title="Process",
            help="Memory of the process as nvidia-smi shows it: reserved memory, the driver's context and the loaded kernels.",
            of=lambda estimate: estimate.process_bytes,
            extra=(CACHE, OUTSIDE),
        ),
        PeakKind(
            key="allocated",
            title="Allocated",
            help="torch.cuda.max_memory_allocated: tensors, rounded as the allocator rounds them, and library workspaces.",
            of=lambda estimate: estimate.peak_allocated_bytes,
            extra=(),
        ),
        PeakKind(
            key="reserved",
            title="Reserved",
            help="torch.cuda.max_memory_reserved: memory that PyTorch's allocator holds, with its cache.",
            of=lambda estimate: estimate.peak_reserved_bytes,
            extra=(CACHE,),
        ),
    )
}


def title_formatter(titles: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that gives the title of a widget's option. Unknown options are their own title.

    Streamlit may format a value with the function of the previous run, which had other options.
    """
    return lambda key: titles.get(key, str(key))


def parts(estimate: Estimate, kind: PeakKind) -> dict[str, int]:
    """Return the bytes per category at the peak of this kind. Their sum is `kind.of(estimate)`."""
    beyond = {
        CACHE: estimate.peak_reserved_bytes - estimate.peak_allocated_bytes,
        OUTSIDE: estimate.process_bytes - estimate.peak_reserved_bytes,
    }
    return dict(estimate.at_peak) | {name: beyond[name] for name in kind.extra}


# ----------------------------------------------------------------------------------------------- a cell, a kind of peak


FOCUS = "focus"  # session state: the cell that the reader or a link has chosen; absent without a choice
ALL = "all"
CELL = "cell"  # key of the select box of `ask_cell`

Cell = tuple[str, int]  # a dtype and a batch size


def look_at(cell: Cell | None) -> None:
    """Select a cell; None selects the cell that each report proposes."""
    st.session_state[FOCUS] = cell


def in_focus(request: Request) -> Request:
    """Return the request with the selected cell as its focus, if the request asks for that cell."""
    cell: Cell | None = st.session_state.get(FOCUS)
    asked_for = cell is not None and cell[0] in request.dtypes and cell[1] in request.batches
    return replace(request, focus=cell if asked_for else None)


def ask_cell(request: Request, proposed: Cell | None) -> Request:
    """Show a select box of the request's cells and return the request for one: by default the focus, the proposed or first cell."""
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
    """Show the control for the kind of peak, and return the choice. Its label is for screen readers only."""
    titles = {key: kind.title for key, kind in PEAK_KINDS.items()}
    key = choose(
        "Memory", list(titles), "process", key="focus_measure", format_func=title_formatter(titles), label_visibility="collapsed"
    )
    return PEAK_KINDS[key]


def choose(label: str, options: list, default: object, *, key: str, **arguments: Any) -> Any:
    """Show a control and return the chosen option. New options reset it to the default, so that a link shows its sender's view."""
    own_key = key_among(options, key)
    return st.segmented_control(
        label, options, default=default, key=own_key, required=True, persist_state="session", **arguments
    )


def pick(label: str, values: Sequence[str], key: str) -> str | None:
    """Show a control and return one of the values, or None for all. New values reset it to all."""
    options = [ALL, *values]
    chosen = st.selectbox(label, options, key=key_among(options, key), persist_state="session", width=170)
    return None if chosen == ALL else chosen


def key_among(options: list, key: str) -> str:
    """Return the key of a control with these options. New options give a new key.

    The browser may still send a choice for the old options: it belongs to the old control.
    """
    known, edition = st.session_state.get(f"{key}_options", (None, 0))
    if known != options:
        edition += 1
        st.session_state[f"{key}_options"] = (options, edition)
    return f"{key}_{edition}"

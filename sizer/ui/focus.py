"""What the pages look at within a query or its report: one dtype, one batch size, one kind of peak.

The pages share their choice: the cell in the headline of the one is the cell that the other measures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import streamlit as st

from sizer.memory.estimate import Estimate
from sizer.memory.report import Report
from sizer.request import Request
from sizer.ui.peak_kinds import PEAK_KINDS, PeakKind

USUAL_BATCH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Focus:
    """The estimate that the headline states, and all estimates of its dtype."""

    estimate: Estimate
    of_dtype: tuple[Estimate, ...]


def ask_focus(report: Report) -> Focus:
    """The dtype and batch size chosen with two controls in a row; the report must hold at least one estimate."""
    dtypes = list(dict.fromkeys(estimate.dtype for estimate in report.estimates))
    with st.container(horizontal=True, gap="medium"):
        dtype = _ask_dtype(dtypes)
        of_dtype = tuple(estimate for estimate in report.estimates if estimate.dtype == dtype)
        batch = _ask_batch([estimate.batch for estimate in of_dtype])
    return Focus(estimate=report.find(dtype, batch) or of_dtype[0], of_dtype=of_dtype)


def ask_cell(request: Request) -> Request:
    """The request for one dtype and one batch size of `request`, chosen with two controls side by side."""
    dtype, batch = _ask_dtype(list(request.dtypes)), _ask_batch(list(request.batches))
    return replace(request, dtypes=(dtype,), batches=(batch,))


def _ask_dtype(dtypes: list[str]) -> str:
    return choose("Dtype", dtypes, dtypes[0], key="focus_dtype")


def _ask_batch(batches: list[int]) -> int:
    return choose("Batch size", batches, usual_batch(batches), key="focus_batch")


def ask_peak_kind() -> PeakKind:
    """The kind of peak chosen with one control; its label is for screen readers only."""
    titles = {key: kind.title for key, kind in PEAK_KINDS.items()}
    key = choose(
        "Memory", list(titles), "allocated", key="focus_measure", format_func=titles.get, label_visibility="collapsed"
    )
    return PEAK_KINDS[key]


def usual_batch(batches: list[int]) -> int:
    """The largest batch size up to 32, or the smallest of all."""
    return max((batch for batch in batches if batch <= USUAL_BATCH), default=min(batches))


def choose(label: str, options: list, default: object, *, key: str, **arguments: object) -> object:
    """One of the options; the default whenever there are other options than before, so that a link shows what its sender saw."""
    own_key = key_among(options, key)
    return st.segmented_control(
        label, options, default=default, key=own_key, required=True, persist_state="session", **arguments
    )


def key_among(options: list, key: str) -> str:
    """The key of a control with these options: another one whenever they are others than before.

    A choice that the browser sent before it saw the new options belongs to the old control.
    """
    known, edition = st.session_state.get(f"{key}_options", (None, 0))
    if known != options:
        edition += 1
        st.session_state[f"{key}_options"] = (options, edition)
    return f"{key}_{edition}"

"""Tables of a report. Cells with names from a config go through st.dataframe, which shows text as text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import streamlit as st
from pandas.io.formats.style import Styler

from sizer.base.units import format_more
from sizer.query.request import DEFAULT_BATCHES, Request
from sizer.query.text import format_query
from sizer.query.values import DTYPES
from sizer.report.census import Census, TensorRow
from sizer.report.estimate import Estimate
from sizer.report.kv_cache import SERVER_NOTE, describe_growth
from sizer.report.phases import PHASE_ENDS, PHASE_TITLES
from sizer.report.report import Report
from sizer.ui import defaults, links
from sizer.ui.focus import PeakKind, ask_peak_kind, look_at
from sizer.ui.known_batches import largest_batch
from sizer.ui.page_cache import drawn_once, made_once, worked_out
from sizer.ui.styling import GIBIBYTES, MARKS, TINTS, WIDE, scale_for

LARGEST = "Largest batch"
LEGEND = (
    "✓ fits, ! tight: it fits only if the allocator returns cached memory, ? may not fit, ✕ does not fit. "
    "Largest batch: the first number fits, no batch above the second can."
)
NOT_TRACED, TO_COME = "not traced", "…"
LEFT_OUT = f"{MARKS['does not fit']}\N{NO-BREAK SPACE}not computed"
WHY_LEFT_OUT = " Not computed: two smaller batch sizes do not fit. Choose such a cell to compute it."
ABOVE_CELLS = "above_cells"  # key of the row above the table
CELLS = "cells"  # key of the dtype × batch table, and of its selected cell
UNREGISTERED = (
    "These tensors are plain attributes, neither parameters nor buffers: `.to(device)`, `.half()` and `state_dict()` skip them. "
    "They stay on their device, and their device memory depends on the code that uses them."
)
TIED = "These names share one parameter, which counts once."
REAL = (
    "These tensors were created with values although the model was built on meta. They hold host memory while the model is "
    "built, and a very large one would make building slow or impossible."
)


def fits_frame(request: Request, report: Report, kind: PeakKind) -> pd.DataFrame:
    """Return the dtype × batch table as text ("✓ 3.02", in GiB), with the largest batch in the last column."""
    dtypes = shown_dtypes(report)
    rows = [_fits_row(dtype, request, report, kind) for dtype in dtypes]
    return pd.DataFrame(rows, index=pd.Index(dtypes, name="Dtype"), columns=_columns(request))


def shown_dtypes(report: Report) -> tuple[str, ...]:
    """Return the dtypes that have a row: the requested ones, except those without kernels for the model."""
    dtypes: Any = report.request["dtypes"]
    return tuple(dtypes)


def _columns(request: Request) -> list[str]:
    return [*map(str, request.batches), LARGEST]


def _fits_row(dtype: str, request: Request, report: Report, kind: PeakKind) -> list[str]:
    found = {row.batch: row for row in report.estimates if row.dtype == dtype}
    missing = dict.fromkeys(request.batches, NOT_TRACED) | dict.fromkeys(report.left_out(dtype), LEFT_OUT)
    if dtype in report.pending:
        missing = dict.fromkeys(request.batches, TO_COME)
    cells = [_fits_cell(found[batch], kind) if batch in found else missing[batch] for batch in request.batches]
    return [*cells, TO_COME if dtype in report.pending else str(largest_batch(request, report, dtype))]


def _fits_cell(estimate: Estimate, kind: PeakKind) -> str:
    return f"{MARKS[estimate.verdict]}\N{NO-BREAK SPACE}{GIBIBYTES.number(kind.of(estimate))}"


def show_fits(request: Request, report: Report, focus: Estimate | None) -> PeakKind:
    """Show the dtype × batch table, tinted and marked by verdict, and the control for the kind of peak.

    The focus, if there is one, is bold and selected. Selecting another cell, by pointer or arrow keys, moves the focus.
    """
    with st.container(horizontal=True, vertical_alignment="center"):
        st.markdown("**At the peak**, in GiB, per dtype and batch size", width="content")
        kind = ask_peak_kind()
    with st.container(horizontal=True, vertical_alignment="center", key=ABOVE_CELLS):
        # in narrow windows the table's own buttons would cover this row
        st.html(f"<style>@media (max-width: {WIDE - 1}px) {{ .st-key-{ABOVE_CELLS} {{ padding-bottom: 2rem }} }}</style>")
        st.caption("Select a cell to see its details.", width="content")
        _offer_grid(request)
    dtypes = shown_dtypes(report)
    selected = [] if focus is None else [(dtypes.index(focus.dtype), str(focus.batch))]
    st.session_state[CELLS] = {"selection": {"rows": [], "columns": [], "cells": selected}}
    largest = tuple(str(largest_batch(request, report, dtype)) for dtype in dtypes)
    styler = _styled_fits(request, report, kind, focus, largest)
    st.dataframe(
        styler,
        key=CELLS,
        on_select=lambda: _take_cell(dtypes),
        selection_mode="single-cell",
        height="content",
        column_config=dict.fromkeys(_columns(request), st.column_config.TextColumn(alignment="right")),
    )
    st.caption(LEGEND + WHY_LEFT_OUT if any(map(report.left_out, dtypes)) and not report.pending else LEGEND)
    return kind


def _offer_grid(request: Request) -> None:
    """Show a button that asks for all dtypes and batch sizes, if the page chose the current ones."""
    if not defaults.chosen_by_page(request):
        return
    label = f"All dtypes, batch {DEFAULT_BATCHES[0]} to {DEFAULT_BATCHES[-1]}"
    whole = replace(request, dtypes=tuple(DTYPES), batches=DEFAULT_BATCHES, focus=None)
    st.button(label, key="all_cells", type="tertiary", on_click=links.replace_question, args=(format_query(whole),))


@made_once
def _styled_fits(
    request: Request, report: Report, kind: PeakKind, focus: Estimate | None, largest: tuple[str, ...]
) -> Styler:
    """Return the table, made once. `largest` holds the texts of the last column, which later answers may change."""
    return worked_out(style_fits(fits_frame(request, report, kind), report, focus))


def _take_cell(dtypes: tuple[str, ...]) -> None:
    """Move the focus to the selected cell. Cells of other columns leave it unchanged."""
    for row, column in st.session_state[CELLS]["selection"]["cells"]:
        if column.isdecimal():
            look_at((dtypes[row], int(column)))


def style_fits(frame: pd.DataFrame, report: Report, focus: Estimate | None) -> Styler:
    """Return the dtype × batch table tinted by verdict, with the focus in bold."""
    tints = {(row.dtype, str(row.batch)): f"background-color: {TINTS[row.verdict]}" for row in report.estimates}
    if focus is not None:
        tints[focus.dtype, str(focus.batch)] += "; font-weight: 700"
    cells = [[tints.get((dtype, column), "") for column in frame.columns] for dtype in frame.index]
    styles = pd.DataFrame(cells, index=frame.index, columns=frame.columns)
    return frame.style.apply(lambda _: styles, axis=None)


@drawn_once
def show_phases(estimate: Estimate) -> None:
    """Show allocated, peak and reserved memory per phase of the step."""
    scale = scale_for([estimate.peak_reserved_bytes])
    rows = [
        {
            "Phase": PHASE_TITLES.get(use.phase, use.phase),
            "Allocated at its end": scale.of(use.allocated_bytes),
            "Peak": scale.of(use.peak_allocated_bytes),
            "Reserved at its end": scale.of(use.reserved_bytes),
            "What has happened": PHASE_ENDS.get(use.phase, f"{use.phase} has run"),
        }
        for use in estimate.phases
    ]
    number = st.column_config.NumberColumn(format="%.2f")
    st.dataframe(
        pd.DataFrame(rows),
        hide_index=True,
        column_config=dict.fromkeys(("Allocated at its end", "Peak", "Reserved at its end"), number),
    )
    st.caption(
        f"Allocated memory in {scale.name}: at the end of each phase, and the most inside it; reserved at its end."
    )


@drawn_once
def show_kv_cache(report: Report, focus: Estimate | None) -> None:
    """Show the KV cache of one sequence by context length, in the selected dtype."""
    caches = {cache.dtype: cache for cache in report.kv_caches}
    cache = caches.get(focus.dtype if focus else "", report.kv_caches[0])
    scale = scale_for([row.sequence_bytes for row in cache.rows])
    st.markdown(f"**{describe_growth(cache)} and sequence** in {cache.dtype}, as transformers caches it")
    rows = [
        {
            "Context": row.context,
            "One sequence": scale.of(row.sequence_bytes),
            **{f"{number} sequences": scale.of(number * row.sequence_bytes) for number in (8, 32, 128)},
        }
        for row in cache.rows
    ]
    sizes = ("One sequence", *(f"{number} sequences" for number in (8, 32, 128)))
    columns = dict.fromkeys(sizes, st.column_config.NumberColumn(format="%.2f"))
    st.dataframe(pd.DataFrame(rows), hide_index=True, column_config=columns)
    st.caption(f"In {scale.name}. {SERVER_NOTE[0].upper()}{SERVER_NOTE[1:]}: choose the task Serve.")


@drawn_once
def show_communication(estimate: Estimate) -> None:
    """Show the bytes that each rank communicates in a step."""
    scale = scale_for([row.bytes for row in estimate.communication])
    rows = [
        {"Collective": row.kind, "Over": row.group, "Calls": row.calls, scale.name: scale.of(row.bytes)}
        for row in estimate.communication
    ]
    st.dataframe(
        pd.DataFrame(rows), hide_index=True, column_config={scale.name: st.column_config.NumberColumn(format="%.3f")}
    )
    st.caption(
        f"By each rank in a step, in {estimate.dtype} at batch {estimate.batch}, from the trace: bytes of whole tensors, after an "
        "all-gather and before a reduce-scatter. The bytes on the wire depend on NCCL's algorithm."
    )


@drawn_once
def show_loop(report: Report) -> None:
    """Show the memory of other training loops."""
    rows = [
        {
            "In another loop": row.decision,
            "Reserved memory": format_more(row.bytes),
            "Within the range": "yes" if row.in_range else "no",
        }
        for row in report.loop
    ]
    st.dataframe(pd.DataFrame(rows), hide_index=True)
    first = report.loop[0]
    st.caption(
        f"Difference of the reserved peak, in {first.dtype} at batch {first.batch}. The range is that of "
        "the process. For one loop only, use outputs=freed or outputs=kept."
    )


@drawn_once
def show_modules(model: Census) -> None:
    """Show every module's own parameters and buffers, largest first."""
    scale = scale_for([row.parameter_bytes + row.buffer_bytes for row in model.modules])
    rows = sorted(model.modules, key=lambda row: row.parameter_bytes + row.buffer_bytes, reverse=True)
    frame = pd.DataFrame(
        {
            "Module": [row.path or "(root)" for row in rows],
            "Class": [row.class_name for row in rows],
            "Parameters": [row.parameters for row in rows],
            "Trainable": [row.trainable_parameters for row in rows],
            "Buffers": [row.buffers for row in rows],
            scale.name: [scale.of(row.parameter_bytes + row.buffer_bytes) for row in rows],
        }
    )
    whole = st.column_config.NumberColumn(format="localized")
    st.dataframe(
        frame,
        hide_index=True,
        height=min(36 * (len(rows) + 1), 380),
        column_config={
            "Module": st.column_config.TextColumn(width="large", pinned=True),
            "Parameters": whole,
            "Trainable": whole,
            "Buffers": whole,
            scale.name: st.column_config.NumberColumn(format="%.2f"),
        },
    )
    st.caption(
        f"Each module's own tensors as built, without its children; the last column is in {scale.name}."
    )


@drawn_once
def show_tensors(model: Census) -> None:
    """Show tensors that are tied, not registered or not on meta, with the reasons why they matter."""
    st.markdown(
        UNREGISTERED if model.unregistered_tensors else "Every tensor of this model is a parameter or a buffer."
    )
    if model.unregistered_tensors:
        st.dataframe(_tensor_frame(model.unregistered_tensors), hide_index=True)
    if model.real_tensors:
        st.markdown(REAL)
        st.dataframe(_tensor_frame(model.real_tensors), hide_index=True)
    if model.tied_parameters:
        st.markdown(TIED)
        st.dataframe(pd.DataFrame({"Names": [" = ".join(names) for names in model.tied_parameters]}), hide_index=True)


def _tensor_frame(rows: tuple[TensorRow, ...]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "Tensor": [row.name for row in rows],
            "Shape": ["×".join(map(str, row.shape)) or "scalar" for row in rows],
            "Dtype": [row.dtype for row in rows],
            "Device": [row.device for row in rows],
            "Bytes": [row.bytes for row in rows],
            "Why it is listed": [row.why for row in rows],
        }
    )

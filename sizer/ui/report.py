"""A report as a page shows it, from the headline down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import streamlit as st

from sizer.base.units import format_bytes
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.modes import MODES
from sizer.query.request import Request
from sizer.report.estimate import Estimate
from sizer.report.phases import inside
from sizer.report.report import Report
from sizer.tape.tape import CATEGORIES, FROZEN, KV_CACHE
from sizer.ui import charts, remarks, serving, tables
from sizer.ui.capacity import show_capacity
from sizer.ui.compared import offer_comparison
from sizer.ui.decision import show_decision, show_served_decision
from sizer.ui.drawing import draw
from sizer.ui.drawn import drawn_once
from sizer.ui.explanation import show_explanation
from sizer.ui.exports import show_modules_export
from sizer.ui.headline import show_badge, show_counts, show_figures, show_headline
from sizer.ui.links import show_link, show_measure_link
from sizer.ui.peak import show_peak
from sizer.ui.peak_kinds import PeakKind
from sizer.ui.share import show_share
from sizer.ui.tabs import show_tabs
from sizer.ui.variants import offer_variants

DETAILS = "details"  # key of the tabs below an answer, which holds the name of the open one


def show_report(request: Request, report: Report, *, growing: bool) -> None:
    """Show everything a report says, the most important first; whether it is `growing` yet."""
    if report.serve is not None:
        serving.show(request, report, report.serve)
        show_served_decision(request)
        serving.show_details(request, report, report.serve)
        return
    remarks.show_failures(report)
    focus = None if report.focus is None else report.find(report.focus.dtype, report.focus.batch)
    if focus is not None:
        request = replace(request, focus=(focus.dtype, focus.batch))  # links lead to what is looked at
    with st.container():  # one block above the table, so that nothing of the counts stays behind the first estimates
        if focus is None:
            show_counts(report)
        else:
            _show_focus(request, report, focus)
    if focus is not None:
        _show_estimates(request, report, focus, growing)
    elif report.pending:
        tables.show_fits(request, report, None)
    _show_details(request, report, focus)


def _show_focus(request: Request, report: Report, focus: Estimate) -> None:
    show_headline(request, report, focus)
    if MODES[request.mode].generates:
        serving.offer_server(request)
    show_badge(report, focus)
    show_capacity(report, focus)
    show_figures(report, focus)
    remarks.show_advice(report, focus)
    remarks.show_uncounted(report)
    with st.container(horizontal=True, vertical_alignment="center"):
        show_measure_link(request)
        offer_comparison(request)
        offer_variants(request)
    show_share(request, report, focus)


def _show_estimates(request: Request, report: Report, focus: Estimate, growing: bool) -> None:
    kind = tables.show_fits(request, report, focus)
    with st.container():  # there from the first, so that what follows stays where it is
        show_decision(request, focus, to_come=growing)
    left, right = st.columns(2, gap="medium")
    with left:
        _show_peaks(report, focus, kind)
    with right:
        _show_step(report, focus)
    rare = {FROZEN: "frozen_bytes", KV_CACHE: "kv_cache_bytes"}
    used = [
        name for name in CATEGORIES if name not in rare or any(getattr(row, rare[name]) for row in report.estimates)
    ]
    st.html(charts.legend([*used, *kind.extra]))


@drawn_once
def _show_peaks(report: Report, focus: Estimate, kind: PeakKind) -> None:
    st.markdown(f"**Memory by category at the peak**, {focus.dtype}, {kind.title.lower()}")
    of_dtype = [estimate for estimate in report.estimates if estimate.dtype == focus.dtype]
    draw(charts.peak_chart(of_dtype, kind, report.gpu), "peak_chart")
    _say_capacity(report.gpu, max(kind.of(estimate) for estimate in of_dtype))


def _say_capacity(gpu: Gpu, tallest: int) -> None:
    size = format_bytes(gpu.total_bytes)
    if charts.in_sight(tallest, gpu):
        st.caption(f"The dashed line is what one {gpu.name} holds, {size}.")
    else:
        st.caption(f"One {gpu.name} holds {size}, far above this chart.")


@drawn_once
def _show_step(report: Report, estimate: Estimate) -> None:
    over = "the generation" if MODES[str(report.request["mode"])].generates else "one step"
    st.markdown(f"**Memory over {over}**, {estimate.dtype}, batch {estimate.batch}, allocated")
    if not estimate.curve:
        st.caption("This report holds no curve.")
        return
    draw(charts.step_chart(estimate, report.gpu), "step_chart")
    st.text(
        f"Peak in {inside(estimate.peak_phase)}, by {estimate.peak_op} in {estimate.peak_module or 'the model itself'}."
    )


def _show_modules(request: Request, report: Report) -> None:
    tables.show_modules(report.model)
    show_modules_export(request, report)


def _show_details(request: Request, report: Report, focus: Estimate | None) -> None:
    """Show the tabs, of which the open one alone is drawn."""
    phases = (
        partial(tables.show_phases, focus)
        if focus
        else partial(st.caption, "Phases are known where a step was traced.")
    )
    peak = (
        partial(show_peak, request, report, focus)
        if focus
        else partial(st.caption, "The peak is known where a step was traced.")
    )
    details: dict[str, Callable[[], object]] = {"Phases": phases, "At the peak": peak}
    if report.kv_caches:
        details["KV cache"] = partial(tables.show_kv_cache, report, focus)
    if focus and focus.communication:
        details["Communication"] = partial(tables.show_communication, focus)
    if report.loop:
        details["Training loop"] = partial(tables.show_loop, report)
    details |= {
        "Modules": partial(_show_modules, request, report),
        "Tensors": partial(tables.show_tensors, report.model),
        "Not counted": partial(remarks.show_remarks, report),
        "How this was computed": partial(show_explanation, report),
        "Copy link": partial(show_link, request),
    }
    if focus:
        show_tabs(details, key=DETAILS)
    else:
        show_tabs(details, key="details_of_counts", default="Modules")

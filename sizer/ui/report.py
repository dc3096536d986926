"""A report as a page shows it, from the headline down."""

from __future__ import annotations

import streamlit as st

from sizer.catalogue.gpus import Gpu
from sizer.memory.report import Report
from sizer.memory.tape import CATEGORIES
from sizer.request import Request
from sizer.ui import charts, remarks, tables
from sizer.ui.explanation import show_explanation
from sizer.ui.exports import show_exports
from sizer.ui.focus import Focus, ask_focus
from sizer.ui.headline import show_counts, show_headline
from sizer.ui.links import show_link, show_measure_link
from sizer.ui.peak import show_peak
from sizer.ui.peak_kinds import PeakKind
from sizer.ui.phases import inside
from sizer.units import format_bytes


def show_report(request: Request, report: Report) -> None:
    """Show everything a report says, the most important first."""
    remarks.show_failures(report)
    focus = _show_estimates(request, report) if report.estimates else None
    if focus is None:
        show_counts(report)
    _show_details(request, report, focus)


def _show_estimates(request: Request, report: Report) -> Focus:
    above = st.container()
    focus = ask_focus(report)
    with above:
        show_headline(request, report, focus.estimate)
        remarks.show_advice(report, focus.estimate)
        remarks.show_uncounted(report)
        show_measure_link(request)
    kind = tables.show_fits(report, focus.estimate)
    left, right = st.columns(2, gap="medium")
    with left:
        _show_peaks(report, focus, kind)
    with right:
        _show_step(report, focus)
    st.html(charts.legend([*CATEGORIES, *kind.extra]))
    return focus


def _show_peaks(report: Report, focus: Focus, kind: PeakKind) -> None:
    st.markdown(f"**Memory by category at the peak**, {focus.estimate.dtype}, {kind.title.lower()}")
    st.altair_chart(charts.peak_chart(focus.of_dtype, kind, report.gpu), key="peak_chart")
    _say_capacity(report.gpu, max(kind.of(estimate) for estimate in focus.of_dtype))


def _say_capacity(gpu: Gpu, tallest: int) -> None:
    size = format_bytes(gpu.total_bytes)
    if charts.in_sight(tallest, gpu):
        st.caption(f"The dashed line is what one {gpu.name} holds, {size}.")
    else:
        st.caption(f"One {gpu.name} holds {size}, far above this chart.")


def _show_step(report: Report, focus: Focus) -> None:
    estimate = focus.estimate
    st.markdown(f"**Memory over one step**, {estimate.dtype}, batch {estimate.batch}, allocated")
    if not estimate.curve:
        st.caption("This report holds no curve.")
        return
    st.altair_chart(charts.step_chart(estimate, report.gpu), key="step_chart")
    st.text(
        f"Peak in {inside(estimate.peak_phase)}, by {estimate.peak_op} in {estimate.peak_module or 'the model itself'}."
    )


def _show_details(request: Request, report: Report, focus: Focus | None) -> None:
    names = [
        "Phases",
        "At the peak",
        "Modules",
        "Tensors",
        "Assumptions",
        "How this was computed",
        "Copy link",
        "Downloads",
    ]
    tabs = dict(zip(names, st.tabs(names, default="Phases" if focus else "Modules"), strict=True))
    with tabs["Phases"]:
        if focus is None:
            st.caption("Phases are known where a step was traced.")
        else:
            tables.show_phases(focus.estimate)
    with tabs["Modules"]:
        tables.show_modules(report.model)
    with tabs["Tensors"]:
        tables.show_tensors(report.model)
    with tabs["Assumptions"]:
        remarks.show_remarks(report)
    with tabs["How this was computed"]:
        show_explanation(report)
    with tabs["Copy link"]:
        show_link(request)
    with tabs["Downloads"]:
        show_exports(report)
    with tabs["At the peak"]:  # last, since its answer may take a while
        if focus is None:
            st.caption("The peak is known where a step was traced.")
        else:
            show_peak(request, report, focus.estimate)

"""View of a report, from the headline to the downloads. It is greyed out until a new question has figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import streamlit as st

from sizer.base.errors import SizerError
from sizer.base.units import format_bytes
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.modes import MODES
from sizer.query.request import Request
from sizer.query.text import format_query
from sizer.report.estimate import Estimate
from sizer.report.peak import PeakReport
from sizer.report.phases import inside
from sizer.report.report import Report
from sizer.service.client import JobClient
from sizer.tape.tape import CATEGORIES, FROZEN, KV_CACHE
from sizer.ui import charts, remarks, report_tables, server_view, service
from sizer.ui.charts import draw
from sizer.ui.compare_questions import offer_comparison, offer_variants
from sizer.ui.decision_view import show_decision, show_served_decision
from sizer.ui.exports import offer_download, show_modules_export
from sizer.ui.focus import PEAK_KINDS, PeakKind
from sizer.ui.frame import show_tabs
from sizer.ui.headline import sentence, show_badge, show_capacity, show_counts, show_figures, show_headline
from sizer.ui.links import LONGEST_ADDRESS, offer_copy, show_link, show_measure_link
from sizer.ui.page_cache import drawn_once
from sizer.ui.peak_view import show_peak, summary_of
from sizer.ui.picture import draw_picture
from sizer.ui.question_words import file_stem, summary
from sizer.ui.remarks import show_explanation
from sizer.ui.report_tables import fits_frame

DETAILS = "details"  # key of the tabs below an answer; holds the name of the open tab


def show_report(request: Request, report: Report, *, growing: bool) -> None:
    """Show a report, the most important parts first. It may still be `growing`."""
    if report.serve is not None:
        server_view.show(request, report, report.serve)
        with st.container(horizontal=True, vertical_alignment="center", key="share"):
            st.markdown("**Share**", width="content")
            offer_copy(request)
            offer_download("JSON", report.to_json, f"{file_stem(request)}.json", "application/json")
        show_served_decision(request)
        server_view.show_details(request, report, report.serve)
        return
    remarks.show_failures(report)
    focus = None if report.focus is None else report.find(report.focus.dtype, report.focus.batch)
    if focus is not None:
        request = replace(request, focus=(focus.dtype, focus.batch))  # links lead to the selected cell
    with st.container():  # one block above the table: the first estimates replace the counts as a whole
        if focus is None:
            show_counts(report)
        else:
            _show_focus(request, report, focus)
    if focus is not None:
        _show_estimates(request, report, focus, growing)
    elif report.pending:
        report_tables.show_fits(request, report, None)
    _show_details(request, report, focus)


def _show_focus(request: Request, report: Report, focus: Estimate) -> None:
    show_headline(request, report, focus)
    if MODES[request.mode].generates:
        server_view.offer_server(request)
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
    kind = report_tables.show_fits(request, report, focus)
    with st.container():  # shown from the start, so that the parts below do not move
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
    report_tables.show_modules(report.model)
    show_modules_export(request, report)


def _show_details(request: Request, report: Report, focus: Estimate | None) -> None:
    """Show the tabs. Only the open tab is drawn."""
    phases = (
        partial(report_tables.show_phases, focus)
        if focus
        else partial(st.caption, "Phases need a traced step.")
    )
    peak = (
        partial(show_peak, request, report, focus)
        if focus
        else partial(st.caption, "The peak needs a traced step.")
    )
    details: dict[str, Callable[[], object]] = {"Phases": phases, "At the peak": peak}
    if report.kv_caches:
        details["KV cache"] = partial(report_tables.show_kv_cache, report, focus)
    if focus and focus.communication:
        details["Communication"] = partial(report_tables.show_communication, focus)
    if report.loop:
        details["Training loop"] = partial(report_tables.show_loop, report)
    details |= {
        "Modules": partial(_show_modules, request, report),
        "Tensors": partial(report_tables.show_tensors, report.model),
        "Not counted": partial(remarks.show_remarks, report),
        "How this was computed": partial(show_explanation, report),
        "Link and command": partial(show_link, request),
    }
    if focus:
        show_tabs(details, key=DETAILS)
    else:
        show_tabs(details, key="details_of_counts", default="Modules")


# -------------------------------------------------------------------------------------------------- files to take along


PEAK_SECONDS = 120.0  # longer than a job may take
GROWING = "Available when the answer is complete."


def show_share(request: Request, report: Report, estimate: Estimate) -> None:
    """Show the row "Share". Files are made on a click; picture and script need another trace."""
    stem, client = file_stem(request), service.get_client()
    cell = replace(request, dtypes=(estimate.dtype,), batches=(estimate.batch,), focus=None)
    address, growing = (st.context.url or "").rstrip("/"), bool(report.pending)
    summary = summary_of(cell, report, estimate)
    with st.container(horizontal=True, vertical_alignment="center", key="share"):
        st.markdown("**Share**", width="content")
        offer_copy(request)
        offer_download("CSV", lambda: csv_of(report, address), f"{stem}.csv", "text/csv")
        offer_download("JSON", report.to_json, f"{stem}.json", "application/json")
        picture = _when_asked(client, cell, lambda found: draw_picture(summary, estimate, report.gpu, found))
        offer_download("Picture", picture, f"{stem}.png", "image/png", disabled=growing, help=GROWING if growing else None)
        script = _when_asked(client, cell, script_of) if cell.parallel == "none" else _script_of_ranks(client, cell)
        offer_download("Script", script, f"{stem}.py", "text/x-python", disabled=growing, help=GROWING if growing else None)


def csv_of(report: Report, address: str) -> str:
    """Return the estimates as CSV, each with the link to its cell. Too long links are left out."""
    return report.to_csv(address=address, longest_link=LONGEST_ADDRESS)


def script_of(found: PeakReport) -> str:
    """Return the script of the work, or a comment with the reason why there is none."""
    return found.script or f"# There is no script for this work: {found.no_script}\n"


def _script_of_ranks(client: JobClient, cell: Request) -> Callable[[], str]:
    """Return a function that makes the script of several ranks. An error becomes the text of the script."""

    def made() -> str:
        try:
            found = client.submit_script(format_query(cell)).result(timeout=PEAK_SECONDS)
        except SizerError as error:
            return f"# There is no script for this work: {error}\n"
        return found or "# This file could not be made in time. Try again.\n"

    return made


def _when_asked(
    client: JobClient, cell: Request, make: Callable[[PeakReport], str | bytes]
) -> Callable[[], str | bytes]:
    """Return a function that traces the peak of a cell and makes a file. An error becomes the text of the file."""

    def made() -> str | bytes:
        try:
            found = client.submit_peak(format_query(cell)).result(timeout=PEAK_SECONDS)
        except SizerError as error:
            return f"This file could not be made: {error}\n"
        return make(found) if found is not None else "This file could not be made in time. Try again.\n"

    return made


# ------------------------------------------------------------------------------------------------------ the last answer


STALE = "stale"  # of the container
SHOWN = "shown_answer"  # session state: the last request that had figures, and its report
GREY = f"<style>.st-key-{STALE} {{ opacity: 0.45; filter: grayscale(1); pointer-events: none; user-select: none }}</style>"


def has_figures(report: Report) -> bool:
    """Return True if a report has an estimate or a server's figures."""
    return report.focus is not None or report.serve is not None


def keep_answer(request: Request, report: Report) -> None:
    """Keep an answer to show until the next one has figures."""
    st.session_state[SHOWN] = (request, report)


def show_last_answer() -> None:
    """Show the figures of the last answer, if any, greyed out and under the name of its question.

    It holds no widgets: a click would refer to a question that the form no longer has.
    """
    request, report = st.session_state.get(SHOWN, (None, None))
    focus = report and report.focus and report.find(report.focus.dtype, report.focus.batch)
    if focus is None:
        return
    with st.container(key=STALE):
        st.html(GREY)
        st.text(f"The last answer, on another question: {summary(request)}")
        st.markdown(f"**{sentence(request, report, focus)}**")
        show_badge(report, focus)
        show_capacity(report, focus)
        show_figures(report, focus)
        st.table(fits_frame(request, report, PEAK_KINDS["process"]))

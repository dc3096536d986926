"""The last answer, greyed out: shown while a new question has no figures yet, and after an error."""

from __future__ import annotations

import streamlit as st

from sizer.query.request import Request
from sizer.report.report import Report
from sizer.ui.capacity import show_capacity
from sizer.ui.headline import sentence, show_badge, show_figures
from sizer.ui.peak_kinds import PEAK_KINDS
from sizer.ui.question import summary
from sizer.ui.tables import fits_frame

KEY = "stale"  # of the container
SHOWN = "shown_answer"  # session state: the last request that had figures, and its report
GREY = f"<style>.st-key-{KEY} {{ opacity: 0.45; filter: grayscale(1); pointer-events: none; user-select: none }}</style>"


def keep_answer(request: Request, report: Report) -> None:
    """Keep an answer for the time in which the next one has no figures."""
    st.session_state[SHOWN] = (request, report)


def show_last_answer() -> None:
    """Show the figures of the last answer, greyed out and under the name of their own question; nothing without one.

    Nothing in it is a widget: a click would ask about a question that the form no longer has.
    """
    request, report = st.session_state.get(SHOWN, (None, None))
    focus = report and report.focus and report.find(report.focus.dtype, report.focus.batch)
    if focus is None:
        return
    with st.container(key=KEY):
        st.html(GREY)
        st.text(f"The last answer, on another question: {summary(request)}")
        st.markdown(f"**{sentence(request, report, focus)}**")
        show_badge(report, focus)
        show_capacity(report, focus)
        show_figures(report, focus)
        st.table(fits_frame(request, report, PEAK_KINDS["process"]))

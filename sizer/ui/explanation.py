"""How the numbers of this report were computed: kernels, workspaces, stand-ins, what is exact and what is modelled."""

from __future__ import annotations

import streamlit as st

from sizer.report.explanation import sections
from sizer.report.report import Report
from sizer.ui.drawn import drawn_once
from sizer.ui.remarks import show_lines


@drawn_once
def show_explanation(report: Report) -> None:
    """Show how a report was computed, section by section; a sentence where it does not say."""
    if report.explanation is None:
        st.caption("This report does not say how it was computed.")
        return
    for section in sections(report.explanation):
        st.markdown(f"**{section.title}**")
        show_lines(section.lines)

"""The report as files. A click makes the file; the page does not run again."""

from __future__ import annotations

import streamlit as st

from sizer.memory.report import Report


def show_exports(report: Report) -> None:
    """Show the download buttons: estimates and modules as CSV, the whole report as JSON."""
    st.markdown("The same numbers as files, sizes in bytes:")
    with st.container(horizontal=True):
        _offer("Estimates (CSV)", report.to_csv, "estimates.csv", "text/csv")
        _offer("Modules (CSV)", report.modules_csv, "modules.csv", "text/csv")
        _offer("Everything (JSON)", report.to_json, "report.json", "application/json")


def _offer(label: str, make: object, file_name: str, mime: str) -> None:
    st.download_button(
        label, data=make, file_name=f"sizer-{file_name}", mime=mime, on_click="ignore", icon=":material/download:"
    )

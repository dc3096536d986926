"""The report as files. A click makes the file; the page does not run again."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

from sizer.memory.report import Report


def show_exports(report: Report) -> None:
    """Show the download buttons: estimates and modules as CSV, the whole report as JSON."""
    st.markdown("The same numbers as files, sizes in bytes:")
    with st.container(horizontal=True):
        offer_download("Estimates (CSV)", report.to_csv, "estimates.csv", "text/csv")
        offer_download("Modules (CSV)", report.modules_csv, "modules.csv", "text/csv")
        offer_download("Everything (JSON)", report.to_json, "report.json", "application/json")


def offer_download(label: str, make: Callable[[], str], file_name: str, mime: str) -> None:
    """Show the button of one file, which `make` makes when it is clicked."""
    st.download_button(
        label, data=make, file_name=f"sizer-{file_name}", mime=mime, on_click="ignore", icon=":material/download:"
    )

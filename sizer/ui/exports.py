"""The report as files. A click makes the file; the page does not run again."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

from sizer.memory.report import Report
from sizer.request import Request
from sizer.ui.question import file_stem


def show_exports(request: Request, report: Report) -> None:
    """Show the download buttons, files named after the question: estimates and modules as CSV, the whole report as JSON."""
    stem = file_stem(request)
    st.markdown("The same numbers as files, sizes in bytes:")
    with st.container(horizontal=True):
        offer_download("Estimates (CSV)", report.to_csv, f"{stem}.csv", "text/csv")
        offer_download("Modules (CSV)", report.modules_csv, f"{stem}-modules.csv", "text/csv")
        offer_download("Everything (JSON)", report.to_json, f"{stem}.json", "application/json")


def offer_download(label: str, make: Callable[[], str], file_name: str, mime: str) -> None:
    """Show the button of one file, which `make` makes when it is clicked."""
    st.download_button(label, data=make, file_name=file_name, mime=mime, on_click="ignore", icon=":material/download:")

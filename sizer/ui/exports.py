"""Downloads of a report. A click makes the file; the page does not rerun."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

from sizer.query.request import Request
from sizer.report.report import Report
from sizer.ui.question_words import file_stem


def show_modules_export(request: Request, report: Report) -> None:
    """Show the button for the model's modules as CSV, sizes in bytes."""
    offer_download("Modules (CSV)", report.modules_csv, f"{file_stem(request)}-modules.csv", "text/csv")


def offer_download(
    label: str,
    make: Callable[[], str | bytes],
    file_name: str,
    mime: str,
    *,
    disabled: bool = False,
    help: str | None = None,
) -> None:
    """Show the button of a file. `make` creates the file on a click."""
    options = {"on_click": "ignore", "icon": ":material/download:", "disabled": disabled, "help": help}
    st.download_button(label, data=make, file_name=file_name, mime=mime, **options)

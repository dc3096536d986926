"""One row to take an answer along: its link, its figures as CSV and JSON, a picture, and a script that does the work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import streamlit as st

from sizer.base.errors import SizerError
from sizer.query.request import Request
from sizer.query.text import format_query
from sizer.report.estimate import Estimate
from sizer.report.peak import PeakReport
from sizer.report.report import Report
from sizer.service.client import JobClient
from sizer.ui import service
from sizer.ui.exports import offer_download
from sizer.ui.links import LONGEST_ADDRESS, offer_copy
from sizer.ui.peak import summary_of
from sizer.ui.picture import draw_picture
from sizer.ui.question import file_stem

PEAK_SECONDS = 120.0  # longer than a job may take
GROWING = "Known once the answer is whole."


def show_share(request: Request, report: Report, estimate: Estimate) -> None:
    """Show the row. Files are made when they are asked for; picture and script need a trace of their own."""
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
    """Return the estimates as CSV, each with the link to its cell; links that are too long to pass on are left out."""
    return report.to_csv(address=address, longest_link=LONGEST_ADDRESS)


def script_of(found: PeakReport) -> str:
    """Return the script of the work, or the reason why there is none as a comment."""
    return found.script or f"# There is no script for this work: {found.no_script}\n"


def _script_of_ranks(client: JobClient, cell: Request) -> Callable[[], str]:
    """Return a function that makes the script of several ranks; an error becomes its text."""

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
    """Return a function that traces the peak of a cell and makes a file of it; an error becomes the file's text."""

    def made() -> str | bytes:
        try:
            found = client.submit_peak(format_query(cell)).result(timeout=PEAK_SECONDS)
        except SizerError as error:
            return f"This file could not be made: {error}\n"
        return make(found) if found is not None else "This file could not be made in time. Try again.\n"

    return made

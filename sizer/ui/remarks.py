"""Remarks on the figures: refusals, errors, failed traces, advice, notes and explanation.

A stranger's text is never rendered as markdown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import streamlit as st

from sizer.base.errors import (
    BuildError,
    ConfigError,
    DeviceError,
    HubError,
    JobError,
    Refusal,
    RequestError,
    SizerError,
    TraceError,
)
from sizer.report.advice import advise
from sizer.report.estimate import Estimate
from sizer.report.explanation import sections
from sizer.report.report import Report
from sizer.ui.page_cache import drawn_once
from sizer.ui.report_tables import shown_dtypes

TITLES: dict[type[SizerError], str] = {
    RequestError: "This query was refused",
    ConfigError: "This config cannot be used",
    HubError: "The config could not be fetched from the hub",
    BuildError: "The architecture could not be built",
    TraceError: "The step could not be traced",
    DeviceError: "This device cannot be used",
    JobError: "The estimate was not finished",
}


def show_error(error: SizerError, titles: Mapping[type[SizerError], str] = TITLES) -> None:
    """Show an error under the title of its kind: the given value, the allowed values and the remedy."""
    title = next((titles[kind] for kind in type(error).__mro__ if kind in titles), "Refused")
    with st.container(border=True):
        st.error(f"{title}.")
        if refusals := getattr(error, "refusals", ()):
            for refusal in refusals:
                _show_parts(refusal.key, refusal.given, refusal.allowed, refusal.todo)
        else:
            _show_parts(error.what, error.given, error.allowed, error.todo)


def show_link_refusals(refusals: Sequence[Refusal]) -> None:
    """Show the refused parts of the opened link, if any."""
    if refusals:
        with st.container(border=True):
            st.warning("Parts of this link were refused and have their defaults. All other parts are as in the link.")
            show_lines(map(str, refusals))


def _show_parts(what: str, given: str | None, allowed: str | None, todo: str | None) -> None:
    parts = {"Given": given, "Allowed": allowed, "What to do": todo}
    show_lines([what, *(f"{word}: {part}" for word, part in parts.items() if part)])


def show_lines(lines: Iterable[str]) -> None:
    """Show lines of plain text without gaps, if there are any."""
    if lines := list(lines):
        with st.container(gap="xxsmall"):
            for line in lines:
                st.text(line)


def show_failures(report: Report) -> None:
    """Show the dtypes whose step could not be traced, or that no batch size could be replayed, with the reasons."""
    if report.failures:
        with st.container(border=True):
            st.warning(
                "The model was counted, but its step could not be traced. The counts below stand; the peaks are missing."
            )
            for reason in dict.fromkeys(report.failures.values()):
                dtypes = [dtype for dtype, why in report.failures.items() if why == reason]
                st.text(f"{', '.join(dtypes)}: {reason}")
    elif not report.estimates and not report.pending:
        with st.container(border=True):
            st.warning(
                "The step was traced, but no batch size that was asked for could be replayed. The counts below stand."
            )
            show_lines(note for note in report.notes if note.startswith(shown_dtypes(report)))


def show_uncounted(report: Report) -> None:
    """Show the number of parts that are not counted, and the tab that lists them."""
    if count := len(report.uncounted):
        things = "1 thing is" if count == 1 else f"{count} things are"
        st.caption(f"{things} not counted: see the tab Not counted.")


@drawn_once
def show_remarks(report: Report) -> None:
    """Show the parts that are not counted, the assumptions, the notes, and the versions of the report."""
    for title, lines in (
        ("Not counted", report.uncounted),
        ("Assumed", report.assumptions),
        ("About this report", report.notes),
        ("Versions", [", ".join(f"{name} {version}" for name, version in report.versions.items())]),
    ):
        if lines:
            st.markdown(f"**{title}**")
            show_lines(lines)


def show_advice(report: Report, estimate: Estimate) -> None:
    """Show the verdict on an estimate, with the free memory or the place where it fails."""
    st.text(" ".join(advise(report, estimate)))


@drawn_once
def show_explanation(report: Report) -> None:
    """Show the sections of a report's explanation, or a sentence if it has none."""
    if report.explanation is None:
        st.caption("This report does not say how it was computed.")
        return
    for section in sections(report.explanation):
        st.markdown(f"**{section.title}**")
        show_lines(section.lines)

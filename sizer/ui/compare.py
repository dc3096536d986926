"""The page Compare: fields for the questions, then tables and charts of the answers that have arrived."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import streamlit as st

from sizer.base.errors import RequestError
from sizer.base.units import pluralize
from sizer.query.request import Request
from sizer.query.text import FEWEST, MOST, check_number, format_query, key_differences
from sizer.report.report import Report
from sizer.report.side_by_side import SideBySide, side_by_side, side_of
from sizer.tape.tape import CATEGORIES
from sizer.ui import charts, compare_questions, service
from sizer.ui.charts import draw
from sizer.ui.compare_figures import (
    bars_chart,
    capacities,
    clip,
    devices,
    focused,
    growth_chart,
    show_figures,
    show_keys,
)
from sizer.ui.compare_questions import ask_questions
from sizer.ui.exports import offer_download
from sizer.ui.focus import PeakKind, ask_peak_kind
from sizer.ui.page_cache import drawn_once
from sizer.ui.question_words import model_name, slug
from sizer.ui.remarks import show_error, show_lines
from sizer.ui.service import LINE_HEIGHT, POLL_SECONDS, Answer, Growth, Watch, hold_jobs
from sizer.ui.turns import give_back

ENDED = "compared_answers"  # session state: by query, the answers that have ended
Requests = Mapping[int, Request]  # by the question's number
Answers = Mapping[int, Answer]


def show_compare() -> None:
    """Show the fields, and the comparison as soon as there are two questions."""
    texts = compare_questions.open_questions()
    if len(texts) > MOST:
        _refuse_number(texts)
    requests = ask_questions(texts[:MOST])
    if len(requests) < FEWEST:
        _show_beginning()
        return
    place = st.container()  # of the progress line, so that what follows stays where it is
    answers = _answers(requests)
    _show_answers(requests, answers)
    with place:
        _follow(requests, answers)


def _refuse_number(texts: list[str]) -> None:
    try:
        check_number(texts)
    except RequestError as error:
        show_error(error)


def _show_beginning() -> None:
    st.info("Compare two to four questions. Name them above, or come from a model's page.")
    example = "ResNet-50 with and without checkpointing"
    st.button(example, type="tertiary", on_click=compare_questions.keep_questions, args=(compare_questions.TWICE,))


# --------------------------------------------------------------------------------------------------------------- answers


def _answers(requests: Requests) -> dict[int, Answer]:
    """Return the current answer to each question. Ended answers are not asked for again."""
    known = st.session_state.get(ENDED, {})
    queries = {number: format_query(request) for number, request in requests.items()}
    answers = {number: known.get(query) or service.ask(requests[number]) for number, query in queries.items()}
    st.session_state[ENDED] = {queries[number]: answer for number, answer in answers.items() if answer.job is None}
    return answers


def _follow(requests: Requests, answers: Answers) -> None:
    """Show the progress, and run the page again when an answer has grown."""
    missing = {number: answer for number, answer in answers.items() if answer.missing}
    show_lines(
        f"Question {number} {'is not whole' if answer.report else 'has no figures'}: {answer.missing}"
        for number, answer in missing.items()
    )
    if missing:
        st.button("Try again", key="again", on_click=_forget)
    running = {format_query(requests[number]): answer for number, answer in answers.items() if answer.job is not None}
    with st.container(height=LINE_HEIGHT, border=False, vertical_alignment="center"):
        if not running:
            st.caption(pluralize(len(answers), "question"))
            return
        _wait(running, len(answers))
    settled = {query: answer.settled() for query, answer in running.items()}
    ended = {query: answer for query, answer in settled.items() if answer.job is None}
    st.session_state[ENDED] = st.session_state.get(ENDED, {}) | ended
    st.rerun()


def _wait(running: Mapping[str, Answer], count: int) -> None:
    """Wait until an answer has grown. Streamlit may end this run at each update if a newer run waits."""
    jobs = {query: answer.job for query, answer in running.items() if answer.job is not None}
    with hold_jobs(*jobs.values()):
        with st.container(horizontal=True, vertical_alignment="center"):
            st.button("Stop", key="stop", on_click=_stop, args=(running,))
            line = st.empty()
        give_back()
        share, watches = POLL_SECONDS / len(running), {query: Watch() for query in running}
        growths = {query: Growth(answer, time.monotonic()) for query, answer in running.items()}
        while not any(job.waited(share) or growths[query].is_due() for query, job in jobs.items()):
            said = ((job.progress or "waiting") + watches[query].stalled(job) for query, job in jobs.items())
            progress = ", ".join(dict.fromkeys(said))
            line.text(f"{count - len(running)} of {pluralize(count, 'question')} · {progress}")


def _stop(running: Mapping[str, Answer]) -> None:
    for answer in running.values():
        if answer.job is not None:
            answer.job.cancel()
    stopped = {query: replace(answer, job=None, missing="you stopped it.") for query, answer in running.items()}
    st.session_state[ENDED] = st.session_state.get(ENDED, {}) | stopped


def _forget() -> None:
    ended = st.session_state.get(ENDED, {})
    st.session_state[ENDED] = {query: answer for query, answer in ended.items() if not answer.missing}


# ----------------------------------------------------------------------------------------------------------------- shown


def _show_answers(requests: Requests, answers: Answers) -> None:
    numbers = list(requests)
    sides = [side_of(requests[number], answers[number].report, answers[number].missing) for number in numbers]
    found = side_by_side(list(requests.values()), sides)
    st.markdown("**What differs**")
    show_keys(found, numbers)
    st.markdown("**Selected cell of each question**")
    show_figures(found, numbers)
    show_lines(
        f"Question {number} could not be traced: {side.error}"
        for number, side in zip(numbers, found.questions, strict=True)
        if side.error and not answers[number].missing
    )
    reports = {number: answer.report for number, answer in answers.items() if answer.report is not None}
    if focused(reports):
        _show_charts(reports, headings(requests))
    _show_files(requests, found)


def _show_charts(reports: Mapping[int, Report], titles: Mapping[int, str]) -> None:
    with st.container(horizontal=True, vertical_alignment="center"):
        st.markdown("**At the peak**", width="content")
        kind = ask_peak_kind()
    _show_drawn(reports, titles, kind)


@drawn_once
def _show_drawn(reports: Mapping[int, Report], titles: Mapping[int, str], kind: PeakKind) -> None:
    cells = focused(reports)
    left, right = st.columns(2, gap="medium")
    with left:
        st.markdown("**Memory over batch size**, in the selected dtype")
        draw(growth_chart(reports, titles, kind), "growth_chart")
        tallest = max(
            kind.of(row) for number in cells for row in reports[number].estimates if row.dtype == cells[number].dtype
        )
        st.caption(capacities(devices(reports), tallest))
    with right:
        st.markdown("**Memory by category**, of the selected cell")
        draw(bars_chart(reports, kind), "bars_chart")
        st.caption(capacities(devices(reports), max(map(kind.of, cells.values()))))
    st.html(charts.legend([*CATEGORIES, *kind.extra]))


def _show_files(requests: Requests, found: SideBySide) -> None:
    asked = list(requests.values())
    offer_download("These figures (CSV)", found.to_csv, f"{file_stem(asked)}.csv", "text/csv")
    compare_questions.offer_copy(asked)
    with st.expander("Link and command"):
        compare_questions.show_link(asked)


def headings(requests: Requests) -> dict[int, str]:
    """Return each question's name in legends: its number and its differences from the other questions."""
    words = compare_questions.titles(list(requests.values()))
    if all(words):
        return {number: f"{number} · {title}" for number, title in zip(requests, words, strict=True)}
    differ, _ = key_differences(list(requests.values()))
    titles = {}
    for place, (number, request) in enumerate(requests.items()):
        values = {key: clip(value[place]) for key, value in differ.items()}
        if "arch" in values:
            values["arch"] = clip(model_name(request))
        facts = ", ".join(value if key == "arch" else f"{key} {value}" for key, value in values.items())
        titles[number] = clip(f"{number} · {facts or model_name(request)}")
    return titles


def file_stem(requests: list[Request]) -> str:
    """Return the beginning of a file's name for the questions ("sizer-compare-resnet50-by-checkpointing-gpu")."""
    names = dict.fromkeys(request.name.rpartition("/")[2] or "config" for request in requests)
    keys = [key for key in key_differences(requests)[0] if key != "arch"]
    return slug("-".join(["sizer-compare", *names, *(["by", *keys] if keys else [])]))

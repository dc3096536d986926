"""Access of the pages to the job server: ask, show progress, and leave the job when the query changes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import streamlit as st
from streamlit.runtime.scriptrunner import StopException, get_script_run_ctx

from sizer.base.errors import HubError, PipelineError, SizerError
from sizer.base.units import pluralize
from sizer.catalogue.pipelines import pipeline_preset_of
from sizer.catalogue.presets import PRESETS
from sizer.query.request import Request
from sizer.query.text import as_pipeline, format_query, parse_query
from sizer.report.report import Report
from sizer.service.client import JobClient, shared_client
from sizer.service.fair_queue import Visitor
from sizer.service.job import Job
from sizer.ui.defaults import chosen_by_page
from sizer.ui.focus import Cell
from sizer.ui.turns import give_back, result_of, waited

LINE_HEIGHT = 40  # pixels of the progress line, with and without text
AT_ONCE_SECONDS = 0.15  # faster figures need no greyed-out answer
POLL_SECONDS = 0.2  # between two looks at the requests of a waiting page's browser
LONGEST_SILENCE_SECONDS = 2.0  # between two progress messages: in a crowd they take more time than the drawing
REDRAW_SECONDS = 1.0  # between two drawings of a growing answer
SETTLE_SECONDS = 0.5  # from a part to its drawing: the first figures, or the end, often follow sooner
MODELS_SECONDS = 20.0
STALLED_SECONDS = 30.0  # without progress, after which the page says what it waits for
REPORTED = "reported"  # session state: the last query and its report
ANSWER = "answer"  # session state: the last ended answer
FAILED = "failed"  # session state: recent answers that ended with an error, by query
MOST_FAILED = 16
BEGAN = "began"  # session state: the current query, and the time of its start
STOPPED = "stopped"  # session state: the query that the reader stopped


def get_client() -> JobClient:
    """Return the job client of this process, for the page's visitor. Tests replace this function."""
    return shared_client().on_behalf_of(_visitor())


def _visitor() -> Visitor:
    """Return the visitor of the running page, or an anonymous one outside of a page."""
    context = get_script_run_ctx(suppress_warning=True)
    if context is None:
        return Visitor()
    return Visitor(address=st.context.ip_address or "", session=context.session_id)


@contextmanager
def hold_jobs(*jobs: Job) -> Iterator[None]:
    """Keep the jobs of the context. At its end they are left, and cancelled at once if their reader has gone."""
    try:
        yield
    except StopException:  # the page was closed; for a newer run of it Streamlit raises RerunException
        for job in jobs:
            job.cancel()
        raise
    finally:
        for job in jobs:
            job.leave()


def listed_names() -> dict[str, tuple[str, ...]]:
    """Return the names that installed packages build, by source; empty until the job server has sent them."""
    return _names(timeout=0)


def await_names() -> None:
    """Rerun the page once the names have arrived. Call it at the end of a page that was shown without them."""
    if _names(timeout=MODELS_SECONDS):
        st.rerun()


def _names(timeout: float) -> dict[str, tuple[str, ...]]:
    job = get_client().submit_models()
    try:
        models = result_of(job, timeout)
    except SizerError:  # the page shows the error when it needs the job server for more than a list
        return {}
    return {source: tuple(row["name"] for row in rows) for source, rows in (models or {}).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """State of a query: the report so far (None at first), and the running job.

    Without a job the answer has ended. `missing` is the reason if the report is incomplete, and `error` the job's error, if any.
    `focus` is the requested cell, None if the report chooses it. With `stops` batch sizes may be left out, see `JobClient.submit`.
    """

    query: str
    focus: Cell | None = None
    report: Report | None = None
    job: Job | None = None
    parts: int = 0
    missing: str = ""
    error: SizerError | None = None
    stops: bool = False

    def lacks(self, cell: Cell | None) -> bool:
        """Return True if a cell was left out of the report."""
        return self.stops and cell is not None and self.report is not None and cell[1] in self.report.left_out(cell[0])

    def settled(self) -> Answer:
        """Return the answer with the job's result or error; unchanged while the job runs."""
        if self.job is None or not self.job.done:
            return self
        try:
            return replace(self, job=None, report=self.job.result(timeout=0))
        except SizerError as error:
            return replace(self, job=None, report=self.job.partial, missing=str(error), error=error)


def begin(request: Request) -> Answer:
    """Return the current answer to a request. A page shows it and ends with `follow`. Raises SizerError if there is no figure.

    The session keeps the last answer, also an error. Other views of it submit no job. An ended question is submitted again only by
    "Try again", or for a cell that was left out.
    """
    query = format_query(replace(request, focus=None))
    known = st.session_state.get(ANSWER)
    if known is None or known.query != query:
        known = st.session_state.get(FAILED, {}).get(query)
    unasked = known is None or (known.focus is not None and not request.focus and known.error is None)
    if known is None or unasked or known.lacks(request.focus):
        known = ask(request)
        if known.job is None:
            _remember(known)
    if known.error is not None and known.report is None:
        raise known.error
    return replace(known, report=known.report and known.report.focused(request.focus))


def begin_or_preset(request: Request) -> tuple[Request, Answer]:
    """Return the request and the current answer.

    If the hub does not answer, the preset of the repository does, if there is one. A repository with a diffusion pipeline is
    answered by that pipeline.

    Raises SizerError if there is no figure.
    """
    try:
        return request, begin(request)
    except PipelineError as error:
        st.info(f"{error.what}. The answer is that of the pipeline's call.")
        return begin_or_preset(parse_query(as_pipeline(format_query(replace(request, focus=None)))))
    except HubError as error:
        if (preset := _preset_of(request)) is None:
            raise
        source, name, title = preset
        why = f"The config of {request.name} could not be fetched ({error.what})."
        st.info(f"{why} The answer is that of the preset {title}.")
        request = replace(request, source=source, name=name, revision=None)
        return request, begin(request)


def _preset_of(request: Request) -> tuple[str, str, str] | None:
    """Return the source, the name and the title of the preset of the repository that a request names; None without one."""
    if not request.is_fetched or request.revision is not None:
        return None
    if request.source == "diffusers":
        pipeline = pipeline_preset_of(request.name)
        return None if pipeline is None else ("diffusers", pipeline, pipeline)
    name = request.name.lower()
    return next((("hf", one.key, one.title) for one in PRESETS.values() if one.hub_id.lower() == name), None)


def _remember(answer: Answer) -> None:
    """Keep an ended answer as the session's last one. Keep errors by query, too, for a return to their question."""
    st.session_state[ANSWER] = answer
    if answer.error is not None:
        failed = st.session_state.get(FAILED, {}) | {answer.query: answer}
        st.session_state[FAILED] = dict([*failed.items()][-MOST_FAILED:])


def ask(request: Request) -> Answer:
    """Return the job server's answer to a request, or its error, after a short wait for its first figures."""
    stops = request.focus is None and chosen_by_page(request)  # the selected cell is always computed
    answer = Answer(query=format_query(replace(request, focus=None)), focus=request.focus, stops=stops)
    try:
        job = get_client().submit(format_query(request), stops=stops)
    except SizerError as error:
        return replace(answer, missing=str(error), error=error)
    try:
        if not _has_figures(job):
            waited(job, AT_ONCE_SECONDS, partial(_has_figures, job))
        report = job.result(timeout=0)
    except SizerError as error:
        return replace(answer, report=job.partial, missing=str(error), error=error)
    if report is None:
        return replace(answer, parts=job.parts, report=job.partial, job=job)
    return replace(answer, report=report)


def follow(answer: Answer) -> None:
    """Show the progress of the answer, and rerun the page when it has grown. Show the missing parts of an incomplete answer.

    A complete answer shows nothing. The line keeps its height, so that the parts below do not move.

    Streamlit may end this run at each update, if a newer run waits or the page was closed. The job is then left, and ends soon
    unless the newer run continues it.
    """
    if answer.missing:
        st.warning(f"This answer is not whole{_left_out(answer.report)}: {answer.missing}")
        st.button("Try again" if answer.error else "Go on", key="again", on_click=_forget)
        return
    with st.container(height=LINE_HEIGHT, border=False, vertical_alignment="center"):
        if answer.job is not None:
            _follow(answer)


def offer_again(error: SizerError) -> None:
    """Show the button "Try again" if the error is the answer to a question."""
    known = st.session_state.get(ANSWER), *st.session_state.get(FAILED, {}).values()
    if any(answer is not None and answer.error is error for answer in known):
        st.button("Try again", key="again", on_click=_forget)


def _follow(answer: Answer) -> None:
    job = answer.job
    assert job is not None, "it goes on"
    query, since = st.session_state.get(BEGAN, ("", 0.0))
    if query != answer.query:
        since = time.monotonic()
        st.session_state[BEGAN] = (answer.query, since)
    with hold_jobs(job):
        with st.container(horizontal=True, vertical_alignment="center"):
            st.button("Stop", key="stop", on_click=_stop_answer, args=(answer,))
            line = st.empty()
        give_back()
        watch = Watch()
        drawn = said = time.monotonic()
        growth = Growth(answer, drawn)
        while not job.waited(POLL_SECONDS, growth.is_due) and not growth.is_due():
            if time.monotonic() - said < _silence_seconds(drawn):
                st.session_state.get(BEGAN)  # Streamlit ends this run here, if a newer run waits or the page was closed
                continue
            said = time.monotonic()
            line.text(f"{how_far(answer, said - since)}{watch.stalled(job)}")
    if (settled := answer.settled()).job is None:
        _remember(settled)
    st.rerun()


def _silence_seconds(since: float) -> float:
    """Return the seconds until the next progress message. They grow with the time waited."""
    return min((time.monotonic() - since) / 10, LONGEST_SILENCE_SECONDS)


class Growth:
    """Detector of new parts of an answer that was drawn at a time of `time.monotonic`."""

    def __init__(self, answer: Answer, drawn: float) -> None:
        self._answer, self._drawn = answer, drawn
        self._came: float | None = None  # when a part was seen that is not drawn

    def is_due(self) -> bool:
        """Return True if the page should be redrawn: at once for the first figures, later for other parts."""
        job, report = self._answer.job, self._answer.report
        if job is None or job.parts == self._answer.parts:
            return False
        if not (report is not None and report.estimates) and _has_figures(job):
            return True
        now = time.monotonic()
        if self._came is None:
            self._came = now
        return now - self._drawn >= REDRAW_SECONDS and now - self._came >= SETTLE_SECONDS


def _has_figures(job: Job) -> bool:
    """Return True if a job has sent its first estimates."""
    return job.partial is not None and bool(job.partial.estimates)


def proposed_focus(request: Request) -> Cell | None:
    """Return the cell that the session's last answer proposes, if it was on the same question; else None."""
    known = st.session_state.get(ANSWER)
    if known is None or known.query != format_query(replace(request, focus=None)) or known.report is None:
        return None
    return known.report.focus and (known.report.focus.dtype, known.report.focus.batch)


class Watch:
    """Detector of jobs without progress."""

    def __init__(self) -> None:
        self._said, self._since = "", time.monotonic()

    def stalled(self, job: Job) -> str:
        """Return the last message of a job without progress for STALLED_SECONDS; else an empty text."""
        now, said = time.monotonic(), job.progress
        if said != self._said:
            self._said, self._since = said, now
        seconds = now - self._since
        return f" · nothing new for {seconds:.0f} s: {said or 'the job server'}" if seconds >= STALLED_SECONDS else ""


def how_far(answer: Answer, seconds: float) -> str:
    """Return the finished and the remaining work in one line."""
    facts = [f"{seconds:.0f} s", (answer.job.progress if answer.job is not None else "") or "waiting"]
    if (report := answer.report) is not None:
        facts = [_how_many(report), *([f"headline so far: {cell}"] if (cell := _cell_so_far(answer, report)) else []), *facts]
    return " · ".join(facts)


def _cell_so_far(answer: Answer, report: Report) -> str:
    """Return the cell of the headline if another batch size may replace it; empty if the reader has chosen it."""
    request: Mapping[str, Any] = report.request
    at, batches = report.focus, request["batches"]
    if answer.focus is not None or at is None or sum(row.dtype == at.dtype for row in report.estimates) == len(batches):
        return ""
    return f"{at.dtype}, batch {at.batch:,}"


def _how_many(report: Report) -> str:
    """Return the number of finished and requested cells, and the dtypes without figures."""
    request: Mapping[str, Any] = report.request
    asked = len(request["dtypes"]) * len(request["batches"])
    left, _ = _to_come(report)
    to_come = f", still to come: {', '.join(left)}" if left else ""
    return f"{len(report.estimates):,} of {pluralize(asked, 'cell')}{to_come}"


def _left_out(report: Report | None) -> str:
    """Return the missing parts of a report; empty if it is complete."""
    if report is None:
        return ""
    dtypes, parts = _to_come(report)
    missing = [f"{', '.join(dtypes)} missing"] if dtypes else []
    missing += [f"the largest batch in {', '.join(parts)} not searched"] if parts else []
    return "".join(f", {text}" for text in missing)


def _to_come(report: Report) -> tuple[list[str], list[str]]:
    """Return the dtypes without figures, and the incomplete ones, which may lack only the largest batch."""
    there = {row.dtype for row in report.estimates}
    return [name for name in report.pending if name not in there], [name for name in report.pending if name in there]


def _stop_answer(answer: Answer) -> None:
    if answer.job is not None:
        answer.job.cancel()
    st.session_state[ANSWER] = replace(answer, job=None, missing="you stopped it.")


def _forget() -> None:
    st.session_state.pop(ANSWER, None)
    st.session_state.pop(FAILED, None)


def report_on(request: Request) -> Report | None:
    """Return the report on a request and show progress meanwhile; None if the reader stopped it. Raises SizerError.

    The session keeps the last report. Other views of it submit no job.
    """
    with st.container():  # shown with and without progress, so that the parts below do not move
        return _report_on(request)


def _report_on(request: Request) -> Report | None:
    query = format_query(request)
    answered, report = st.session_state.get(REPORTED, (None, None))
    if answered == query:
        if isinstance(report, SizerError):
            st.button("Try again", key="again", on_click=_forget_report)
            raise report
        return report
    if st.session_state.get(STOPPED) == query:
        _offer_again()
        return None
    try:
        job = get_client().submit(query)
        try:
            report = result_of(job, AT_ONCE_SECONDS) or _watch(job, query)
        finally:
            job.cancel()  # a rerun (another query, a closed tab) also leaves here
    except SizerError as error:
        st.session_state[REPORTED] = (query, error)
        raise
    st.session_state[REPORTED] = (query, report)
    return report


def _forget_report() -> None:
    st.session_state.pop(REPORTED, None)


def _watch(job: Job, query: str) -> Report:
    """Return the job's report. Streamlit may end this run at each update, if a newer run waits."""
    began = time.monotonic()
    place = st.empty()
    try:
        with place.container(), st.status("Working", expanded=True):
            line = st.empty()
            st.button("Stop", key="stop", on_click=_stop, args=(query,))
            watch = Watch()
            while (report := result_of(job, POLL_SECONDS)) is None:
                line.text(f"{job.progress or 'waiting'} · {time.monotonic() - began:.0f} s{watch.stalled(job)}")
    except SizerError:
        place.empty()
        raise
    place.empty()
    return report


def _stop(query: str) -> None:
    st.session_state[STOPPED] = query


def _go_on() -> None:
    st.session_state.pop(STOPPED, None)


def _offer_again() -> None:
    st.info("You stopped this estimate.")
    st.button("Size it", key="again", on_click=_go_on)

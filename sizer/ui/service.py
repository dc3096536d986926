"""The page's one way to the job server: ask, show what is being done, give up when the query changes."""

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
from sizer.base.units import counted
from sizer.catalogue.pipelines import pipeline_preset_of
from sizer.catalogue.presets import PRESETS
from sizer.query.request import Request
from sizer.query.several import as_pipeline
from sizer.query.text import format_query, parse_query
from sizer.report.report import Report
from sizer.service.client import JobClient, shared_client
from sizer.service.fair_queue import Visitor
from sizer.service.job import Job
from sizer.ui.defaults import chosen_by_page
from sizer.ui.focus import Cell
from sizer.ui.turns import give_back, result_of

LINE_HEIGHT = 40  # pixels of the progress line, the same while there is something to say and when it has ended
AT_ONCE_SECONDS = 0.15  # a report that comes this fast needs no progress box
POLL_SECONDS, LONGEST_POLL_SECONDS = 0.2, 0.5  # each poll of a waiting page is a message to its browser
REDRAW_SECONDS = 1.0  # before a page that has figures draws a larger part of its answer
MODELS_SECONDS = 20.0
STALLED_SECONDS = 30.0  # without a new sign of a job, after which the page says what it waits for
REPORTED = "reported"  # session state: the last query and its report
ANSWER = "answer"  # session state: the last answer that has ended
FAILED = "failed"  # session state: by query, the last answers that have ended with an error
MOST_FAILED = 16
BEGAN = "began"  # session state: the query that is being answered, and since when
STOPPED = "stopped"  # session state: the query whose job the reader stopped


def get_client() -> JobClient:
    """The job client of this process, on behalf of who looks at the page. Tests put another one in its place."""
    return shared_client().on_behalf_of(_visitor())


def _visitor() -> Visitor:
    """Return the visitor of the page, or an anonymous one if no page is being run."""
    context = get_script_run_ctx(suppress_warning=True)
    if context is None:
        return Visitor()
    return Visitor(address=st.context.ip_address or "", session=context.session_id)


@contextmanager
def held(*jobs: Job) -> Iterator[None]:
    """Wait for jobs within; at the end they are left, and given up at once where their reader has gone."""
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
    """The names that the installed packages build, by source; empty while the job server has not said."""
    return _names(timeout=0)


def await_names() -> None:
    """Run the page again once the names are there. For the end of a page that was shown without them."""
    if _names(timeout=MODELS_SECONDS):
        st.rerun()


def _names(timeout: float) -> dict[str, tuple[str, ...]]:
    job = get_client().submit_models()
    try:
        models = result_of(job, timeout)
    except SizerError:  # the page says so where it needs the job server for more than a list
        return {}
    return {source: tuple(row["name"] for row in rows) for source, rows in (models or {}).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """State of a query: its report so far, None if there is none yet, and the job that continues.

    Without a job it has ended: `missing` says why if that was before the report was whole, and `error` is the job's own, if it had
    one. `focus` is the cell that was asked for, None where the report has its own choice in focus. With `stops` batch sizes may be
    left out, see `JobClient.submit`.
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
        """Return what the job has come to, its error if it had one; the answer itself while the job goes on."""
        if self.job is None or not self.job.done:
            return self
        try:
            return replace(self, job=None, report=self.job.result(timeout=0))
        except SizerError as error:
            return replace(self, job=None, report=self.job.partial, missing=str(error), error=error)


def begin(request: Request) -> Answer:
    """Return what is known on a request by now; a page shows it and ends with `follow`. Raises SizerError where nothing came of it.

    The last answer stays with the session, an error too: looking at it from another side asks nobody, and a question whose
    answer has ended is asked again only by "Try again", or for a cell that was left out.
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
    """Return the request and what is known on it. A repository that the hub does not give is answered by its preset, if it has one,
    and a repository that holds a diffusion pipeline by that pipeline.

    Raises SizerError if nothing came of it.
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
    """Keep an answer that has ended as the session's last one, and an error beside it for when the reader comes back to it."""
    st.session_state[ANSWER] = answer
    if answer.error is not None:
        failed = st.session_state.get(FAILED, {}) | {answer.query: answer}
        st.session_state[FAILED] = dict([*failed.items()][-MOST_FAILED:])


def ask(request: Request) -> Answer:
    """Return what the job server knows on a request after a moment, its error if it has one."""
    stops = request.focus is None and chosen_by_page(request)  # what somebody looks at is computed
    answer = Answer(query=format_query(replace(request, focus=None)), focus=request.focus, stops=stops)
    try:
        job = get_client().submit(format_query(request), stops=stops)
    except SizerError as error:
        return replace(answer, missing=str(error), error=error)
    try:
        report = result_of(job, AT_ONCE_SECONDS)
    except SizerError as error:
        return replace(answer, report=job.partial, missing=str(error), error=error)
    if report is None:
        return replace(answer, parts=job.parts, report=job.partial, job=job)
    return replace(answer, report=report)


def follow(answer: Answer) -> None:
    """Say how far the answer is, and run the page again when there is more of it; say what is missing where it has ended before.

    Of a whole answer nothing is said; the line's place stays, so that what follows does not move when the answer has come.

    Every update is also where Streamlit ends this run when there is a newer one, or when nobody looks on any more. The job is left
    then, and ends in a moment unless that newer run takes it up.
    """
    if answer.missing:
        st.warning(f"This answer is not whole{_left_out(answer.report)}: {answer.missing}")
        st.button("Try again" if answer.error else "Go on", key="again", on_click=_forget)
        return
    with st.container(height=LINE_HEIGHT, border=False, vertical_alignment="center"):
        if answer.job is not None:
            _follow(answer)


def offer_again(error: SizerError) -> None:
    """Offer to ask the question again whose answer was an error; nothing for an error of anything else."""
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
    with held(job):
        with st.container(horizontal=True, vertical_alignment="center"):
            st.button("Stop", key="stop", on_click=_stop_answer, args=(answer,))
            line = st.empty()
        give_back()
        watch, drawn = Watch(), time.monotonic()
        more = partial(_has_more, answer, drawn)
        while not job.waited(_poll_seconds(drawn), more) and not more():
            line.text(f"{how_far(answer, time.monotonic() - since)}{watch.stalled(job)}")
    if (settled := answer.settled()).job is None:
        _remember(settled)
    st.rerun()


def _poll_seconds(since: float) -> float:
    """Return the seconds to wait for a job before the page says how far it is: more of them, the longer it has waited."""
    return min(max(POLL_SECONDS, (time.monotonic() - since) / 10), LONGEST_POLL_SECONDS)


def _has_more(answer: Answer, drawn: float) -> bool:
    """Return True if the page should be drawn again: for the first figures at once, for more after REDRAW_SECONDS."""
    if answer.job is None or answer.job.parts == answer.parts:
        return False
    has_figures = answer.report is not None and answer.report.estimates
    first = not has_figures and answer.job.partial is not None and answer.job.partial.estimates
    return bool(first) or time.monotonic() - drawn >= REDRAW_SECONDS


def proposed_focus(request: Request) -> Cell | None:
    """The cell that the last answer of this session proposes, where that was on the same question; else None."""
    known = st.session_state.get(ANSWER)
    if known is None or known.query != format_query(replace(request, focus=None)) or known.report is None:
        return None
    return known.report.focus and (known.report.focus.dtype, known.report.focus.batch)


class Watch:
    """Notices that a job says nothing new."""

    def __init__(self) -> None:
        self._said, self._since = "", time.monotonic()

    def stalled(self, job: Job) -> str:
        """Return what a job waits for if it has said nothing new for STALLED_SECONDS, else an empty text."""
        now, said = time.monotonic(), job.progress
        if said != self._said:
            self._said, self._since = said, now
        seconds = now - self._since
        return f" · nothing new for {seconds:.0f} s: {said or 'the job server'}" if seconds >= STALLED_SECONDS else ""


def how_far(answer: Answer, seconds: float) -> str:
    """Return what is done and what is left, in one line."""
    facts = [f"{seconds:.0f} s", (answer.job.progress if answer.job is not None else "") or "waiting"]
    return " · ".join(facts if answer.report is None else [_how_many(answer.report), *facts])


def _how_many(report: Report) -> str:
    """Return the number of finished cells out of those requested, and the dtypes that have none."""
    request: Mapping[str, Any] = report.request
    asked = len(request["dtypes"]) * len(request["batches"])
    left, _ = _to_come(report)
    to_come = f", still to come: {', '.join(left)}" if left else ""
    return f"{len(report.estimates):,} of {counted(asked, 'cell')}{to_come}"


def _left_out(report: Report | None) -> str:
    """Return what is missing of a report; nothing where nothing is."""
    if report is None:
        return ""
    dtypes, parts = _to_come(report)
    missing = [f"{', '.join(dtypes)} missing"] if dtypes else []
    missing += [f"the largest batch in {', '.join(parts)} not searched"] if parts else []
    return "".join(f", {text}" for text in missing)


def _to_come(report: Report) -> tuple[list[str], list[str]]:
    """The dtypes of which nothing is there yet, and those of which a part is, which may be all but the largest batch."""
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
    """The report on a request, with progress shown meanwhile; None where the reader has stopped it. Raises SizerError.

    The last report stays with the session: looking at it from another side asks nobody.
    """
    with st.container():  # there with progress or without, so that what follows stays in its place
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
            job.cancel()  # a rerun (another query, a closed tab) leaves through here as well
    except SizerError as error:
        st.session_state[REPORTED] = (query, error)
        raise
    st.session_state[REPORTED] = (query, report)
    return report


def _forget_report() -> None:
    st.session_state.pop(REPORTED, None)


def _watch(job: Job, query: str) -> Report:
    """The job's report. Every update is also where Streamlit ends this run when there is a newer one."""
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

"""How a page asks: on whose behalf, and what becomes of a job whose reader has gone."""

from __future__ import annotations

from contextlib import suppress

import pytest
from streamlit.runtime.scriptrunner import RerunData, RerunException, StopException

from sizer.query.text import parse_query
from sizer.service.fair_queue import Visitor
from sizer.ui import service
from tests.ui.clients import ScriptedClient, ScriptedJob
from tests.ui.conftest import install
from tests.ui.reports import report_for


@pytest.mark.parametrize(
    ("ending", "given_up"), [(StopException(), True), (RerunException(RerunData()), False), (ValueError("x"), False)]
)
def test_job_is_given_up_at_once_where_its_reader_has_gone(ending, given_up):
    jobs = [ScriptedJob(dict), ScriptedJob(dict)]
    with suppress(type(ending)), service.hold_jobs(*jobs):  # Streamlit's have no words that one could match
        raise ending
    assert [(job.cancelled, job.left) for job in jobs] == [(given_up, True)] * 2


@pytest.fixture
def now(monkeypatch):
    """The time that the page's clock shows, in a list."""
    shown = [100.0]
    monkeypatch.setattr(service.time, "monotonic", lambda: shown[0])
    return shown


@pytest.mark.parametrize(
    ("comes", "settled", "redrawn"),
    [(0.2, 0.3, False), (0.2, 1.0, True), (1.2, 0.2, False), (1.2, 0.6, True)],
    ids=["just drawn", "a second after", "just there", "half a second there"],
)
def test_a_page_is_drawn_again_for_a_part_of_its_answer_once_a_second(now, comes, settled, redrawn):
    job = ScriptedJob(dict)
    growth = service.Growth(service.Answer(query="asked", job=job), now[0])
    now[0] += comes
    assert not growth.is_due()
    job.parts = 1
    assert not growth.is_due()
    now[0] += settled
    assert growth.is_due() is redrawn


def test_first_figures_are_drawn_at_once(now):
    job = ScriptedJob(dict)
    growth = service.Growth(service.Answer(query="asked", job=job), now[0])
    job.parts, job.partial = 1, report_for(parse_query("arch=torchvision:resnet18"))
    assert growth.is_due()


@pytest.mark.parametrize(("known", "waits"), [(False, True), (True, False)])
def test_a_page_waits_before_it_draws_only_for_first_figures(monkeypatch, open_page, known, waits):
    client = install(monkeypatch, ScriptedClient(report_for))
    submit, waited = client.submit, []

    class Watched(ScriptedJob):
        def waited(self, timeout, ready=lambda: False):
            waited.append(timeout)
            return super().waited(timeout, ready)

    def submit_watched(query: str, *, stops: bool) -> ScriptedJob:
        job = submit(query, stops=stops)
        job.__class__ = Watched
        job.partial, job.parts = (report_for(client.requests[-1]), 1) if known else (None, 0)
        job.result = lambda timeout=None: ScriptedJob.result(job) if job.done else None
        return job

    monkeypatch.setattr(client, "submit", submit_watched)
    page = open_page(arch="torchvision:resnet18", dtype="float32", batch="1")
    assert page.main.title
    assert (service.AT_ONCE_SECONDS in waited) is waits


def test_a_page_that_waits_long_says_less_often_how_far_its_answer_is(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(service.time, "monotonic", lambda: now[0])
    now[0] += 1
    assert service._silence_seconds(100.0) < service.POLL_SECONDS
    now[0] += 3
    assert service.POLL_SECONDS < service._silence_seconds(100.0) < service.LONGEST_SILENCE_SECONDS
    now[0] += 60
    assert service._silence_seconds(100.0) == service.LONGEST_SILENCE_SECONDS


def test_outside_of_a_page_nobody_in_particular_asks():
    assert service._visitor() == Visitor()


def test_session_and_address_of_the_page_are_those_of_its_jobs(monkeypatch):
    class Context:
        session_id = "7"

    class Browser:
        ip_address = "10.0.0.1"

    monkeypatch.setattr(service, "get_script_run_ctx", lambda **_: Context())
    monkeypatch.setattr(service.st, "context", Browser())
    assert service._visitor() == Visitor(address="10.0.0.1", session="7")
    monkeypatch.setattr(Browser, "ip_address", None)  # as Streamlit has it of the machine's own
    assert service._visitor() == Visitor(session="7")

"""Errors that arrive after a while: each page shows them, and asks once."""

from __future__ import annotations

import pytest

from sizer.base.errors import BuildError, ConfigError, HubError, JobError, RequestError, SizerError, TraceError
from sizer.ui import service
from tests.ui.clients import ScriptedClient, ScriptedJob
from tests.ui.conftest import install, texts
from tests.ui.reports import report_for

ERRORS = [kind("it failed late", todo="do this") for kind in (BuildError, ConfigError, HubError, JobError, TraceError)]
ERRORS.append(RequestError("targets", given="nothere", allowed="names of modules", todo="do this"))
QUESTION = {"arch": "torchvision:resnet18", "dtype": "float32", "batch": "1", "focus": "float32:1"}
OTHER = "arch=torchvision:resnet50&dtype=float32&batch=1"


def failing_late(error: SizerError) -> ScriptedClient:
    return ScriptedClient(error, progress=["building", "tracing", "tracing still"])


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_the_page_shows_a_late_error_and_asks_once(monkeypatch, open_page, error):
    client = install(monkeypatch, failing_late(error))
    page = open_page(**QUESTION)
    assert page.error and any("do this" in text for text in texts(page))
    for _ in range(3):
        page.run()
    assert len(client.requests) == 1
    page.button(key="again").click().run()
    assert len(client.requests) == 2 and page.error


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_compare_shows_late_errors_and_asks_each_question_once(monkeypatch, open_page, error):
    client = install(monkeypatch, failing_late(error))
    page = open_page("compare", q=["arch=torchvision:resnet18&dtype=float32&batch=1", OTHER])
    assert sum("it failed late" in text or "nothere" in text for text in texts(page)) >= 1
    for _ in range(3):
        page.run()
    assert len(client.requests) == 2
    page.button(key="again").click().run()
    assert len(client.requests) == 4


def test_an_error_keeps_what_was_known_before(monkeypatch, open_page):
    client = failing_late(JobError("the time limit was reached"))
    submit = client.submit

    def with_a_part(query: str, *, stops: bool) -> ScriptedJob:
        job = submit(query, stops=stops)
        job.partial, job.parts = report_for(client.requests[-1]), 1
        return job

    monkeypatch.setattr(client, "submit", with_a_part)
    install(monkeypatch, client)
    page = open_page(**QUESTION)
    assert page.main.title, "the headline of what is there"
    assert "the time limit was reached" in page.warning[0].value
    page.run()
    assert len(client.requests) == 1


def test_going_back_to_a_question_that_failed_asks_nobody(monkeypatch, open_page):
    client = install(monkeypatch, failing_late(HubError("the repository is gated")))
    page = open_page(**QUESTION)
    page.selectbox(key="gpu").set_value("t4").run()
    assert len(client.requests) == 2
    page.selectbox(key="gpu").set_value("a100-80gb").run()
    assert len(client.requests) == 2 and page.error


def test_a_page_says_what_it_waits_for_once_nothing_new_comes(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(service.time, "monotonic", lambda: now[0])
    job, watch = ScriptedJob(lambda: None), service.Watch()
    job.progress = "tracing float32"
    assert watch.stalled(job) == ""
    now[0] = service.STALLED_SECONDS - 1
    assert watch.stalled(job) == ""
    now[0] = service.STALLED_SECONDS + 1
    assert "nothing new for 31 s: tracing float32" in watch.stalled(job)
    job.progress = "tracing bfloat16"
    assert watch.stalled(job) == ""

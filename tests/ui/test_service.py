"""How a page asks: on whose behalf, and what becomes of a job whose reader has gone."""

from __future__ import annotations

from contextlib import suppress

import pytest
from streamlit.runtime.scriptrunner import RerunData, RerunException, StopException

from sizer.service.fair_queue import Visitor
from sizer.ui import service
from tests.ui.clients import ScriptedJob


@pytest.mark.parametrize(
    ("ending", "given_up"), [(StopException(), True), (RerunException(RerunData()), False), (ValueError("x"), False)]
)
def test_job_is_given_up_at_once_where_its_reader_has_gone(ending, given_up):
    jobs = [ScriptedJob(dict), ScriptedJob(dict)]
    with suppress(type(ending)), service.held(*jobs):  # Streamlit's have no words that one could match
        raise ending
    assert [(job.cancelled, job.left) for job in jobs] == [(given_up, True)] * 2


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

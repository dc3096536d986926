"""The app's start and end, and what it says of itself to whoever watches over it."""

from __future__ import annotations

import asyncio

import pytest
from streamlit.proto.NewSession_pb2 import CustomThemeConfig
from streamlit.runtime import app_session

from sizer.base.errors import JobError
from sizer.service.client import JobClient
from sizer.service.settings import PUBLIC_VARIABLE, Settings
from sizer.ui import hosting
from tests.processes.running import TESTS

SCRIPTS = "tests.service.scripted:report"  # answers any query with a report made by hand
FAILS = "tests.ui.test_hosting:fail"


def fail(job: dict, channel) -> dict:
    raise JobError("nothing works here", todo="look at /secret/place")


@pytest.fixture
def client(monkeypatch):
    """A client of jobs that really run, in the place of the app's own; `client(FUNCTION)` makes it."""
    made = []

    def make(function: str = SCRIPTS, **settings: object) -> JobClient:
        made.append(JobClient(Settings(function=function, preload=(), max_jobs=1, readable=(TESTS,), **settings)))
        monkeypatch.setattr(hosting, "shared_client", lambda: made[-1])
        return made[-1]

    yield make
    for one in made:
        one.close()


def answer(route: int) -> tuple[int, bytes]:
    response = asyncio.run(hosting.routes()[route].endpoint(None))
    assert response.headers["cache-control"] == "no-store"
    return response.status_code, response.body


def test_process_that_serves_is_alive_whatever_its_jobs_do(client):
    client(FAILS)
    assert answer(0) == (200, b"ok\n")


def test_ready_where_a_job_has_run_lately_and_else_after_one(client, monkeypatch):
    asked = client()
    monkeypatch.setattr(hosting, "PROBE_SECONDS", 60.0)
    probes, submit = [], asked.submit_probe
    monkeypatch.setattr(asked, "submit_probe", lambda: probes.append(submit()) or probes[-1])
    assert asked.answered_ago() is None
    assert answer(1) == (200, b"ok\n")
    assert answer(1) == (200, b"ok\n")
    assert len(probes) == 1
    assert asked.answered_ago() < hosting.LATELY_SECONDS
    monkeypatch.setattr(hosting, "LATELY_SECONDS", 0.0)
    assert answer(1) == (200, b"ok\n")
    assert len(probes) == 2


def test_not_ready_where_no_job_ends_well_and_the_reason_is_for_the_log_alone(client, monkeypatch, caplog):
    client(FAILS)
    monkeypatch.setattr(hosting, "PROBE_SECONDS", 60.0)
    assert answer(1) == (503, b"no job has ended well lately\n")
    assert "not ready: nothing works here; look at /secret/place" in caplog.text


def test_not_ready_where_a_job_takes_too_long(client, monkeypatch, caplog):
    client("tests.service.scripted:hold_always")
    monkeypatch.setattr(hosting, "PROBE_SECONDS", 0.2)
    assert answer(1) == (503, b"no job has ended well lately\n")
    assert "a small job has not ended within 0 s" in caplog.text


class Ask:
    """A request that holds one header."""

    def __init__(self, authorization: str = ""):
        self.headers = {"authorization": authorization}


@pytest.mark.parametrize(
    ("token", "given", "status"),
    [
        ("", "", 404),
        ("", "Bearer ", 404),
        ("t", "", 404),
        ("t", "Bearer u", 404),
        ("t", "Bearer ü", 404),
        ("t", "Bearer t", 200),
    ],
)
def test_metrics_are_for_who_brings_the_token(client, monkeypatch, token, given, status):
    client()
    monkeypatch.setenv(hosting.TOKEN_VARIABLE, token)
    response = asyncio.run(hosting.routes()[2].endpoint(Ask(given)))
    assert response.status_code == status
    assert (b"sizer_jobs 0" in response.body) is (status == 200)


def live(within=lambda: None) -> None:
    async def run() -> None:
        async with hosting.lifespan(None):
            within()

    asyncio.run(run())


def test_job_server_starts_before_the_first_visitor_and_ends_after_the_last(client):
    mine = client()
    live(lambda: mine._pool.connection.process_id)
    assert mine._pool.connection is None


def test_in_public_mode_a_job_has_run_before_the_first_visitor(client, monkeypatch):
    monkeypatch.setenv(PUBLIC_VARIABLE, "1")
    mine = client(wall="wanted", spares=0)
    live(lambda: pytest.fail("no job has run") if mine.answered_ago() is None else None)


def test_public_mode_does_not_start_where_no_job_runs(client, monkeypatch):
    monkeypatch.setenv(PUBLIC_VARIABLE, "1")
    client(FAILS, wall="wanted", spares=0)
    with pytest.raises(JobError, match="nothing works here"):
        live(lambda: pytest.fail("visitors were let in"))


SECTIONS = [f"theme{part}" for part in ("", ".light", ".dark", ".sidebar", ".light.sidebar", ".dark.sidebar")]


def themes() -> CustomThemeConfig:
    """What the first section's message holds when it was filled from all sections, as a new page's is."""
    message = CustomThemeConfig()
    for section in SECTIONS:
        part = message
        for name in section.split(".")[1:]:
            part = getattr(part, name)
        app_session._populate_theme_msg(part, section)
    return message


def test_pages_have_the_theme_that_streamlit_reads_read_once(client, monkeypatch):
    client()
    expected = themes()
    assert expected.primary_color == "" != expected.light.primary_color  # as .streamlit/config.toml has it
    read = []
    plain = app_session._populate_theme_msg
    monkeypatch.setattr(app_session, "_populate_theme_msg", lambda *args: (read.append(args), plain(*args)))
    found = []
    live(lambda: found.extend([themes(), themes()]))
    assert [one.SerializeToString(deterministic=True) for one in found] == [
        expected.SerializeToString(deterministic=True)
    ] * 2
    assert len(read) == len(SECTIONS)


def test_a_streamlit_that_reads_its_theme_elsewhere_serves_pages_all_the_same(client, monkeypatch):
    client()
    monkeypatch.delattr(app_session, "_populate_theme_msg")
    let_in = []
    live(lambda: let_in.append(True))
    assert let_in == [True]

"""GET /api/estimate with jobs that really run: the JSON of an estimate, and the status of every other end."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from starlette.requests import Request

from sizer.base.errors import JobError, QueueFullError, RequestError, TimeLimitError, TraceError
from sizer.query.text import parse_query
from sizer.report.report import Report
from sizer.service.client import JobClient
from sizer.service.fair_queue import Visitor
from sizer.service.settings import Settings
from sizer.ui import hosting
from tests.processes.running import TESTS

REPORTS = "tests.service.scripted:report"  # answers any query with a report made by hand; float16 cannot be traced
QUERY = "arch=torchvision:resnet18&dtype=float32&batch=2"


@pytest.fixture
def client(monkeypatch):
    made = []

    def make(function: str = REPORTS, **settings: object) -> JobClient:
        made.append(JobClient(Settings(function=function, preload=(), max_jobs=1, readable=(TESTS,), **settings)))
        monkeypatch.setattr(hosting, "shared_client", lambda: made[-1])
        return made[-1]

    yield make
    for one in made:
        one.close()


def request(query: str, method: str = "GET", host: str = "127.0.0.1", *, gone: bool = False, **headers: str) -> Request:
    scope = {
        "type": "http", "method": method, "path": hosting.PATH, "query_string": query.encode(), "client": (host, 1),
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()], "server": ("h", 80),
    }  # fmt: skip

    async def receive() -> dict:
        if not gone:
            await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    return Request(scope, receive)


def answer(asked: Request) -> tuple[int, dict]:
    (route,) = hosting.endpoint_routes()
    response = asyncio.run(route.endpoint(asked))
    return response.status_code, json.loads(response.body or b"{}")


def test_an_answer_is_the_json_of_estimate(client):
    client()
    status, found = answer(request(QUERY))
    assert status == 200
    report = Report.from_dict(found)
    assert [(row.dtype, row.batch) for row in report.estimates] == [("float32", 2)]
    assert found["schema"] == 1 and found["estimates"][0]["verdict"] == report.estimates[0].verdict


def test_a_refused_question_names_the_key_and_what_is_allowed(client):
    client()
    status, found = answer(request(f"{QUERY}&optimizer=adamm"))
    assert (status, found["key"]) == (400, "optimizer")
    assert "adamw" in found["allowed"] + found["error"]
    status, found = answer(request("arch=torchvision:resnet18&batch=0&dtype=int3"))
    assert status == 400
    assert {row["key"] for row in found["refusals"]} == {"batch", "dtype"}
    assert answer(request(""))[0] == 400
    assert answer(request("arch=config:!!!"))[0] == 400


def test_a_model_that_was_counted_only_is_422_with_its_counts(client):
    client("tests.ui.test_endpoint:count")
    status, found = answer(request(QUERY))
    assert status == 422
    assert "nobody can trace this" in found["error"]
    assert found["report"]["model"]["parameters"] > 0 and found["report"]["estimates"] == []


def count(job: dict, channel) -> dict:
    """Work that counts a model and traces nothing."""
    from tests.ui.reports import report_for

    return replace(
        report_for(parse_query(job["query"])), estimates=(), failures={"float32": "nobody can trace this"}, focus=None
    ).to_dict()


def test_a_job_that_takes_too_long_is_504(client):
    client("tests.service.scripted:hold_always", wall_seconds=0.5)
    status, found = answer(request(QUERY))
    assert (status, found["key"]) == (504, None)
    assert "the job was stopped after 0.5 s" in found["error"]


def test_too_many_jobs_are_429(client):
    asked = client("tests.service.scripted:hold_always", max_waiting=0)
    job = asked.submit("arch=torchvision:resnet50&batch=1")
    status, found = answer(request(QUERY))
    job.cancel()
    assert status == 429
    assert found["error"].startswith("too many jobs")


def test_a_caller_who_has_gone_leaves_no_job(client, monkeypatch):
    monkeypatch.setattr(hosting, "GONE_SECONDS", 0.1)
    asked = client("tests.service.scripted:hold_always")
    submit = asked.submit
    jobs = []
    monkeypatch.setattr(JobClient, "submit", lambda self, query: jobs.append(submit(query)) or jobs[-1])
    assert answer(request(QUERY, gone=True))[0] == 499
    with pytest.raises(JobError, match="cancelled"):
        jobs[0].result(timeout=5)


def test_other_methods_are_refused(client):
    client()
    assert answer(request(QUERY, "HEAD"))[0] == 405


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestError("x"), 400),
        (TraceError("x"), 422),
        (QueueFullError("x"), 429),
        (JobError("x"), 500),
        (TimeLimitError("x"), 504),
    ],
)
def test_every_error_has_its_status(error, status):
    assert hosting.status_of(error) == status
    assert hosting.describe_error(error) == {"error": "x", "key": None, "allowed": None}


def test_the_queue_counts_callers_by_address():
    assert hosting.visitor_of(request(QUERY)) == Visitor()
    assert hosting.visitor_of(request(QUERY, host="10.0.0.7")).address == "10.0.0.7"
    assert hosting.visitor_of(request(QUERY, x_forwarded_for="10.0.0.8")).address == "127.0.0.1"

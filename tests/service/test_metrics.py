"""What is counted and logged of jobs, and that nothing of what was asked is in it."""

from __future__ import annotations

import json
import logging
import re

import pytest

from sizer.base.errors import JobError
from sizer.service.monitoring import LOG_VARIABLE, JobMetrics, JsonFormatter, set_up_logging
from tests.service.test_client import make_client, submit  # noqa: F401 (a fixture)


def test_jobs_are_counted_by_task_and_outcome():
    metrics = JobMetrics()
    metrics.add("estimate", "result", waited_seconds=0.5, ran_seconds=2.0)
    metrics.add("estimate", "result", waited_seconds=0.25, ran_seconds=1.0)
    metrics.add("peak", "JobError", waited_seconds=0.0, ran_seconds=3.0)
    assert metrics.text(present=4) == (
        "# TYPE sizer_jobs gauge\nsizer_jobs 4\n"
        "# TYPE sizer_jobs_total counter\n"
        'sizer_jobs_total{task="estimate",outcome="result"} 2\nsizer_jobs_total{task="peak",outcome="JobError"} 1\n'
        "# TYPE sizer_job_wait_seconds_total counter\n"
        'sizer_job_wait_seconds_total{task="estimate",outcome="result"} 0.75\n'
        'sizer_job_wait_seconds_total{task="peak",outcome="JobError"} 0\n'
        "# TYPE sizer_job_run_seconds_total counter\n"
        'sizer_job_run_seconds_total{task="estimate",outcome="result"} 3\n'
        'sizer_job_run_seconds_total{task="peak",outcome="JobError"} 3\n'
    )


def test_what_was_asked_is_neither_in_the_log_nor_in_the_metrics(make_client, caplog):  # noqa: F811
    client = make_client()
    with caplog.at_level(logging.INFO, logger="sizer"):
        submit(client, "echo", "SECRET-CONFIG").result(timeout=30)
        with pytest.raises(JobError, match="nobody expected"):
            submit(client, "broken", "SECRET-CONFIG").result(timeout=30)
    records = [record for record in caplog.records if record.getMessage() == "a job has ended"]
    lines = [json.loads(JsonFormatter().format(record)) for record in records]
    assert [(line["task"], line["outcome"]) for line in lines] == [("estimate", "result"), ("estimate", "JobError")]
    assert all(line["waited_seconds"] >= 0 and line["ran_seconds"] > 0 for line in lines)
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", line["time"]) for line in lines)
    text = client.metrics() + json.dumps(lines)
    assert 'sizer_jobs_total{task="estimate",outcome="result"} 1' in text
    assert not any(word in text for word in ("SECRET", "hub:", "echo", "broken"))


def test_every_logger_writes_json_where_it_is_asked_for(monkeypatch, capsys):
    root, other = logging.getLogger(), logging.getLogger("tests.service.other")
    before = (root.handlers[:], root.level)
    other.handlers, other.propagate = [logging.StreamHandler()], False
    try:
        monkeypatch.setenv(LOG_VARIABLE, "text")
        set_up_logging()
        assert root.handlers == before[0]
        monkeypatch.setenv(LOG_VARIABLE, "json")
        set_up_logging()
        try:
            raise ValueError("why")
        except ValueError:
            other.exception("it went %s", "wrong")
        (line,) = capsys.readouterr().err.splitlines()
        told = json.loads(line)
        assert (told["level"], told["logger"], told["message"]) == ("error", "tests.service.other", "it went wrong")
        assert told["traceback"].endswith("ValueError: why")
    finally:
        root.handlers[:], root.level = before
        other.handlers, other.propagate = [], True

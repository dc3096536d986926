"""Questions answered by workers, over a real Redis server: as by a job server of one's own, whatever is killed meanwhile."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from sizer.base.errors import JobError
from sizer.estimating.estimator import Estimator
from sizer.query.text import parse_query
from sizer.service.client import JobClient
from sizer.service.job import Job
from sizer.service.settings import Settings
from tests.processes.running import TESTS, is_running, wait_until
from tests.service.brokers import client_of, need_broker, running_worker

need_broker()

from redis import Redis  # noqa: E402

from sizer.service.broker.board import Board, connect, digest_of, unpack  # noqa: E402
from sizer.service.broker.celery_turns import NEXT, line_of, make_celery  # noqa: E402
from sizer.service.broker.worker import checked  # noqa: E402

REAL = "arch=torchvision:squeezenet1_1&mode=inference&dtype=float32,bfloat16&batch=1,2&image=64"


@pytest.fixture
def start_worker(url: str, tmp_path: Path) -> Iterator[Callable]:
    """Starts workers whose jobs are scripts, each with one place; what they were told is in their logs."""
    board, log = Board(connect(url)), tmp_path / "log"
    scripts = {"preload": (), "readable": (str(tmp_path), TESTS)}
    with ExitStack() as stack:

        def start(**settings: object) -> subprocess.Popen:
            before = len(board.workers())
            worker = stack.enter_context(running_worker(url, log, **scripts | settings))
            while len(board.workers()) == before:  # for as long as it takes on a busy machine
                assert worker.poll() is None, log.read_text()
                time.sleep(0.05)
            return worker

        yield start


@pytest.fixture
def make_client(url: str) -> Iterator[Callable[[], JobClient]]:
    """Makes clients, as of one app each; results stay plain data."""
    with ExitStack() as stack:

        def make() -> JobClient:
            client = client_of(url, read=dict)
            stack.callback(client.close)
            return client

        yield make


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A named pipe for `hold`: who writes to it lets the job go."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def submit(client: JobClient, script: str, argument: object = "", batch: int = 1) -> Job:
    return client.submit(f"arch=hub:script/{script}&dtype=float32&batch={batch}", str(argument))


def process_of(job: Job, other: int = 0) -> int:
    """The process id of a job that holds; not the `other`, where it held before."""

    def found() -> int:
        held = int(job.progress.split()[-1]) if job.progress.startswith("holding in ") else 0
        return held if held != other else 0

    return wait_until(found)


def edition(board: Board) -> str:
    """The edition of the workers that are there."""
    return wait_until(board.workers)[0].edition


# ------------------------------------------------------------------------------------------------- as without a broker


@pytest.mark.exhaustive
def test_an_answer_is_that_of_a_job_server_of_ones_own(url, tmp_path):
    with running_worker(url, tmp_path / "log", preload=Settings().preload, readable=(TESTS,)):
        client = client_of(url)
        job, parts = client.submit(REAL), []
        while (report := job.result(0.02)) is None:
            parts.append(job.partial)
        client.close()
    *_, alone = Estimator(parse_query(REAL)).reports()
    assert report.to_json() == alone.to_json()
    assert any(part is not None and part.pending for part in parts), "it came in parts"


@pytest.mark.exhaustive
def test_errors_come_as_they_are(start_worker, make_client):
    start_worker()
    client = make_client()
    with pytest.raises(JobError, match="the job failed"):
        submit(client, "broken").result()
    with pytest.raises(JobError, match=r"the job crashed \(SIGABRT\)"):
        submit(client, "crash").result()


def test_progress_comes_and_the_last_reader_who_leaves_ends_the_job(start_worker, make_client):
    start_worker()
    clients = [make_client(), make_client()]
    jobs = [submit(client, "hold") for client in clients]
    process = process_of(jobs[0])
    assert process_of(jobs[1]) == process, "two apps ask one question"
    jobs[0].cancel()
    assert submit(clients[0], "echo").waited(2.0) is False, "the only place is taken still"
    assert is_running(process)
    jobs[1].cancel()
    wait_until(lambda: not is_running(process))


@pytest.mark.exhaustive
def test_an_answer_is_there_for_whoever_asks_again(start_worker, make_client):
    worker = start_worker()
    first = submit(make_client(), "echo", "x").result()
    worker.terminate()
    worker.wait(20)
    other = start_worker()
    assert submit(make_client(), "echo", "x").result() == first, "the number of the process that made it is in it"
    assert other.poll() is None


@pytest.mark.exhaustive
def test_places_in_the_line_are_told(start_worker, make_client):
    start_worker()
    client = make_client()
    held = submit(client, "hold")
    process_of(held)
    waiting = [submit(client, "hold", batch=2), submit(client, "hold", batch=3)]
    told = [f"waiting for a free place ({place} before this one)" for place in (0, 1)]
    wait_until(lambda: sorted(job.progress for job in waiting) == told)


@pytest.mark.exhaustive
def test_what_was_traced_by_one_worker_is_given_to_the_next(start_worker, make_client):
    client = make_client()
    first = start_worker()
    assert submit(client, "cells", 3).result() == {"given": 0}
    first.terminate()
    first.wait(20)
    start_worker()
    assert submit(client, "cells", 3, batch=2).result() == {"given": 3}


# ------------------------------------------------------------------------------------------------- what may be killed


def test_a_worker_that_is_killed_loses_nothing(start_worker, make_client, pipe):
    workers = [start_worker(), start_worker()]
    job = submit(make_client(), "hold", pipe)
    process = process_of(job)
    server = os.getsid(process)  # it leads the session, and its parent is the worker
    parent = int(Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[1])
    (victim,) = [worker for worker in workers if worker.pid == parent]
    os.kill(victim.pid, signal.SIGKILL)
    other = process_of(job, other=process)
    assert not is_running(process)
    pipe.write_text("go")
    assert job.result() == {"released": "go", "process": other}


def test_a_worker_that_is_told_to_end_gives_its_question_back(start_worker, make_client, pipe):
    first = start_worker()
    job = submit(make_client(), "hold", pipe)
    process = process_of(job)
    first.terminate()
    assert first.wait(20) == 0
    start_worker()
    process_of(job, other=process)
    pipe.write_text("go")
    assert job.result()["released"] == "go"


def test_redis_killed_and_started_again(redis, start_worker, make_client, pipe):
    start_worker()
    client = make_client()
    job = submit(client, "hold", pipe)
    process_of(job)
    redis.kill()
    redis.start()
    pipe.write_text("go")
    assert job.result(60)["released"] == "go"
    assert submit(client, "echo", "after").result(60)["argument"] == "after"


@pytest.mark.exhaustive
def test_redis_started_again_without_what_it_held(redis, start_worker, make_client):
    start_worker()
    client = make_client()
    job = submit(client, "hold")
    process = process_of(job)
    Redis.from_url(redis.url).flushall()
    assert process_of(job, other=process), "it is asked anew"
    wait_until(lambda: not is_running(process))


def test_a_question_that_ends_every_worker_is_given_up(url, start_worker, make_client, monkeypatch):
    start_worker()
    monkeypatch.setattr("sizer.service.broker.connection.MOST_PUTS", 1)
    job = submit(make_client(), "hold")
    process_of(job)
    redis = Redis.from_url(url)
    redis.delete(*redis.keys("sizer:lease:*"))  # as when its worker has ended
    with pytest.raises(JobError, match="the workers that had it have ended"):
        job.result(30)


# ------------------------------------------------------------------------------------------------------ what is refused


class Canary:
    """What makes a file when it is unpickled."""

    def __init__(self, path: str):
        self._path = path

    def __reduce__(self):
        return open, (self._path, "w")


def test_a_pickle_in_the_queue_is_refused(url, start_worker, make_client, board, tmp_path):
    canary = tmp_path / "canary"
    payload = pickle.dumps(Canary(str(canary)))
    pickle.loads(payload).close()
    canary.unlink()  # it would have worked
    start_worker()
    line = line_of("short", edition(board))
    message = {
        "body": b64encode(payload).decode(),
        "content-type": "application/x-python-serialize",
        "content-encoding": "binary",
        "headers": {"lang": "py", "task": NEXT, "id": "1", "argsrepr": "()"},
        "properties": {
            "correlation_id": "1",
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": line},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": "1",
        },
    }
    Redis.from_url(url).lpush(f"sizer:celery:{line}", json.dumps(message))
    assert submit(make_client(), "echo", "x").result()["argument"] == "x", "it goes on"
    log = wait_until(lambda: "ContentDisallowed" in (text := (tmp_path / "log").read_text()) and text)
    assert "application/x-python-serialize" in log or "pickle" in log
    assert not canary.exists()


def test_a_question_that_is_too_large_is_refused(url, start_worker, board):
    start_worker(request_bytes=2**16)
    line, digest = line_of("short", edition(board)), digest_of(["any"])
    assert board.put(digest, line, {"task": "estimate", "query": "x" * 2**16}, cost=1.0, visitor="", reader="me")
    make_celery(url).send_task(NEXT, queue=line)
    entries = wait_until(lambda: board.read({digest: "0"}, block_ms=100).get(digest))
    assert entries[-1][1] == "error"
    assert "longer than 65,536 bytes" in json.loads(unpack(entries[-1][2], 2**16))["error"]["what"]


@pytest.mark.parametrize(
    ("question", "told"),
    [
        ({"task": ["estimate"], "visitor": ["", ""]}, "must be texts"),
        ({"task": "estimate", "query": 7, "visitor": ["", ""]}, "must be texts"),
        ({"task": "estimate", "visitor": [1, 2]}, "must be an address and a session"),
        ({"task": "estimate"}, "must be an address and a session"),
    ],
)
def test_what_is_no_question_is_refused(question, told):
    with pytest.raises(ValueError, match=told):
        checked(question)


def test_what_is_no_answer_fails_the_question_alone(url, start_worker, make_client):
    start_worker()
    client = make_client()
    job = submit(client, "hold")
    process_of(job)
    redis = Redis.from_url(url)
    (answer,) = redis.keys("sizer:answer:*")
    redis.xadd(answer, {"kind": "result", "data": b"\x80no JSON"})
    with pytest.raises(JobError, match="the broker's data on its answer are invalid"):
        job.result(30)
    assert submit(client, "echo", "x").result(30)["argument"] == "x"


def test_a_key_of_another_kind_fails_its_question_alone(url, start_worker, make_client, pipe):
    start_worker(max_jobs=2)
    client = make_client()
    innocent = submit(client, "hold", pipe)
    process_of(innocent)
    redis = Redis.from_url(url)
    of_the_innocent = set(redis.keys("sizer:answer:*"))
    other = submit(client, "hold")
    process_of(other)
    (answer,) = set(redis.keys("sizer:answer:*")) - of_the_innocent
    redis.delete(answer)
    redis.set(answer, "of another kind")
    with pytest.raises(JobError, match="could not be answered"):
        other.result(30)
    assert not innocent.done
    pipe.write_text("go")
    assert innocent.result(30)["released"] == "go"

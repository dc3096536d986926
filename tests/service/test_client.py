from __future__ import annotations

import base64
import contextlib
import http.server
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from sizer.base.config_json import encode_config
from sizer.base.errors import ConfigError, HubError, JobError, RequestError, TraceError
from sizer.catalogue.sources import called_packages
from sizer.report.report import Report
from sizer.service import client as client_module
from sizer.service import pool, supervisor
from sizer.service.client import JobClient, shared_client
from sizer.service.fair_queue import Visitor
from sizer.service.job import SILENT
from sizer.service.pool import Cache
from sizer.service.settings import Settings
from sizer.service.supervisor import Supervisor
from tests.processes.running import TESTS, is_running, template_of, wait_until

FUNCTION = "tests.service.scripted:run"


@pytest.fixture
def make_client(tmp_path):
    """Makes clients whose jobs run scripts; results stay plain data."""
    clients = []

    def make(*, settings: dict | None = None, **options) -> JobClient:
        scripts = {"function": FUNCTION, "preload": (), "max_jobs": 2, "readable": (str(tmp_path), TESTS)}
        chosen = Settings(**scripts | (settings or {}))
        clients.append(JobClient(chosen, **{"read": dict, **options}))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def pipe(tmp_path):
    """A named pipe for `hold`: who writes to it lets the job go."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def submit(client: JobClient, script: str, argument: object = "", **keys: object):
    query = "&".join([f"arch=hub:script/{script}", *(f"{key}={value}" for key, value in keys.items())])
    return client.submit(query, str(argument))


def process_of(job) -> int:
    """The process id of a job that holds."""
    return int(wait_until(lambda: job.progress.startswith("holding in ") and job.progress.split()[-1]))


# ----------------------------------------------------------------------------------------------------- one job, errors


def test_result_is_none_while_the_job_runs_and_then_the_value(make_client, pipe):
    job = submit(make_client(), "hold", pipe)
    process = process_of(job)
    assert job.result(timeout=0) is None
    assert not job.done
    pipe.write_text("go")
    assert job.result(timeout=30) == {"released": "go", "process": process}
    assert job.done
    assert job.progress == "done"


def test_bad_query_is_refused_before_any_server_starts(make_client):
    client = make_client()
    with pytest.raises(RequestError, match="batch: given '-5'"):
        client.submit("arch=torchvision:resnet50&batch=-5")
    assert client._pool.connection is None


def test_error_comes_back_as_its_class_and_fresh_for_each_caller(make_client):
    job = submit(make_client(), "fail", "TraceError")
    with pytest.raises(TraceError, match="it went wrong: given 7, allowed 1 to 5; choose less") as first:
        job.result(timeout=30)
    with pytest.raises(TraceError, match="it went wrong") as second:
        job.result()
    assert first.value is not second.value
    assert first.value.exit_status == 3
    assert job.progress == "failed"


def test_an_error_is_the_answer_for_a_moment(make_client, tmp_path):
    client = make_client()
    now = [time.monotonic()]
    client._pool._failures = Cache(pool.FAILURE_SECONDS, pool.MOST_FAILURES, lambda: now[0])
    target = tmp_path / "pipe"
    for _ in range(100):
        with pytest.raises(JobError, match="FileNotFoundError"):
            submit(client, "hold", target).result(timeout=30)
    assert 'outcome="JobError"} 1' in client.metrics(), "a hundred pages cost one job"
    os.mkfifo(target)
    now[0] += pool.FAILURE_SECONDS + 1
    process_of(submit(client, "hold", target))


def test_answer_that_is_no_report_is_an_error(make_client):
    client = make_client(read=client_module.Report.from_dict)
    with pytest.raises(JobError, match="the job's answer is invalid"):
        submit(client, "echo").result(timeout=30)


def test_config_that_is_far_too_long_is_refused_at_once(make_client):
    client = make_client(settings={"request_bytes": 10_000})
    with pytest.raises(ConfigError, match="config is too large"):
        submit(client, "echo", "x" * 10_000)
    assert submit(client, "echo", "x" * 9_000).result(timeout=30)["argument"] == "x" * 9_000


def test_query_that_no_answer_could_repeat_is_refused_before_it_is_worked_on(make_client):
    # Noise, which zlib does not make small: 32 strings of 4,000 characters of base64 hold 3,000 random bytes each.
    noise = random.Random(0)
    texts = [base64.b64encode(noise.randbytes(3_000)).decode() for _ in range(32)]
    query = f"arch=config:{encode_config(json.dumps({'model_type': 'llama', 'texts': texts}))}"
    with pytest.raises(ConfigError, match=r"too large for a link: given a query of 1\d\d,\d{3} .* at most 100,000"):
        make_client().submit(query)


def test_no_folder_for_temporary_files_is_told_in_one_sentence(make_client, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(JobError, match=r"the job server has no folder for temporary files \(No such .*; set TMPDIR to"):
        submit(make_client(), "echo")


def test_config_for_anything_but_a_hub_model_is_refused_not_ignored(make_client):
    with pytest.raises(RequestError, match="config_text: given arch=torchvision:, allowed with arch=hub:"):
        make_client().submit("arch=torchvision:resnet50", "{}")


def test_models_come_from_the_server(make_client):
    expected = {source: [{"name": "resnet50", "family": "resnet"}] for source in ("torchvision", "timm")}
    assert make_client().submit_models().result(timeout=30) == expected


# ------------------------------------------------------------------------------------------------- sharing, the cache


def test_identical_requests_in_flight_are_one_job(make_client, pipe):
    client = make_client()
    # The same question in other words: another order, and a default written out.
    jobs = [submit(client, "hold", pipe, batch="1,2", mode="training"), submit(client, "hold", pipe, batch="1,2")]
    process_of(jobs[0])
    pipe.write_text("go")
    first, second = (job.result(timeout=30) for job in jobs)
    assert first is second


def test_no_job_can_guess_the_number_by_which_another_is_answered(make_client):
    client = make_client()
    first, second = (submit(client, "echo", index).shared.number for index in range(2))
    assert abs(first - second) > 2**64  # of 128 random bits; as near by chance once in 2**63


def test_different_questions_and_configs_are_different_jobs(make_client):
    client = make_client()
    jobs = [
        submit(client, "echo"),
        submit(client, "echo", batch=2),
        submit(client, "echo", "a"),
        submit(client, "echo", "b"),
    ]
    assert len({job.result(timeout=30)["process"] for job in jobs}) == 4


def test_work_goes_on_until_the_last_one_gives_up(make_client):
    client = make_client()
    first, second = submit(client, "hold"), submit(client, "hold")
    process = process_of(first)
    first.cancel()
    first.cancel()  # a second time changes nothing
    with pytest.raises(JobError, match="the job was cancelled"):
        first.result()
    assert second.result(timeout=0) is None
    assert is_running(process)
    second.cancel()
    wait_until(lambda: not is_running(process))
    third = submit(client, "hold")
    assert process_of(third) != process


def test_cancel_after_the_end_keeps_the_result(make_client):
    job = submit(make_client(), "echo")
    result = job.result(timeout=30)
    job.cancel()
    assert job.result() is result


def test_finished_reports_are_kept_for_a_time(make_client):
    now = [0.0]
    client = make_client(ttl_seconds=60.0, clock=lambda: now[0])
    first = submit(client, "echo").result(timeout=30)
    now[0] = 59.9
    assert submit(client, "echo").result(timeout=0) is first
    now[0] = 60.0
    assert submit(client, "echo").result(timeout=30)["process"] != first["process"]


def test_cache_drops_what_was_used_longest_ago(make_client):
    client = make_client(max_entries=2)
    first, second = (submit(client, "echo", name).result(timeout=30) for name in "ab")
    assert submit(client, "echo", "a").result(timeout=0) is first
    submit(client, "echo", "c").result(timeout=30)
    assert submit(client, "echo", "a").result(timeout=0) is first
    assert submit(client, "echo", "b").result(timeout=30)["process"] != second["process"]


def test_cache_ends_with_the_versions_it_was_made_with(make_client):
    client = make_client()
    first = submit(client, "echo").result(timeout=30)
    client._pool.set_versions(client.versions)
    assert submit(client, "echo").result(timeout=0) is first
    client._pool.set_versions({**client.versions, "torch": "99.0"})
    assert submit(client, "echo").result(timeout=30) is not first


# ----------------------------------------------------------------------------------------------------- many threads


def test_many_threads_ask_at_once(make_client):
    client = make_client()
    results, errors = {}, []

    def ask(index: int) -> None:
        try:
            results[index] = submit(client, "echo", str(index % 5)).result(timeout=60)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(25)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert all(results[index]["argument"] == str(index % 5) for index in range(25))
    assert len({result["process"] for result in results.values()}) == 5


def test_too_many_different_jobs_are_refused(make_client):
    client = make_client(settings={"max_jobs": 1, "max_waiting": 1})
    jobs = [submit(client, "hold", batch=1), submit(client, "hold", batch=2)]
    with pytest.raises(JobError, match="too many jobs: 2 are running or waiting; try again in a minute"):
        submit(client, "hold", batch=3)
    assert submit(client, "hold", batch=1).shared is jobs[0].shared
    jobs[1].cancel()
    assert not submit(client, "hold", batch=3).done


@pytest.mark.exhaustive
def test_one_visitor_does_not_fill_the_queue_for_the_others(make_client, pipe):
    client = make_client(settings={"max_jobs": 1, "max_waiting": 9})
    greedy = [client.on_behalf_of(Visitor(address="10.0.0.1", session=str(tab))) for tab in range(66)]
    jobs = [submit(tab, "hold", batch=1 + number) for number, tab in enumerate(greedy[:5])]
    for number, tab in enumerate(greedy[5:]):
        with pytest.raises(JobError, match="too many jobs: 5 from your address are running or waiting"):
            submit(tab, "hold", batch=6 + number)
    other = client.on_behalf_of(Visitor(address="10.0.0.2", session="0"))
    # It need not wait for the four that came before it, but for the turn of the one that runs.
    assert submit(other, "echo").result(timeout=60)["argument"] == ""
    joined = submit(other, "hold", batch=1)
    assert joined.shared is jobs[0].shared


# ------------------------------------------------------------------------------------------ the server's life and death


def test_server_keeps_nothing_of_the_jobs_that_are_over(make_client):
    client = make_client()
    submit(client, "echo").result(timeout=30)
    server = client._pool.connection.process_id
    opened = len(os.listdir(f"/proc/{server}/fd"))
    small = {"dtype": "float32", "batch": 1}  # so that they soon go before those that do not end
    jobs = [submit(client, script, index, **small) for index in range(5) for script in ("echo", "crash", "endless")]
    for job, script in zip(jobs, 5 * ("echo", "crash", "endless"), strict=True):
        if script == "endless":
            job.cancel()
        elif script == "crash":
            with pytest.raises(JobError, match="SIGABRT"):
                job.result(timeout=30)
        else:
            job.result(timeout=30)
    template = template_of(server)
    children = Path(f"/proc/{template}/task/{template}/children")
    wait_until(lambda: children.read_text() == "")  # zombies would be among them
    # At most: the first job's pipe may still have been open when they were counted.
    wait_until(lambda: len(os.listdir(f"/proc/{server}/fd")) <= opened)


def test_question_is_asked_again_by_itself_when_its_server_dies(make_client, pipe):
    client = make_client()
    job = submit(client, "hold", pipe)
    process, server = process_of(job), client._pool.connection.process_id
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: process_of(job) != process)
    assert not is_running(process)
    pipe.write_text("go")
    assert job.result(timeout=30)["released"] == "go"
    assert client._pool.connection.process_id != server


def test_question_that_loses_too_many_servers_is_given_up(make_client):
    client = make_client()
    job, process = submit(client, "hold"), 0
    for _ in range(3):
        wait_until(lambda last=process: process_of(job) != last)
        process = process_of(job)
        os.kill(client._pool.connection.process_id, signal.SIGKILL)
    with pytest.raises(JobError, match=r"the job server ended \(exit status -9\); try again"):
        job.result(timeout=30)
    assert submit(client, "echo").result(timeout=30)["argument"] == ""


def test_spare_takes_the_place_of_a_server_that_dies(make_client, pipe):
    client = make_client(settings={"spares": 1})
    job = submit(client, "hold", pipe)
    process = process_of(job)
    (spare,) = wait_until(lambda: [one for one in client._pool._supervisor._spares if one.ready])
    os.kill(client._pool.connection.process_id, signal.SIGKILL)
    wait_until(lambda: process_of(job) != process)
    assert client._pool.connection is spare
    pipe.write_text("go")
    assert job.result(timeout=30)["released"] == "go"
    (another,) = wait_until(lambda: [one for one in client._pool._supervisor._spares if one.ready])
    assert another is not spare


@pytest.mark.parametrize("spares", [0, 1])
def test_server_that_is_stopped_is_noticed_and_replaced(make_client, pipe, spares):
    client = make_client(settings={"spares": spares, "silence_seconds": 2.0})
    job = submit(client, "hold", pipe)
    process, server = process_of(job), client._pool.connection.process_id
    os.kill(server, signal.SIGSTOP)
    wait_until(lambda: job.progress == SILENT)  # whoever waits is told, and then which process has it now
    wait_until(lambda: process_of(job) != process)
    assert not is_running(server)
    pipe.write_text("go")
    assert job.result(timeout=30)["released"] == "go"


def test_process_that_jobs_are_forked_from_is_missed_too(make_client):
    client = make_client(settings={"silence_seconds": 1.0})
    process_of(submit(client, "hold"))
    server = client._pool.connection.process_id
    os.kill(template_of(server), signal.SIGSTOP)
    assert submit(client, "echo").result(timeout=30)["argument"] == ""
    assert not is_running(server)


def test_everybody_gets_the_same_bytes_although_servers_are_killed_and_stopped_under_load(make_client):
    client = make_client(settings={"spares": 1, "silence_seconds": 1.0})
    expected = {str(index): {"argument": str(index)} for index in range(6)}
    for number in (signal.SIGKILL, signal.SIGSTOP) * 2:
        jobs = {text: submit(client, "slow_echo", text, batch=number * 100 + int(text) + 1) for text in expected}
        server = wait_until(lambda: (one := client._pool.connection) and one.ready and one)
        os.kill(server.process_id, number)
        assert {text: job.result(timeout=60) for text, job in jobs.items()} == expected


def test_failures_in_a_row_are_paused_for_longer_and_longer(monkeypatch):
    started, pauses = [], []

    class Server:
        ready, heard_at = True, time.monotonic()

        def __init__(self, settings, receive, lost):
            started.append(lost)

        def send(self, message): ...

        def close(self): ...

    class Timer(threading.Timer):
        def __init__(self, seconds, function):
            pauses.append(seconds)
            super().__init__(0.0, function)

    monkeypatch.setattr(supervisor.threading, "Timer", Timer)
    ended, again = [], threading.Event()
    watched = Supervisor(
        Settings(preload=(), silence_seconds=1e9),
        connect=Server,
        receive=lambda *_: None,
        lost=lambda _, failure: ended.append(failure),
        restarted=again.set,
    )
    for number in range(10):
        if number == 8:
            watched.prosper()
        again.clear()
        server = watched.connection()
        started[-1](server, JobError("dead"))
        assert len(ended) == number + 1
        if number not in (0, 8):
            assert again.wait(30)
    watched.close()
    # The first death is followed by no pause; after eight, and a result, it is the first again.
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 0.5]


def test_server_that_cannot_start_says_why(make_client):
    client = make_client(settings={"preload": ("no_such_library",)})
    with pytest.raises(JobError, match=r"no_such_library could not be imported .* reinstall Sizer with its requirements"):
        submit(client, "echo").result(timeout=30)


def test_server_that_dies_of_a_bug_leaves_its_last_words(make_client):
    client = make_client(settings={"launch": "no such way"})
    with pytest.raises(JobError, match=r"the job server ended \(exit status 2\), saying .*invalid choice"):
        submit(client, "echo").result(timeout=30)


def test_close_ends_everything(make_client):
    client = make_client()
    job = submit(client, "hold")
    process, connection = process_of(job), client._pool.connection
    home = connection._process.home
    client.close()
    client.close()
    with pytest.raises(JobError, match="the job client was closed"):
        job.result(timeout=0)
    with pytest.raises(JobError, match="the job client was closed"):
        submit(client, "echo")
    assert not is_running(connection.process_id)
    assert not is_running(process)
    assert not os.path.exists(home)


def test_start_brings_the_server_up_before_the_first_job(make_client):
    client = make_client()
    assert client.versions is None
    client.start()
    client.start()
    assert set(wait_until(lambda: client.versions)) == {"sizer"}


@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), 9)"])
def test_no_process_outlives_the_app(end):
    """An app that ends, in order or by SIGKILL, with a job running."""
    code = f"""
import os
from sizer.service.client import JobClient
from sizer.service.fair_queue import Visitor
from sizer.service.settings import Settings
from sizer.service.supervisor import Supervisor
from tests.service.test_client import process_of, submit
client = JobClient(Settings(function={FUNCTION!r}, preload=(), readable=({TESTS!r},)), read=dict)
print(process_of(submit(client, "hold")), client._pool.connection.process_id, client._pool.connection._process.home, flush=True)
{end}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    *processes, home = done.stdout.split()
    wait_until(lambda: not any(map(is_running, map(int, processes))))
    assert not os.path.exists(home)


def test_shared_client_is_one_for_all_threads():
    found = []
    threads = [threading.Thread(target=lambda: found.append(shared_client())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1
    assert found[0]._pool.connection is None  # nothing starts before it is needed


# --------------------------------------------------------------------------------------------------------------- hub


def ask_hub(client: JobClient, name: str = "org/name@main"):
    return client.submit(f"arch=hub:{name}")


def test_hub_config_is_fetched_outside_the_job_and_handed_to_it(make_client, monkeypatch):
    asked = []

    def fetch(name: str, revision: str | None) -> bytes:
        asked.append((name, revision))
        return '{"model_type": "ü"}'.encode()

    client = make_client(settings={"function": "tests.service.test_client:give_back"}, fetch=fetch)
    result = ask_hub(client).result(timeout=30)
    assert asked == [("org/name", "main")]
    assert result["config_text"] == '{"model_type": "ü"}'
    assert "arch=hub:org/name@main" in result["query"]
    assert ask_hub(client).result(timeout=0) is result


def give_back(job: dict, progress) -> dict:
    """Work that answers with what it was given."""
    return job


def test_hub_errors_keep_their_class(make_client):
    def fetch(name: str, revision: str | None) -> bytes:
        raise HubError("the hub does not know it", given=name, todo="check the name")

    with pytest.raises(HubError, match="the hub does not know it: given org/name; check the name"):
        ask_hub(make_client(fetch=fetch)).result(timeout=30)


def test_hub_config_that_is_not_text_is_refused(make_client):
    with pytest.raises(ConfigError, match="config is not UTF-8: given 'org/name'"):
        ask_hub(make_client(fetch=lambda name, revision: b"\xff")).result(timeout=30)


def test_bug_while_fetching_ends_the_job(make_client):
    with pytest.raises(JobError, match=r"the config could not be fetched \(KeyError\)"):
        ask_hub(make_client(fetch=lambda name, revision: {}[name])).result(timeout=30)


def test_job_that_is_cancelled_while_fetching_never_runs(make_client):
    release, left = threading.Event(), threading.Event()

    def fetch(name: str, revision: str | None) -> bytes:
        release.wait(30)
        left.set()
        return b"{}"

    client = make_client(fetch=fetch)
    job = ask_hub(client)
    assert job.progress == "fetching the config of org/name"
    job.cancel()
    release.set()
    assert left.wait(30)
    with pytest.raises(JobError, match="cancelled"):
        job.result()
    assert client._pool.connection is None


# ----------------------------------------------------------------------------------------------------------- no torch


HEAVY = {"torch", "torchvision", "transformers", "streamlit"}


def heavy_modules_after(code: str) -> str:
    check = f"import sys; print(*sorted({HEAVY!r} & set(sys.modules)))"
    command = [sys.executable, "-c", f"{code}; {check}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def test_client_side_imports_neither_torch_nor_streamlit():
    code = "import sizer, sizer.__main__, sizer.service.client, sizer.service.server, sizer.service.tasks"
    assert heavy_modules_after(code) == ""


def test_the_test_above_can_fail(tmp_path, monkeypatch):
    (tmp_path / "torch.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert heavy_modules_after("import sizer.service.client, torch") == "torch"


# -------------------------------------------------------------------------------------------------- with the real torch


@pytest.fixture(scope="module")
def with_torch():
    """A server with all that the app's own imports, so that what holds here holds there."""
    settings = Settings(function="tests.service.scripted:run_or_answer", max_jobs=2, readable=(TESTS,))
    client = JobClient(settings, read=dict)
    yield client
    client.close()


def test_torch_trains_under_the_limits_on_one_thread_and_without_a_gpu(with_torch):
    result = submit(with_torch, "train").result(timeout=120)
    assert result["threads"] == 1
    assert result["cuda"] is False
    assert set(with_torch.versions) == {"sizer", *called_packages()}


def test_small_model_is_answered_while_long_grids_of_others_go_on(with_torch):
    # Mask R-CNN traces each batch size by itself; both places are taken.
    long = "arch=torchvision:maskrcnn_resnet50_fpn&dtype=float32,bfloat16&batch=1,2,4,8,16"
    grids = [
        with_torch.on_behalf_of(Visitor(address=f"10.0.0.{gpu}", session="1")).submit(f"{long}&gpu={gpu}")
        for gpu in ("a100-80gb", "rtx-4090", "t4")
    ]
    other = with_torch.on_behalf_of(Visitor(address="10.0.0.9", session="1"))
    assert other.submit("arch=torchvision:resnet18&dtype=float32").result(timeout=120) is not None
    assert sum(not grid.done for grid in grids) >= 2
    for grid in grids:
        grid.cancel()


def test_hub_model_from_the_fetch_to_the_report(with_torch, monkeypatch):
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 10, "n_positions": 8}
    config |= {"n_embd": 4, "n_layer": 1, "n_head": 2}
    with serving({"/org/tiny/resolve/main/config.json": json.dumps(config).encode()}) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        job = with_torch.submit("arch=hub:org/tiny&dtype=float32&batch=2&seq=8")
        report = Report.from_dict(job.result(timeout=120))
        with pytest.raises(HubError, match="org/absent"):
            with_torch.submit("arch=hub:org/absent").result(timeout=120)
    # Embeddings 10 x 4 + 8 x 4, two layer norms 2 x 8, attention 4 x 12 + 12 + 4 x 4 + 4, MLP 4 x 16 + 16 + 16 x 4 + 4,
    # last layer norm 8; the head is tied to the embedding: 72 + 16 + 80 + 148 + 8 = 324 parameters.
    assert report.model.parameters == 324
    assert report.failures == {}
    assert report.estimates[0].weights_bytes == 4 * 324


@contextlib.contextmanager
def serving(files: dict[str, bytes]):
    """A web server on loopback with these files; its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = files.get(self.path)
            self.send_response(200 if data is not None else 404)
            self.send_header("Content-Length", str(len(data or b"")))
            self.end_headers()
            self.wfile.write(data or b"")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_every_torchvision_model_is_listed_with_its_family(with_torch):
    rows = with_torch.submit_models().result(timeout=120)["torchvision"]
    families = {row["name"]: row["family"] for row in rows}
    assert families["resnet50"] == "resnet"
    assert families["fcn_resnet50"] == "segmentation.fcn"


def test_server_forks_from_a_single_thread(with_torch):
    submit(with_torch, "echo").result(timeout=120)
    for process in (server := with_torch._pool.connection.process_id, template_of(server)):
        assert len(os.listdir(f"/proc/{process}/task")) == 1


def test_tensor_beyond_the_limit_is_out_of_memory(with_torch):
    # 2^35 float32 elements are 128 GiB; a job may use 8 GiB, or 4 GiB more than its server holds, libraries among them.
    with pytest.raises(JobError, match=r"the job ran out of host memory \(it may use .* of address space\)") as error:
        submit(with_torch, "large_tensor").result(timeout=120)
    assert 8 <= float(str(error.value).split("may use ")[1].split(" GiB")[0]) < 16

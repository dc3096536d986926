from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sizer.estimating.estimator import estimate
from sizer.processes.environment import environment
from sizer.processes.wire import error_from_wire, to_line
from sizer.query.text import parse_query
from sizer.service.server import FORKED_BYTES, LOOK_SECONDS, Server
from sizer.service.settings import PUBLIC_VARIABLE, UNWALLED_VARIABLE, Settings
from tests.processes.running import TESTS, is_running, template_of, wait_until
from tests.service import poisoner

FUNCTION = "tests.service.scripted:run"
LAUNCHES = ("fork", "spawn")


class RawServer:
    """A job server that is spoken to line by line, as the client does it."""

    def __init__(self, home: Path, **settings):
        home.mkdir(exist_ok=True)
        self.numbers = itertools.count(1000)
        scripts = {"function": FUNCTION, "preload": (), "max_jobs": 2, "readable": (str(home), str(home.parent), TESTS)}
        self.settings = Settings(**scripts | settings)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "sizer.service.server", *self.settings.to_arguments()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(str(home)),
        )

    def __enter__(self) -> RawServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()

    def write(self, data: bytes) -> None:
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def read(self) -> dict:
        return json.loads(self.process.stdout.readline())

    def submit(self, number: int, script: str, argument: str | None = None, address: str = "") -> None:
        query = f"arch=hub:script/{script}&dtype=float32&batch=1"
        message = {"task": "estimate", "query": query, "config_text": argument, "visitor": [address, "session"]}
        self.write(to_line({"run": number, **message}))

    def read_until(self, number: int, *keys: str) -> object:
        """The first of the next messages that is about this job and holds one of the keys."""
        while True:
            message = self.read()
            for key in keys:
                if message.get("id") == number and key in message:
                    return message[key]

    def finish(self, script: str, argument: str | None = None) -> dict:
        """The result of a script. Raises the error that it ended with."""
        number = next(self.numbers)
        self.submit(number, script, argument)
        while True:
            message = self.read()
            assert "refused" not in message
            if message["id"] == number and "result" in message:
                return message["result"]
            if message["id"] == number and "error" in message:
                raise error_from_wire(message["error"])

    def hold(self, number: int = 1, argument: str | None = None) -> int:
        """Starts a job that waits for ever; its process id."""
        self.submit(number, "hold", argument)
        while not (text := str(self.read_until(number, "progress"))).startswith("holding in "):
            pass
        return int(text.split()[-1])


@pytest.fixture(scope="module", params=LAUNCHES)
def either(request, tmp_path_factory):
    """A server of each kind, with a small memory limit."""
    limits = {"memory_bytes": 2**29, "headroom_bytes": 2**28, "result_bytes": 2**20}
    with RawServer(tmp_path_factory.mktemp("home"), launch=request.param, **limits) as server:
        assert server.read().keys() == {"ready", "missing"}
        yield server


@pytest.fixture
def start(tmp_path):
    """Starts servers with settings of the test's own."""
    servers = []

    def start(**settings) -> RawServer:
        server = RawServer(tmp_path / "home", **settings)
        servers.append(server)
        assert "ready" in server.read()
        return server

    yield start
    for server in servers:
        server.__exit__()


def failure_of(server: RawServer, script: str, argument: str | None = None) -> str:
    """The message of the JobError that a script ends with."""
    from sizer.base.errors import JobError

    with pytest.raises(JobError) as caught:
        server.finish(script, argument)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------- how a job may end


def test_result_comes_back_and_each_job_has_a_process_of_its_own(either):
    first, second = either.finish("echo", "a"), either.finish("echo", "ü\ud800\n")
    assert (first["argument"], second["argument"]) == ("a", "ü\ud800\n")
    assert len({first["process"], second["process"], either.process.pid, os.getpid()}) == 4
    assert not is_running(first["process"])


@pytest.mark.parametrize(
    ("script", "argument", "message"),
    [
        ("bomb", None, r"ran out of host memory \(it may use 512.00 MiB of address space\)"),
        ("native_bomb", None, "ran out of host memory"),
        ("crash", None, r"the job crashed \(SIGABRT\)"),
        ("killed", None, "the job was killed, probably because the host ran out of memory"),
        ("leave", None, r"the job ended without an answer \(exit status 3\)"),
        ("quit_python", None, "SystemExit 'enough'"),
        ("recurse", None, "RecursionError"),
        ("broken", None, "the job failed with ZeroDivisionError 'nobody expected this'"),
        ("not_a_number", None, "ValueError 'Out of range float values are not JSON compliant"),
        ("large", "1048576", "the job wrote more than 1,048,576 bytes"),
        ("chatter", None, "the job wrote more than 1,048,576 bytes"),
        ("no_such_script", None, "KeyError"),
    ],
)
def test_job_that_goes_wrong_says_why_and_the_server_goes_on(either, script, argument, message):
    from sizer.base.errors import JobError

    with pytest.raises(JobError, match=message):
        either.finish(script, argument)
    assert either.finish("echo", "still here")["argument"] == "still here"


@pytest.mark.parametrize(
    "text",
    [
        "nonsense\n",
        "[]\n",
        "{}\n",
        '{"result": {}, "error": {}}\n',
        '{"result": {}, "id": 1}\n',
        '{"result": NaN}\n',
        '{"id": 1}\n',
        "\x00\n",
    ],
)
def test_child_that_writes_nonsense_cannot_speak_for_others(start, text):
    assert "something that is not an answer" in failure_of(start(), "garbage", text)


@pytest.mark.parametrize("script", ["deep", "foreign"])
def test_child_that_nests_too_deeply_or_in_another_encoding_is_refused(start, script):
    assert "something that is not an answer" in failure_of(start(), script)


def test_half_a_line_is_no_answer(start):
    message = failure_of(start(), "garbage", '{"result": {}}')
    assert "ended without an answer (exit status 0)" in message


def test_the_largest_result_that_is_allowed_comes_through(start):
    # {"result":{"text":"xxx"}}\n has 10 + 8 + 2 + 2 + 1 = 23 bytes beside the text.
    assert len(start(result_bytes=100_023).finish("large", "100000")["text"]) == 100_000
    assert "more than 100,022 bytes" in failure_of(start(result_bytes=100_022), "large", "100000")


@pytest.mark.parametrize("kind", ["RequestError", "ConfigError", "HubError", "BuildError", "TraceError", "DeviceError"])
def test_errors_keep_their_class_parts_and_exit_status(either, kind):
    from sizer.base import errors

    expected = getattr(errors, kind)("it went wrong", given="7", allowed="1 to 5", todo="choose less")
    with pytest.raises(type(expected), match="it went wrong: given 7, allowed 1 to 5; choose less") as caught:
        either.finish("fail", kind)
    assert type(caught.value) is type(expected)
    assert caught.value.exit_status == expected.exit_status
    assert caught.value.todo == "choose less"


def test_refusals_of_a_request_come_back_row_by_row(either):
    from sizer.base.errors import RequestError

    with pytest.raises(RequestError, match="head: given 'X', allowed A, B; choose one of these") as caught:
        either.finish("refuse")
    assert caught.value.refusals[0].key == "head"


# ------------------------------------------------------------------------------------------------------------ limits


@pytest.mark.parametrize("launch", LAUNCHES)
def test_wall_clock_ends_a_job_that_waits(start, launch):
    server = start(wall_seconds=1.0, launch=launch)
    process = server.hold()
    error = error_from_wire(server.read_until(1, "error"))
    assert str(error).startswith("the job was stopped after 1 s (wall clock); try a smaller model")
    assert not is_running(process)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_cpu_time_ends_a_job_that_loops(start, launch):
    assert "used more than 1 s of CPU time" in failure_of(start(cpu_seconds=1, launch=launch), "endless")


def test_deadline_ends_a_job_even_where_the_server_does_not(start):
    # The server is stopped (SIGSTOP), so that only the child's own timer is left: ten times 0.5 s + grace 2 s.
    server = start(wall_seconds=0.5)
    process = server.hold()
    server.process.send_signal(19)
    wait_until(lambda: not is_running(process))


def test_no_file_is_written(either, tmp_path):
    target = tmp_path / "file"
    assert "may not open files for writing" in failure_of(either, "write_file", str(target))
    assert "may not change files (os.mkdir)" in failure_of(either, "make_folder", str(target))
    assert not target.exists()


def test_kernel_refuses_the_file_where_the_audit_hook_does_not_see(either, tmp_path):
    assert either.finish("write_file_in_c", str(tmp_path / "file")) == {"errno": "EACCES"}
    assert not (tmp_path / "file").exists()


def test_job_finds_its_own_config_in_its_memory_and_no_earlier_ones(either):
    own = {}
    for mark in ("0123456789abcdef", "fedcba9876543210"):
        own[mark] = either.finish("scan_memory", f"CONFIG-OF-{mark}")["marks"]
    assert own == {mark: [mark] for mark in own}


@pytest.mark.parametrize("launch", LAUNCHES)
def test_missing_layer_is_told_and_where_one_is_required_nothing_starts(tmp_path, monkeypatch, launch):
    (tmp_path / "sitecustomize.py").write_text('import platform\nplatform.machine = lambda: "riscv64"\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with RawServer(tmp_path / "home", launch=launch, wall="wanted") as server:
        assert server.read()["missing"]["seccomp"] == "no table of system calls for riscv64"
        assert server.finish("echo", "a")["argument"] == "a"
    with RawServer(tmp_path / "home", launch=launch, wall="required") as server:
        error = error_from_wire(server.read()["fatal"])
        assert server.process.wait(30) == 1
    assert str(error).startswith("public mode needs seccomp to confine jobs, which is not to be had here (no table")


@pytest.mark.parametrize(
    ("public", "without", "wall"),
    [(None, None, "wanted"), ("0", None, "wanted"), ("1", None, "required"), ("what", None, "required"),
     ("1", "1", "wanted"), ("1", "what", "required")],
)  # fmt: skip
def test_public_mode_requires_the_wall_unless_told_otherwise(monkeypatch, public, without, wall):
    for name, value in ((PUBLIC_VARIABLE, public), (UNWALLED_VARIABLE, without)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    assert Settings().wall == wall


def test_no_network(either):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        port = str(listener.getsockname()[1])
        assert "may not use the network" in failure_of(either, "connect", port)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert "may not use the network (socket.getaddrinfo)" in failure_of(either, "resolve")


def test_no_programs_and_no_processes(either):
    assert "may not start or signal processes" in failure_of(either, "program")
    assert "may not start or signal processes (os.fork)" in failure_of(either, "python_fork")


def test_nothing_of_the_app_reaches_a_job(either, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with RawServer(tmp_path / "home", launch=either.settings.launch) as server:
        assert "ready" in server.read()
        seen = server.finish("surroundings")
    assert "secret" not in seen["environment"].values()
    assert seen["environment"]["CUDA_VISIBLE_DEVICES"] == ""
    assert seen["environment"]["HF_HUB_OFFLINE"] == "1"
    assert seen["environment"]["HF_HOME"] == seen["environment"]["HOME"] == str(tmp_path / "home")
    assert seen["stdin"] == ""
    assert seen["home"] == []
    assert seen["group"]


def test_forked_job_holds_no_file_of_the_server(start):
    # 0, 1, 2 are the null device, 3 the pipe, 4 the listing of /proc/self/fd itself.
    assert start(launch="fork").finish("surroundings")["descriptors"] == [0, 1, 2, 3, 4]


def test_what_a_job_starts_behind_our_back_dies_with_it(start):
    server = start()
    server.submit(1, "grandchild")
    text = server.read_until(1, "progress")
    while not text.startswith("holding in "):
        text = server.read_until(1, "progress")
    process = int(text.split()[-1])
    assert is_running(process)
    server.write(to_line({"cancel": 1}))
    assert error_from_wire(server.read_until(1, "error")).what == "the job was cancelled"
    wait_until(lambda: not is_running(process))


# ------------------------------------------------------------------------------------------ the queue, cancel, the end


def test_jobs_wait_for_a_place_and_too_many_are_refused(start):
    server = start(max_jobs=1, max_waiting=1)
    held = server.hold(1)
    server.submit(2, "echo")
    assert server.read_until(2, "progress") == "waiting for a free place (0 before this one)"
    server.submit(3, "echo")
    error = error_from_wire(server.read_until(3, "error"))
    assert str(error) == "too many jobs: 2 are running or waiting; try again in a minute"
    server.write(to_line({"cancel": 1}))
    assert server.read_until(2, "result")["process"] != held


def test_place_in_the_line_is_told_as_it_changes(start):
    server = start(max_jobs=1)
    server.hold(1)
    for number in (2, 3):
        server.submit(number, "echo")
        told = server.read_until(number, "progress")
        assert told == f"waiting for a free place ({number - 2} before this one)"
    server.write(to_line({"cancel": 2}))
    assert server.read_until(3, "progress") == "waiting for a free place (0 before this one)"
    server.write(to_line({"cancel": 1}))
    assert server.read_until(3, "progress") == "started"


def test_a_job_that_leaves_the_line_is_no_message_to_each_job_behind_it(monkeypatch):
    async def wait(self: Server, number: int, *_: object) -> None:
        await self._jobs[number].turn.wait()
        await asyncio.Event().wait()

    monkeypatch.setattr(Server, "_run", wait)

    async def count() -> list[int]:
        sent: list[bytes] = []
        server = Server(Settings(max_jobs=1, preload=(), tapes=""), sent.append, {}, None)
        counts = []
        for number in range(1, 8):
            server._handle(to_line({"run": number, "task": "estimate", "query": "", "config_text": None}))
        counts.append(sum(b"waiting" in line for line in sent))
        server._handle(to_line({"cancel": 3}))
        await asyncio.sleep(0)
        counts.append(sum(b"waiting" in line for line in sent))
        server._tell_places(server._queue.ahead(server._now()))
        counts.append(sum(b"waiting" in line for line in sent))
        for job in server._jobs.values():
            job.task.cancel()
        return counts

    assert asyncio.run(count()) == [6, 6, 6 + 4]  # of jobs 4 to 7


@pytest.mark.parametrize("launch", LAUNCHES)
def test_long_job_is_paused_for_another_and_goes_on_where_it_was(start, launch):
    server = start(max_jobs=1, launch=launch)
    server.submit(1, "cells", "16", address="10.0.0.1")
    assert server.read_until(1, "progress") == "started"
    server.submit(2, "echo", address="10.0.0.2")
    assert server.read_until(2, "progress") == "waiting for a free place (0 before this one)"
    assert server.read_until(1, "progress") == "waiting for a free place (0 before this one)"
    assert server.read_until(2, "result")["argument"] is None
    assert server.read_until(1, "result")["given"] == 0  # the same process did all of it


@pytest.mark.parametrize(
    ("launch", "budget_bytes", "order"),
    [
        ("fork", 2**40, [1, 2, 2, 1]),
        ("fork", FORKED_BYTES, [1, 1, 2, 2]),
        ("fork", 0, [1, 1, 2, 2]),  # the memory is not known
        ("spawn", 2**40, [1, 1, 2, 2]),  # Windows cannot pause a process
    ],
)
def test_first_figures_of_a_new_job_come_before_the_rest_of_another_while_there_is_memory(
    start, launch, budget_bytes, order
):
    server = start(max_jobs=1, launch=launch, budget_bytes=budget_bytes)
    time.sleep(2 * LOOK_SECONDS)  # until it has looked at the memory
    for number in (1, 2):
        server.submit(number, "figures", address=f"10.0.0.{number}")
    told = []
    while len(told) < len(order):
        message = server.read()
        if message.get("partial", {}).get("estimates") or "result" in message:
            told.append(message["id"])
    assert told == order


@pytest.mark.exhaustive
def test_of_too_many_paused_jobs_one_begins_again_from_what_it_kept(start):
    server = start(max_jobs=1)
    server.submit(1, "cells", "16", address="10.0.0.1")
    server.read_until(1, "progress")
    server.submit(2, "sleep", "6", address="10.0.0.2")  # one may be paused: the second that is, or the first
    server.read_until(2, "progress")
    for number in (3, 4):
        server.submit(number, "sleep", "3", address=f"10.0.0.{number}")
    results = {}
    while len(results) < 4:
        message = server.read()
        assert "error" not in message
        if "result" in message:
            results[message["id"]] = message["result"]
    assert results[2] == results[3] == results[4] == {}
    assert 0 < results[1]["given"] < 16


def test_time_of_a_pause_is_not_the_jobs_own(start):
    server = start(max_jobs=1, wall_seconds=5.0)
    server.submit(1, "sleep", "4", address="10.0.0.1")
    server.read_until(1, "progress")
    server.submit(2, "sleep", "4", address="10.0.0.2")
    assert server.read_until(1, "progress").startswith("waiting")  # after 2 s
    assert server.read_until(1, "result") == {}


@pytest.mark.parametrize("launch", LAUNCHES)
def test_cancel_kills_the_child_and_frees_its_place(start, launch):
    server = start(max_jobs=1, launch=launch)
    process = server.hold(1)
    server.write(to_line({"cancel": 1}))
    assert error_from_wire(server.read_until(1, "error")).what == "the job was cancelled"
    assert server.finish("echo", "next")["argument"] == "next"
    assert not is_running(process)


def test_cancel_of_a_job_that_waits_answers_it_and_leaves_the_other_alone(start):
    server = start(max_jobs=1)
    process = server.hold(1)
    server.submit(2, "hold")
    server.write(to_line({"cancel": 2}) + to_line({"cancel": 2}) + to_line({"cancel": 99}))
    assert error_from_wire(server.read_until(2, "error")).what == "the job was cancelled"
    assert is_running(process)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_malformed_lines_are_refused_and_never_end_the_server(start, launch):
    server = start(launch=launch, request_bytes=1000)
    lines = {
        b"nonsense": "Expecting value",
        b"\xff\xfe": "decode",
        b"[]": "a JSON object was expected, not list",
        b"{}": '"run" must be a whole number',
        b'{"run": true, "task": "estimate"}': '"run" must be a whole number',
        b'{"run": 1}': "must be texts",
        b'{"run": 1, "task": "estimate", "query": 7}': "must be texts",
        b'{"run": 1, "task": "a", "visitor": [1]}': '"visitor" must be an address and a session',
        b'{"run": NaN}': "NaN is not JSON",
        b'{"run": ' + b"1" * 5000 + b"}": "longer than 1,000 bytes",
        b"[" * 900: "Expecting value",
    }
    for line, why in lines.items():
        server.write(line + b"\n")
        assert why in server.read()["refused"], line[:40]
    process = server.hold(1)
    server.submit(1, "echo")
    assert server.read()["refused"] == "job 1 exists already"
    assert is_running(process)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_end_of_stdin_ends_the_server_and_its_jobs(start, launch):
    server = start(launch=launch)
    processes = [server.hold(1), server.hold(2)]
    server.submit(3, "echo")
    server.process.stdin.close()
    assert server.process.wait(30) == 0
    assert not any(map(is_running, processes))


def test_job_that_crashed_is_tried_once_more(start, tmp_path):
    server = start()
    os.mkfifo(tmp_path / "pipe")
    process = server.hold(1, str(tmp_path / "pipe"))
    os.kill(process, signal.SIGSEGV)
    text = server.read_until(1, "progress")
    while not text.startswith("holding in "):
        text = server.read_until(1, "progress")
    (tmp_path / "pipe").write_text("go")
    assert server.read_until(1, "result")["process"] not in (process, None)


def test_jobs_die_with_a_server_that_is_killed(start):
    server = start()
    process = server.hold()
    server.process.kill()
    wait_until(lambda: not is_running(process))


def test_server_ends_where_what_it_forks_jobs_from_has_ended(start):
    server = start(launch="fork")
    process = server.hold(1)
    os.kill(template_of(server.process.pid), signal.SIGKILL)
    wait_until(lambda: not is_running(process))
    assert server.process.wait(30) == 1


def test_server_ends_in_order_although_nobody_reads_its_answers(start):
    server = start()
    process = server.hold()
    server.process.stdout.close()
    server.submit(2, "echo")
    server.process.stdin.close()
    assert server.process.wait(30) == 0
    assert not is_running(process)


# ------------------------------------------------------------------------------------------------- what jobs leave behind

SQUEEZENET = "arch=torchvision:squeezenet1_1&mode=inference&dtype=float32"


def peaks_of(server: RawServer, query: str) -> list[int]:
    """Return the peaks of an estimate in bytes."""
    number = next(server.numbers)
    server.write(to_line({"run": number, "task": "estimate", "query": query, "config_text": None}))
    result = server.read_until(number, "result", "error")
    return [row["peak_allocated_bytes"] for row in result["estimates"]]


@pytest.mark.parametrize("restarted", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_a_job_cannot_answer_another_question(start, tmp_path, restarted):
    settings = {"preload": ("torch", "torchvision", "sizer.estimating.estimator"), "launch": "fork"}
    settings |= {"function": "tests.service.poisoner:run", "tapes": str(tmp_path / "tapes")}
    asked = f"{SQUEEZENET}&{poisoner.LARGE}&batch=2"
    honest = [row.peak_allocated_bytes for row in estimate(parse_query(asked)).estimates]
    server = start(**settings)
    small = peaks_of(server, f"{SQUEEZENET}&{poisoner.SMALL}&{poisoner.HOSTILE}")
    if restarted:
        server.process.stdin.close()
        assert server.process.wait(30) == 0
        server = start(**settings)
    assert peaks_of(server, asked) == honest
    assert peaks_of(server, f"{SQUEEZENET}&{poisoner.SMALL}&{poisoner.HOSTILE}") == small


# ---------------------------------------------------------------------------------------------------------- the start


def test_torchvision_of_another_torch_is_told_in_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "torchvision.py").write_text('raise RuntimeError("operator torchvision::nms does not exist")\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with RawServer(tmp_path / "home", preload=("torchvision",)) as server:
        error = error_from_wire(server.read()["fatal"])
        assert server.process.wait(30) == 1
    assert str(error).startswith("torch 2.")
    assert "are incompatible (operator torchvision::nms does not exist); reinstall both with one pip" in str(
        error
    )


def test_module_that_is_not_installed_is_told(tmp_path):
    with RawServer(tmp_path / "home", preload=("no_such_library",)) as server:
        error = error_from_wire(server.read()["fatal"])
    assert "no_such_library could not be imported (ModuleNotFoundError" in str(error)
    assert str(error).endswith("reinstall Sizer with its requirements")


def test_what_a_library_prints_at_import_stays_out_of_the_answers(tmp_path, monkeypatch):
    greeted = tmp_path / "greeted"
    (tmp_path / "noisy.py").write_text(
        f'print("hello")\n__version__ = "1.2"\ndef greet():\n    print("again")\n    open({str(greeted)!r}, "x").close()\n'
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with RawServer(tmp_path / "home", preload=("noisy", "noisy:greet")) as server:
        assert server.read()["ready"] == {"sizer": server_version(), "noisy": "1.2"}
        assert greeted.exists()
        assert server.finish("echo", "a")["argument"] == "a"


def server_version() -> str:
    import sizer

    return sizer.__version__


def test_settings_survive_the_command_line():
    settings = Settings(max_jobs=3, wall_seconds=1.5, memory_bytes=2**31, function="a.b:c", preload=("x", "y.z"))
    assert Settings.from_arguments(settings.to_arguments()) == settings
    assert Settings.from_arguments(Settings(preload=()).to_arguments()) == Settings(preload=())
    assert Settings.from_arguments([]) == Settings()


def test_project_is_importable_from_wherever_the_server_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with RawServer(tmp_path / "home") as server:
        assert "ready" in server.read()

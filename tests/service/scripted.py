"""Work for jobs under test: `arch=hub:script/<name>` names the function to run, `config_text` is its argument.

A stand-in for sizer.service.tasks, so that every way a job can end badly really happens in a child process.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

from sizer.base import errors
from sizer.base.errors import Refusal, RequestError
from sizer.query.text import parse_query

PIPE = 3  # the descriptor that a forked job answers on


def run(job: dict, channel) -> dict:
    if job["task"] == "models":
        only = [{"name": "resnet50", "family": "resnet"}]  # as if each package had only this
        return {"torchvision": only, "timm": only}
    name = parse_query(job["query"]).name.removeprefix("script/")
    with_channel = {"cells": cells, "figures": figures}.get(name)
    return SCRIPTS[name](job["config_text"], channel.progress) if with_channel is None else with_channel(job, channel)


def run_or_answer(job: dict, channel) -> dict:
    """Runs scripts; everything else gets its real answer."""
    from sizer.service import tasks

    is_script = job["task"] == "estimate" and parse_query(job["query"]).name.startswith("script/")
    return run(job, channel) if is_script else tasks.run(job, channel)


def report(job: dict, channel) -> dict:
    """Work that answers any query with a report made by hand; a dtype of float16 cannot be traced."""
    from tests.ui.reports import report_for

    request = parse_query(job["query"])
    failures = {"float16": "nobody can trace this"} if "float16" in request.dtypes else {}
    return report_for(request, failures=failures).to_dict()


def found_one_by_one(job: dict, channel) -> dict:
    """Tells a report of one cell after the other, and then holds."""
    from sizer.base.codec import encode
    from tests.ui.reports import report_for

    request = parse_query(job["query"])
    for batch in request.batches:
        channel.partial(encode(replace(report_for(replace(request, batches=(batch,))), pending=request.dtypes)))
    return hold(None, channel.progress)


def hold_always(job: dict, channel) -> dict:
    return hold(None, channel.progress)


def echo(argument, progress) -> dict:
    return {"argument": argument, "process": os.getpid()}


def slow_echo(argument, progress) -> dict:
    time.sleep(0.2)
    return {"argument": argument}


def hold(argument, progress) -> dict:
    """Tells its process id, then waits until somebody writes to the named pipe `argument`, or for ever."""
    progress(f"holding in {os.getpid()}")
    if not argument:
        while True:
            signal.pause()
    with open(argument) as pipe:
        return {"released": pipe.read(), "process": os.getpid()}


def figures(job: dict, channel) -> dict:
    """Tells counts at once, first figures after half a second, and ends a second later."""
    channel.partial({"estimates": []})
    time.sleep(0.5)
    channel.partial({"estimates": [{}]})
    time.sleep(1.0)
    return {}


def cells(job: dict, channel) -> dict:
    """As many cells as `config_text` says, each of a quarter of a second unless it was kept: how many were given as kept."""
    given = set(job["kept"])
    for cell in range(int(job["config_text"])):
        if str(cell) not in given:
            sleep("0.25", channel.progress)
            channel.keep(str(cell), b"done")
    return {"given": len(given)}


def sleep(argument, progress) -> dict:
    """Works for so many seconds of its own: those of a pause do not count."""
    left, before = float(argument), time.monotonic()
    while left > 0:
        time.sleep(0.01)
        now = time.monotonic()
        left, before = left - min(now - before, 0.05), now
    return {}


def fill(argument, progress) -> dict:
    """Holds so many MiB for a moment."""
    block = b"x" * (int(argument) * 2**20)
    time.sleep(0.5)
    return {} if block else None


def fill_and_hold(argument, progress) -> dict:
    block = b"x" * (int(argument) * 2**20)
    return hold(None, progress) if block else None


def fill_and_sleep(argument, progress) -> dict:
    block = b"x" * (int(argument) * 2**20)
    progress(f"holding in {os.getpid()}")
    return sleep("3", progress) if block else None


def endless(argument, progress) -> dict:
    while True:
        pass


def bomb(argument, progress) -> dict:
    blocks = []
    while True:
        blocks.append(bytearray(2**24))


def native_bomb(argument, progress) -> dict:
    """What C code sees beyond the limit: no memory, an error code."""
    mmap.mmap(-1, 2**40)
    return {}


def crash(argument, progress) -> dict:
    os.abort()


def killed(argument, progress) -> dict:
    signal.raise_signal(signal.SIGKILL)


def leave(argument, progress) -> dict:
    os._exit(3)


def quit_python(argument, progress) -> dict:
    sys.exit("enough")


def recurse(argument, progress) -> dict:
    return recurse(argument, progress)


def large(argument, progress) -> dict:
    return {"text": "x" * int(argument)}


def chatter(argument, progress) -> dict:
    while True:
        progress("x" * 10_000)


def garbage(argument, progress) -> dict:
    """Writes raw text to the pipe, then ends as if all were well."""
    os.write(PIPE, argument.encode())
    os._exit(0)


def foreign(argument, progress) -> dict:
    """An answer that json.loads would take, in an encoding that the client does not read."""
    os.write(PIPE, '{"result": {}}\n'.encode("utf-16-be"))
    os._exit(0)


def deep(argument, progress) -> dict:
    return garbage('{"result":' + "[" * 200_000 + "\n", progress)


def not_a_number(argument, progress) -> dict:
    return {"bytes": float("nan")}


def write_file(argument, progress) -> dict:
    open(argument, "w").close()
    return {}


def make_folder(argument, progress) -> dict:
    os.mkdir(argument)
    return {}


def write_file_in_c(argument, progress) -> dict:
    """What the audit hook does not see."""
    opened = ctypes.CDLL(None, use_errno=True).open(argument.encode(), os.O_WRONLY | os.O_CREAT, 0o600)
    return {"errno": errno.errorcode[ctypes.get_errno()] if opened < 0 else None}


def scan_memory(argument, progress) -> dict:
    """The marks of every "CONFIG-OF-<mark>" in this process's memory: its own config, and whatever else it was left."""
    marks, pattern = set(), re.compile(b"CONFIG-OF-([0-9a-f]{16})")
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as memory:
        for line in maps:
            (low, high), access = (int(end, 16) for end in line.split()[0].split("-")), line.split()[1]
            if access.startswith("rw") and "[v" not in line:
                memory.seek(low)
                marks |= {mark.decode() for mark in pattern.findall(memory.read(high - low))}
    return {"marks": sorted(marks)}


def connect(argument, progress) -> dict:
    socket.create_connection(("127.0.0.1", int(argument)), timeout=5)
    return {}


def resolve(argument, progress) -> dict:
    socket.getaddrinfo("localhost", 80)
    return {}


def program(argument, progress) -> dict:
    subprocess.run([sys.executable, "-c", "0"], check=True)
    return {}


def python_fork(argument, progress) -> dict:
    os.fork()
    return {}


def grandchild(argument, progress) -> dict:
    """Forks behind the audit hook's back; both wait for ever. Where the kernel refuses (RLIMIT_NPROC), one waits."""
    if ctypes.CDLL(None).fork() <= 0:
        progress(f"holding in {os.getpid()}")
    while True:
        signal.pause()


def surroundings(argument, progress) -> dict:
    """What a job can see of the world around it."""
    print("nobody reads this")
    print("nor this", file=sys.stderr)
    return {
        "environment": dict(os.environ),
        "stdin": sys.stdin.read(),
        "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd")),
        "home": os.listdir(os.environ["HF_HOME"]),
        "group": os.getpgid(0) == os.getpid(),
    }


def fail(argument, progress) -> dict:
    """Raises the error of sizer.base.errors that `argument` names."""
    raise getattr(errors, argument)("it went wrong", given="7", allowed="1 to 5", todo="choose less")


def refuse(argument, progress) -> dict:
    raise RequestError(refusals=[Refusal(key="head", given="'X'", allowed="A, B", todo="choose one of these")])


def broken(argument, progress) -> dict:
    raise ZeroDivisionError("nobody expected\nthis")


def train(argument, progress) -> dict:
    """A small real training step on the CPU: torch works under the limits."""
    import torch

    module = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 30 * 30, 10))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.rand(4, 3, 32, 32)).square().mean().backward()
    optimizer.step()
    return {"threads": torch.get_num_threads(), "cuda": torch.cuda.is_available(), "process": os.getpid()}


def large_tensor(argument, progress) -> dict:
    import torch

    torch.ones(2**35)
    return {}


SCRIPTS = {name: value for name, value in globals().items() if callable(value) and value.__module__ == __name__}

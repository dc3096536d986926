"""Main loop of a child process: run one job, and write its progress and its result or error as JSON lines."""

from __future__ import annotations

import os
import traceback
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path

from sizer.base.errors import JobError, SizerError, quote
from sizer.base.units import format_bytes
from sizer.processes.sandbox import memory_limit_bytes
from sizer.processes.wire import clip_progress, error_to_wire, to_line

Progress = Callable[[str], None]

OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "cannot allocate memory")
PACKAGE = Path(__file__).resolve().parents[1]
PLUMBING = (PACKAGE / "processes", PACKAGE / "service")  # in every traceback of a job: lines of these do not help


class Channel:
    """Messages of a running job, one per line."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def progress(self, text: str) -> None:
        """Report the current activity in one short line."""
        self._write({"progress": clip_progress(text)})

    def partial(self, value: dict) -> None:
        """Send the part of the result that is known so far."""
        self._write({"partial": value})

    def keep(self, name: str, data: bytes) -> None:
        """Ask for something to be kept for later jobs on the same architecture."""
        self._write({"keep": {"name": name, "data": b64encode(data).decode("ascii")}})

    def _write(self, message: dict) -> None:
        write(self._descriptor, to_line(message))


def run_job(job: Callable[[Channel], dict], descriptor: int) -> None:
    """Call `job(channel)`. Write its messages, then the dict that it returns or the error that it raises."""
    try:
        line = to_line({"result": job(Channel(descriptor))})
    except SizerError as error:
        line = to_line({"error": error_to_wire(error)})
    except BaseException as error:  # SystemExit and RecursionError included: the parent waits for an answer
        line = to_line({"error": error_to_wire(explain(error))})
    write(descriptor, line)


def write(descriptor: int, data: bytes) -> None:
    """Write all of the data to a pipe."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def redirect_to_null(*descriptors: int) -> None:
    """Make file descriptors the null device."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(null, descriptor)
    os.close(null)


def explain(error: BaseException) -> JobError:
    """Return an unexpected exception as a JobError."""
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or any(sign in text.lower() for sign in OUT_OF_MEMORY):
        limit = memory_limit_bytes()
        may_use = "" if limit is None else f" (it may use {format_bytes(limit)} of address space)"
        return JobError(f"the job ran out of host memory{may_use}", todo="try a smaller model or fewer batch sizes")
    return JobError(f"the job failed{_line_of(error)} with {type(error).__name__} {quote(text, 300)}")


def _line_of(error: BaseException) -> str:
    """Return the innermost line of Sizer in an exception's traceback, plumbing aside, as text; empty if there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        parents = Path(frame.filename).parents
        if PACKAGE in parents and not any(room in parents for room in PLUMBING):
            return f" at {Path(frame.filename).relative_to(PACKAGE.parent).as_posix()}:{frame.lineno}"
    return ""

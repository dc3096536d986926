"""What a child process does: run one job, write its progress and its result or error as JSON lines."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path

from sizer.errors import JobError, SizerError, quote
from sizer.processes.sandbox import memory_limit_bytes
from sizer.processes.wire import clip_progress, error_to_wire, to_line
from sizer.units import format_bytes

Progress = Callable[[str], None]

OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "cannot allocate memory")
PACKAGE = Path(__file__).resolve().parents[1]
PLUMBING = (PACKAGE / "processes", PACKAGE / "service")  # in every traceback of a job: their lines do not help


def run_job(job: Callable[[Progress], dict], descriptor: int) -> None:
    """Call `job(progress)`; write what it reports, then the dict that it returns or the error that it raises."""
    try:
        line = to_line({"result": job(lambda text: write(descriptor, to_line({"progress": clip_progress(text)})))})
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
    """An exception that nobody expected, as a JobError."""
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or any(sign in text.lower() for sign in OUT_OF_MEMORY):
        limit = memory_limit_bytes()
        may_use = "" if limit is None else f" (it may use {format_bytes(limit)} of address space)"
        return JobError(f"the job ran out of host memory{may_use}", todo="try a smaller model or fewer batch sizes")
    return JobError(f"the job failed{_line_of(error)} with {type(error).__name__} {quote(text, 300)}")


def _line_of(error: BaseException) -> str:
    """The innermost line of Sizer, plumbing aside, that an exception passed, as text; empty where there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        parents = Path(frame.filename).parents
        if PACKAGE in parents and not any(room in parents for room in PLUMBING):
            return f" at {Path(frame.filename).relative_to(PACKAGE.parent).as_posix()}:{frame.lineno}"
    return ""

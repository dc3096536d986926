"""One job in one process: confine it, run the work, write progress and one result as JSON lines, end.

`run_forked` is what a freshly forked child calls. `python -m sizer.service.child` is the same in a fresh process, for
systems without fork: it reads its job as one line from stdin.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from sizer.errors import JobError, SizerError, quote
from sizer.processes.sandbox import confine, memory_limit_bytes
from sizer.processes.wire import clip_progress, error_to_wire, from_line, to_line
from sizer.service.settings import Settings
from sizer.units import format_bytes

OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "cannot allocate memory")
PACKAGE = Path(__file__).resolve().parents[1]

Work = Callable[[dict, Callable[[str], None]], dict]


def load_work(name: str) -> Work:
    """The function that MODULE:FUNCTION names. Raises ImportError, AttributeError or ValueError where there is none."""
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)


def run_forked(job: dict, settings: Settings, descriptor: int, parent: int) -> NoReturn:
    """Runs a job in the process that os.fork just made, writes to the pipe `descriptor`, and ends the process."""
    try:
        os.setpgid(0, 0)
        _run(job, settings, _detach(descriptor), parent)
        os._exit(0)
    finally:
        os._exit(1)


def _detach(descriptor: int) -> int:
    """Closes all files of the parent but one pipe; its new descriptor. Standard streams become the null device."""
    pipe = os.dup2(descriptor, 3) if descriptor != 3 else 3
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.close(null)
    return pipe


def _run(job: dict, settings: Settings, descriptor: int, parent: int) -> None:
    def progress(text: str) -> None:
        _write(descriptor, to_line({"progress": clip_progress(text)}))

    try:
        confine(settings, parent)
        line = to_line({"result": load_work(settings.work)(job, progress)})
    except SizerError as error:
        line = to_line({"error": error_to_wire(error)})
    except BaseException as error:  # a job must always answer: SystemExit and RecursionError included
        line = to_line({"error": error_to_wire(explain(error))})
    _write(descriptor, line)


def explain(error: BaseException) -> JobError:
    """An exception that nobody expected, as a JobError."""
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or any(sign in text.lower() for sign in OUT_OF_MEMORY):
        limit = memory_limit_bytes()
        may_use = "" if limit is None else f" (it may use {format_bytes(limit)} of address space)"
        return JobError(f"the job ran out of host memory{may_use}", todo="try a smaller model or fewer batch sizes")
    return JobError(f"the job failed{_place(error)} with {type(error).__name__} {quote(text, 300)}")


def _place(error: BaseException) -> str:
    """The last line of ours, outside of this room, that an exception passed, as text; empty where there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        parents = Path(frame.filename).parents
        if PACKAGE in parents and PACKAGE / "service" not in parents:
            return f" at {Path(frame.filename).relative_to(PACKAGE.parent).as_posix()}:{frame.lineno}"
    return ""


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def main() -> None:
    """Runs the job on stdin; its progress and result go to what was stdout."""
    settings = Settings.from_arguments(sys.argv[1:])
    job = from_line(sys.stdin.buffer.readline())
    descriptor = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    _run(job, settings, descriptor, os.getppid())
    os._exit(0)


if __name__ == "__main__":
    main()

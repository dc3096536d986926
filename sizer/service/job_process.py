"""Run a job in a separate process, a fork of the preloaded template or a fresh Python (Windows), and say why one has ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator

from sizer.base.errors import JobError, TimeLimitError
from sizer.base.units import format_bytes
from sizer.processes.process import kill, kill_group, python_command, signal_group
from sizer.processes.wire import to_line
from sizer.service.job_child import Template
from sizer.service.settings import Settings, is_public
from sizer.service.variables import JOB_SECONDS

REAP_SECONDS = 0.005


class ForkedJob:
    """A copy of the template, in a new process group. Raises OSError if the system refuses to fork."""

    def __init__(self, job: dict, settings: Settings, template: Template):
        self._template = template
        source, sink = os.pipe()
        self._limit = settings.result_bytes
        self._source = os.fdopen(source, "rb", buffering=0)
        self._transport: asyncio.ReadTransport | None = None
        try:
            with tempfile.TemporaryFile() as work:
                work.writelines(work_of_child(job))
                work.seek(0)
                self.id = template.fork(work.fileno(), sink)
        finally:
            os.close(sink)

    async def open(self) -> asyncio.StreamReader:
        """Return the child's output. Raises OSError if the process could not be started."""
        reader = asyncio.StreamReader(limit=self._limit)
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._source)
        return reader

    def pause(self) -> bool:
        """Pause the child; it keeps its memory."""
        signal_group(self.id, signal.SIGSTOP)
        return True

    def go_on(self) -> None:
        """Continue a paused child."""
        signal_group(self.id, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the child; `stop` returns its exit status."""
        kill_group(self.id)

    async def stop(self) -> int:
        """Kill the child with all its descendants; return its exit status, negative for the signal that ended it.

        A child that had already ended keeps its exit status.
        """
        kill_group(self.id)
        while (status := self._template.status(self.id)) is None:
            await asyncio.sleep(REAP_SECONDS)
            kill_group(self.id)  # in case it had not made its group yet
        (self._transport or self._source).close()
        return os.waitstatus_to_exitcode(status)


class SpawnedJob:
    """The same in a fresh Python process, which imports everything again."""

    def __init__(self, job: dict, settings: Settings):
        self._job = job
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self.id = 0  # until it is started

    async def open(self) -> asyncio.StreamReader:
        self._process = await asyncio.create_subprocess_exec(
            *python_command("sizer.service.job_child", *self._settings.to_arguments()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            limit=self._settings.result_bytes,
            start_new_session=os.name == "posix",
        )
        self.id, stdin, stdout = self._process.pid, self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None, "both are pipes"
        stdin.writelines(work_of_child(self._job))
        stdin.close()
        return stdout

    def pause(self) -> bool:
        if os.name != "posix" or self._process is None:
            return False
        signal_group(self.id, signal.SIGSTOP)
        return True

    def go_on(self) -> None:
        signal_group(self.id, signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            kill(self._process)

    async def stop(self) -> int:
        if self._process is None:
            return 0
        kill(self._process)
        return await self._process.wait()


def work_of_child(job: dict) -> Iterator[bytes]:
    """Yield a job's line, then the stored results."""
    kept = job["kept"]
    yield to_line({**job, "kept": [[name, len(data)] for name, data in kept.items()]})
    yield from kept.values()


# ------------------------------------------------------------------------------------------------------------- endings


CRASHES = ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGKILL", "SIGSEGV", "SIGSYS")


def is_crash(status: int) -> bool:
    """Return whether an exit status means a crash: the process was not ended by its own limits."""
    return status < 0 and -status in set(signal.Signals) and signal.Signals(-status).name in CRASHES


def too_slow(settings: Settings) -> JobError:
    """Return the error of a job that exceeded its time limit."""
    todo = "try a smaller model, a shorter sequence or fewer batch sizes"
    if not is_public():
        todo += f", or set {JOB_SECONDS.name} to more seconds"
    return TimeLimitError(f"the job was stopped after {settings.wall_seconds:g} s (wall clock)", todo=todo)


def too_large(settings: Settings) -> JobError:
    """Return the error of a job that exceeded its output limit."""
    todo = "try fewer dtypes or batch sizes"
    return JobError(f"the job wrote more than {settings.result_bytes:,} bytes", todo=todo)


def over_budget(held_bytes: int, settings: Settings) -> JobError:
    """Return the error of the largest job when all jobs together exceeded the memory budget."""
    held, budget = format_bytes(held_bytes), format_bytes(settings.budget_bytes)
    todo = "try again in a minute, or a smaller model"
    return JobError(f"the job was stopped: it held {held} when all jobs together held more than {budget}", todo=todo)


def without_memory(settings: Settings) -> JobError:
    """Return the error of the largest job when all jobs together reached the limit of their control group."""
    budget = format_bytes(settings.budget_bytes)
    todo = "try again in a minute, or a smaller model"
    return JobError(f"the job was stopped: it held most when all jobs together needed more than {budget}", todo=todo)


def explain_end(status: int, settings: Settings) -> JobError:
    """Return why a child ended without an answer, from its exit status (negative: the signal)."""
    if status >= 0:
        return JobError(f"the job ended without an answer (exit status {status})", todo="try again")
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    if name == "SIGALRM":  # the child's own deadline, if this process was too busy to enforce it
        return too_slow(settings)
    if name == "SIGXCPU":
        return TimeLimitError(f"the job used more than {settings.cpu_seconds} s of CPU time", todo="try a smaller model")
    if name == "SIGKILL":
        return JobError("the job was killed, probably because the host ran out of memory", todo="try a smaller model")
    return JobError(f"the job crashed ({name})", todo="please report this query as a bug")

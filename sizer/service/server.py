"""The job server: a process of its own that imports torch once and runs each job in a child it can kill.

    python -m sizer.service.server [--max-jobs=2 --wall-seconds=120 ...]

It reads requests and writes answers as JSON lines, and ends, with its children, when its stdin does:

    client -> server   {"run": 7, "task": "estimate", "query": "...", "config_text": null}      {"cancel": 7}
                       {"run": 8, "task": "compare", "measured": "a measurement's JSON"}
    server -> client   {"ready": {"torch": "..."}, "missing": {"landlock": "why"}}, {"fatal": error},
                       {"refused": "why a line was not understood"}
                       {"id": 7, "progress": "..."}, {"id": 7, "partial": {...}}, {"id": 7, "result": {...}},
                       {"id": 7, "error": error}

What a child asks to be kept ("keep") stays here: the next job on the same architecture is given it. Children are forked from
the template (`sizer.service.template`), which sees none of this; "missing" are the layers of their wall that the system lacks.
A job's number is a random one that no child is told: it is the token by which the client knows an answer.

One thread and one event loop, because forking a process with threads is not safe. Where there is no fork, on
Windows, each job is a fresh process, which imports torch again: slower, the same protocol.

*Known limitations*: the "spawn" way is tested on Linux only. While it imports torch, the server answers nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from base64 import b64decode
from collections.abc import AsyncIterator, Callable

from sizer.errors import JobError, SizerError
from sizer.processes.child import write
from sizer.processes.environment import HOME_VARIABLE
from sizer.processes.wall import LAYERS, raise_wall, readable_folders
from sizer.processes.wire import error_to_wire, from_line, to_line
from sizer.service.job_process import ForkedJob, SpawnedJob
from sizer.service.preload import preload
from sizer.service.settings import UNWALLED_VARIABLE, Settings
from sizer.service.stdin import read_pipe, read_thread
from sizer.service.tapes import TapeStore, architecture_of, code_digest
from sizer.service.template import Template


class Server:
    """Takes requests one message at a time; each job runs as a task that owns one child."""

    def __init__(
        self,
        settings: Settings,
        send: Callable[[bytes], None],
        versions: dict[str, str],
        template: Template | None,
    ):
        self._settings, self._template = settings, template
        self._tapes = TapeStore(settings.tapes)
        self._versions = json.dumps([versions, code_digest()])
        self._send = send
        self._launch = ForkedJob if settings.launch == "fork" else SpawnedJob
        self._slots = asyncio.Semaphore(settings.max_jobs)
        self._jobs: dict[int, asyncio.Task] = {}

    async def serve(self, lines: AsyncIterator[bytes | None]) -> None:
        """Handle lines until they end, then kill all jobs. None stands for a line that was too long."""
        try:
            async for line in lines:
                self._handle(line)
        finally:
            jobs = list(self._jobs.values())
            for job in jobs:
                if not job.cancelling():
                    job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    def _handle(self, line: bytes | None) -> None:
        try:
            if line is None:
                raise ValueError(f"longer than {self._settings.request_bytes:,} bytes")
            message = from_line(line)
            if message.keys() == {"cancel"}:
                self._cancel(message["cancel"])
            else:
                self._submit(_to_number(message), _to_job(message))
        except ValueError as error:
            self._send(to_line({"refused": str(error)[:200]}))

    def _submit(self, number: int, job: dict) -> None:
        if number in self._jobs:
            raise ValueError(f"job {number} exists already")
        ahead = sum(not job.cancelling() for job in self._jobs.values()) - self._settings.max_jobs
        if ahead >= self._settings.max_waiting:
            busy = JobError(f"the job server is busy: {ahead} jobs are waiting", todo="try again in a minute")
            return self._reply(number, error=error_to_wire(busy))
        if ahead >= 0:
            self._reply(number, progress=f"waiting for a free place ({ahead} before this one)")
        task = asyncio.get_running_loop().create_task(self._run(number, job))
        self._jobs[number] = task
        task.add_done_callback(lambda _: self._jobs.pop(number))

    def _cancel(self, number: object) -> None:
        task = self._jobs.get(number) if isinstance(number, int) else None
        if task is not None and not task.cancelling():  # else it has ended, and has been answered
            task.cancel()
            self._reply(number, error=error_to_wire(JobError("the job was cancelled")))

    async def _run(self, number: int, job: dict) -> None:
        """Run a job from its place in the queue to its one answer; a cancelled job has been answered already."""
        try:
            async with self._slots:
                await self._run_child(number, job)
        except SizerError as error:
            self._reply(number, error=error_to_wire(error))
        except Exception as error:  # of any kind (no process could be started, say): the job must be answered
            failure = JobError(f"the job could not be run ({type(error).__name__}: {error})", todo="try again")
            self._reply(number, error=error_to_wire(failure))

    async def _run_child(self, number: int, job: dict) -> None:
        """Start the child, forward its lines and stop it; raises JobError where it ends without a result."""
        self._reply(number, progress="started")
        architecture = job["query"] and architecture_of(job["query"], job["config_text"], self._versions)
        kept = self._tapes.of(architecture) if architecture else {}
        child = self._launch({**job, "kept": kept}, self._settings, self._template)
        try:
            async with asyncio.timeout(self._settings.wall_seconds):
                answered = await self._relay(number, await child.open(), architecture)
        except TimeoutError:
            raise _too_slow(self._settings) from None
        finally:
            status = await asyncio.shield(child.stop())
        if not answered:
            raise _explain_end(status, self._settings)

    async def _relay(self, number: int, reader: asyncio.StreamReader, architecture: str | None) -> bool:
        """Sends on what the child says, and keeps what it asks to keep; False where it ended without a result or an error."""
        left = self._settings.result_bytes
        while True:
            try:
                line = await reader.readuntil(b"\n")
            except asyncio.IncompleteReadError:
                return False
            except asyncio.LimitOverrunError:
                raise _too_large(self._settings) from None
            if (left := left - len(line)) < 0:
                raise _too_large(self._settings)
            if self._take(number, line, architecture) in ("result", "error"):
                return True

    def _take(self, number: int, line: bytes, architecture: str | None) -> str:
        """Forwards a child's line under the job's number, or keeps what it holds; the one key it has."""
        try:
            ((key, value),) = from_line(line).items()
            if key == "keep":
                if architecture is not None:
                    self._tapes.put(architecture, str(value["name"]), b64decode(value["data"], validate=True))
                return key
            if key not in ("progress", "partial", "result", "error"):
                raise ValueError
        except (ValueError, TypeError, KeyError):
            raise JobError("the job wrote something that is not an answer", todo="try again") from None
        self._send(b'{"id":%d,%s' % (number, line.lstrip()[1:]))
        return key

    def _reply(self, number: int, **content: object) -> None:
        self._send(to_line({"id": number, **content}))


def _to_number(message: dict) -> int:
    if type(number := message.get("run")) is not int:
        raise ValueError('"run" must be a whole number')
    return number


def _to_job(message: dict) -> dict:
    job = {name: message.get(name) for name in ("task", "query", "config_text", "measured")}
    if not isinstance(job["task"], str) or any(not isinstance(value, str | None) for value in job.values()):
        raise ValueError('"task", "query", "config_text" and "measured" must be texts')
    return job


def _too_slow(settings: Settings) -> JobError:
    todo = "try a smaller model, a shorter sequence or fewer batch sizes"
    return JobError(f"the job was stopped after {settings.wall_seconds:g} s (wall clock)", todo=todo)


def _too_large(settings: Settings) -> JobError:
    todo = "try fewer dtypes or batch sizes"
    return JobError(f"the job wrote more than {settings.result_bytes:,} bytes", todo=todo)


def _explain_end(status: int, settings: Settings) -> JobError:
    """Why a child ended without an answer, from its exit status (negative: the signal)."""
    if status >= 0:
        return JobError(f"the job ended without an answer (exit status {status})", todo="try again")
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    if name == "SIGALRM":  # the child's own deadline, where this process was too busy to keep it
        return _too_slow(settings)
    if name == "SIGXCPU":
        return JobError(f"the job used more than {settings.cpu_seconds} s of CPU time", todo="try a smaller model")
    if name == "SIGKILL":
        return JobError("the job was killed, probably because the host ran out of memory", todo="try a smaller model")
    return JobError(f"the job crashed ({name})", todo="please report this query as a bug")


def missing_layers(settings: Settings) -> dict[str, str]:
    """The layers of a job's wall that this system does not have, each with why; found out in a child."""
    if not hasattr(os, "fork"):
        return raise_wall(())
    source, sink = os.pipe()
    if (child := os.fork()) == 0:
        try:
            write(sink, to_line(raise_wall((*readable_folders(), *settings.readable))))
        finally:
            os._exit(0)
    os.close(sink)
    with open(source, "rb") as pipe:
        line = pipe.readline()
    os.waitpid(child, 0)
    return from_line(line) if line else dict.fromkeys(LAYERS, "it could not be tried")


def _unwalled(why: str) -> JobError:
    todo = f"run it on Linux with seccomp, or set {UNWALLED_VARIABLE}=1"
    return JobError(f"public mode needs seccomp to confine jobs, which is not to be had here ({why})", todo=todo)


def main() -> None:
    """Run the job server until stdin ends."""
    settings = Settings.from_arguments(sys.argv[1:])
    output = os.dup(1)
    os.dup2(2, 1)  # what a library prints goes to stderr, not between the answers

    def send(data: bytes) -> None:
        write(output, data)

    with contextlib.suppress(BrokenPipeError):  # the app has gone
        try:
            versions = preload(settings.preload)
        except JobError as error:
            send(to_line({"fatal": error_to_wire(error)}))
            sys.exit(1)
        sys.stdout.flush()
        missing = missing_layers(settings)
        if settings.wall == "required" and "seccomp" in missing:
            send(to_line({"fatal": error_to_wire(_unwalled(missing["seccomp"]))}))
            sys.exit(1)
        template = Template(settings) if settings.launch == "fork" else None
        send(to_line({"ready": versions, "missing": missing}))
        lines = read_pipe if settings.launch == "fork" else read_thread
        asyncio.run(Server(settings, send, versions, template).serve(lines(settings.request_bytes)))
    if home := os.environ.get(HOME_VARIABLE):
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()

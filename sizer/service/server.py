"""The job server: a separate process that imports torch once and runs each job in a child it can kill.

    python -m sizer.service.server [--max-jobs=2 --wall-seconds=120 ...]

It reads requests and writes answers as JSON lines, and ends, with its children, when its stdin is closed:

    client -> server   {"run": 7, "task": "estimate", "query": "...", "config_text": null, "visitor": ["address", "session"],
                        "tapes": {"name": base64}}
                       {"cancel": 7}, {"ping": 0}
                       {"run": 8, "task": "compare", "measured": "a measurement's JSON"}
                       {"run": 9, "task": "devices", "query": "...", "part": "1/2"}
    server -> client   {"ready": {"torch": "..."}, "missing": {"landlock": "why"}}, {"fatal": error},
                       {"refused": "why a line was not understood"}, {"pong": 0}
                       {"id": 7, "progress": "..."}, {"id": 7, "partial": {...}}, {"id": 7, "result": {...}},
                       {"id": 7, "error": error}, {"id": 7, "keep": {"name": "...", "data": base64}}

The queue decides which job runs next, and which is paused (`sizer.service.fair_queue`). A paused job continues later. A job
that was stopped for others, or that crashed for the first time, is started again, and continues from stored results.

Results that a child asks to store ("keep") stay here, under a name that its question may write (`sizer.service.access`). The
next job on the same architecture receives the results that its question can use, and usable "tapes" that the client has from
elsewhere. A client that shares tapes (`Settings.sharing`) receives each one. Children are forked from the template
(`sizer.service.job_child`), which sees none of this; "missing" are the layers of their wall that the system lacks.

A job's number is random and unknown to its child: it is the token by which the client recognizes an answer.

There is one event loop, and one thread that reads and writes stored results. The template, which forks, has neither. Without
fork, on Windows, each job is a fresh process, which imports torch again: slower, the same protocol.

*Known limitations*: the "spawn" way is tested on Linux only. While it imports torch, the server answers nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import threading
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager

from sizer.base.errors import JobError, SizerError
from sizer.base.units import MIB
from sizer.processes.child import write
from sizer.processes.environment import HOME_VARIABLE
from sizer.processes.wall import LAYERS, raise_wall, readable_folders
from sizer.processes.wire import clip_progress, error_to_wire, from_line, to_line
from sizer.service.access import Access, access_of
from sizer.service.edition import edition_of
from sizer.service.fair_queue import FairQueue, Visitor
from sizer.service.job_child import Template
from sizer.service.job_memory import GROUP, MemoryGroup, private_bytes
from sizer.service.job_process import (
    ForkedJob,
    SpawnedJob,
    explain_end,
    is_crash,
    over_budget,
    too_large,
    too_slow,
    without_memory,
)
from sizer.service.messages import cells_of, texts_of
from sizer.service.preload import preload
from sizer.service.server_job import ServerJob
from sizer.service.settings import UNWALLED_VARIABLE, Settings
from sizer.service.tapes import TapeStore


async def read_pipe(limit: int) -> AsyncIterator[bytes | None]:
    """Yield the lines of stdin until it ends, without threads; None for a line of more than `limit` bytes."""
    reader = asyncio.StreamReader(limit=limit)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer.raw)  # type: ignore[union-attr]
    skipping = False
    while True:
        try:
            line = await reader.readuntil(b"\n")
            yield None if skipping else line
            skipping = False
        except asyncio.LimitOverrunError as overrun:
            await reader.readexactly(overrun.consumed)
            skipping = True
        except asyncio.IncompleteReadError:
            return


async def read_thread(limit: int) -> AsyncIterator[bytes | None]:
    """Yield the same lines from a thread, for Windows, whose event loop cannot wait for stdin. Never combined with fork."""
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[bytes] = asyncio.Queue()

    def read() -> None:
        with contextlib.suppress(RuntimeError, ValueError):  # the loop or stdin has been closed: the server is ending
            while True:
                line = sys.stdin.buffer.readline(limit)
                loop.call_soon_threadsafe(lines.put_nowait, line)
                if not line:
                    return

    threading.Thread(target=read, daemon=True).start()
    skipping = False
    while line := await lines.get():
        if line.endswith(b"\n"):
            yield None if skipping else line
        skipping = not line.endswith(b"\n")


LOOK_SECONDS = 0.25  # interval of the checks for ended turns
TELL_SECONDS = 1.0  # between two messages on a job's position: each job that starts moves all others
# Least memory of a job. Pages that it copied from the template are not measured: with them 14 small questions on torchvision models
# and GPT-2 held 42 to 67 MiB (Private_Dirty of /proc/PID/smaps_rollup at their end, torch 2.15, Python 3.11).
FORKED_BYTES = 64 * MIB
ROOMY = 0.75  # share of the budget that all jobs may hold while jobs are paused early


class Server:
    """Takes requests one message at a time; each job runs as a task that owns one child at a time."""

    def __init__(
        self,
        settings: Settings,
        send: Callable[[bytes], None],
        versions: dict[str, str],
        template: Template | None,
        group: MemoryGroup | None = None,
    ):
        self._settings, self._template, self._group = settings, template, group
        self._tapes = TapeStore(settings.tapes)
        self._versions = edition_of(versions)
        self._send = send
        self._queue = FairQueue(settings.max_jobs, settings.max_jobs + settings.max_waiting)
        self._jobs: dict[int, ServerJob] = {}
        self._places: dict[int, int] = {}  # reported to waiting jobs: the number of jobs before them
        self._ending = False

    async def serve(self, lines: AsyncIterator[bytes | None]) -> None:
        """Handle lines until they end, then kill all jobs. None represents a line that was too long.

        If the task that gives turns ends, jobs would wait for ever: the server then ends, and raises its error.
        """
        async with asyncio.TaskGroup() as group:
            clock = group.create_task(self._keep_giving_turns())
            try:
                async for line in lines:
                    self._handle(line)
            finally:
                self._ending = True
                clock.cancel()
                tasks = [job.task for job in self._jobs.values()]
                for task in tasks:
                    if not task.cancelling():
                        task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._tapes.close()

    def _handle(self, line: bytes | None) -> None:
        try:
            if line is None:
                raise ValueError(f"longer than {self._settings.request_bytes:,} bytes")
            message = from_line(line)
            if message.keys() == {"cancel"}:
                self._cancel(message["cancel"])
            elif message.keys() == {"ping"}:
                self._send(to_line({"pong": 0}))
            else:
                number, job, visitor = _to_number(message), texts_of(message), _to_visitor(message)
                self._submit(number, job, visitor, _to_tapes(message.get("tapes", {})))
        except ValueError as error:
            self._send(to_line({"refused": str(error)[:200]}))

    def _submit(self, number: int, job: dict, visitor: Visitor, tapes: Mapping[str, bytes]) -> None:
        if number in self._jobs:
            raise ValueError(f"job {number} exists already")
        try:
            self._queue.put(number, visitor, cells_of(job), self._now())
        except JobError as error:
            return self._reply(number, error=error_to_wire(error))
        self._jobs[number] = ServerJob(asyncio.get_running_loop().create_task(self._run(number, job, tapes)))
        self._jobs[number].task.add_done_callback(lambda _: self._forget(number))
        self._give_turns()

    async def _take_tapes(self, architecture: str, tapes: Mapping[str, bytes]) -> None:
        """Store tapes of an architecture from other servers, in addition to the known ones."""
        await self._tapes.load(architecture)
        known = self._tapes.of(architecture)
        for name in tapes.keys() - known.keys():
            self._tapes.put(architecture, name, tapes[name])

    def _cancel(self, number: object) -> None:
        if not isinstance(number, int):
            return
        job = self._jobs.get(number)
        if job is not None and not job.task.cancelling():  # else it has ended, and was answered
            job.task.cancel()
            self._queue.give_up(number)
            self._reply(number, error=error_to_wire(JobError("the job was cancelled")))

    def _forget(self, number: int) -> None:
        self._queue.remove(number, self._now())
        del self._jobs[number]
        self._give_turns()

    # ---------------------------------------------------------------------------------------------------- turns

    def _give_turns(self) -> None:
        """Pause and start jobs as the queue decides, and report its position to each job that begins to wait."""
        if self._ending:
            return
        turns = self._queue.turns(self._now())
        for number in turns.pause:
            self._jobs[number].pause(self._now())
        for number in turns.stop:
            self._jobs[number].stop()
        for number in turns.start:
            self._reply(number, progress=self._jobs[number].start(self._now()))
        ahead = self._queue.ahead(self._now())
        self._places = {number: self._places[number] for number in ahead if number in self._places}
        self._tell_places({number: places for number, places in ahead.items() if number not in self._places})

    def _tell_places(self, ahead: Mapping[int, int]) -> None:
        """Report the positions of waiting jobs that have changed."""
        for number, places in ahead.items():
            if self._places.get(number) != places:
                self._reply(number, progress=f"waiting for a free place ({places} before this one)")
                self._places[number] = places

    async def _keep_giving_turns(self) -> None:
        told = self._now()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._give_turns()
            if self._now() >= told + TELL_SECONDS:
                told = self._now()
                self._tell_places(self._queue.ahead(told))
            self._keep_budget()

    def _keep_budget(self) -> None:
        """Stop the largest paused job if all jobs exceed the budget; if none is paused, end the largest one."""
        own = private_bytes(os.getpid())
        held = {
            number: max(private_bytes(job.process) - own, 0)
            for number, job in self._jobs.items()
            if job.process is not None
        }
        budget = self._settings.budget_bytes
        room = sum(max(one, FORKED_BYTES) for one in held.values()) <= ROOMY * budget
        self._queue.roomy = bool(budget) and self._template is not None and room  # else a job may have to be stopped to pause it
        if not budget or sum(held.values()) <= budget:
            return
        paused = [number for number in held if not self._queue.running(number)]
        number = max(paused or held, key=lambda number: held[number])
        if paused:
            self._queue.stop(number)
            self._jobs[number].stop()
        else:
            self._jobs[number].end(over_budget(held[number], self._settings))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _run(self, number: int, job: dict, tapes: Mapping[str, bytes]) -> None:
        """Run a job from its place in the queue to its one answer; a cancelled job has been answered already."""
        try:
            access = access_of(job["task"], job["query"], job["config_text"], self._versions)
            if access is not None:
                await self._take_tapes(access.architecture, tapes)
            while not await self._run_child(number, job, access):
                pass
        except SizerError as error:
            self._reply(number, error=error_to_wire(error))
        except Exception as error:  # any kind of error, for example if no process could be started: the job must be answered
            failure = JobError(f"the job could not be run ({type(error).__name__}: {error})", todo="try again")
            self._reply(number, error=error_to_wire(failure))

    async def _run_child(self, number: int, job: dict, access: Access | None) -> bool:
        """Wait for a turn, start the child, forward its lines and stop it; return whether it has answered.

        If it has not, it is started again: it was stopped for others, or it crashed for the first time. Raises JobError if it
        failed.
        """
        held = self._jobs[number]
        while not held.turn.is_set():
            await held.turn.wait()
            if access is not None:  # it may have been evicted from memory while the job waited
                await self._tapes.load(access.architecture)
        kept = access.readable(self._tapes.of(access.architecture)) if access else {}
        job, settings, template = {**job, "kept": kept}, self._settings, self._template
        child = SpawnedJob(job, settings) if template is None else ForkedJob(job, settings, template)
        try:
            async with asyncio.timeout(self._settings.wall_seconds) as limit:
                held.hold(child, limit)
                try:
                    answered = await self._relay(number, await child.open(), access)
                finally:
                    held.end_time()
        except TimeoutError:
            raise too_slow(self._settings) from None
        finally:
            status = await asyncio.shield(child.stop())
            stopped = held.release()
        if held.failure is not None:
            raise held.failure
        if answered or stopped:
            return answered
        if self._group is not None and status == -signal.SIGKILL and self._group.has_killed():
            if self._queue.running(number):
                raise without_memory(self._settings)
            self._queue.stop(number)  # it was paused: it begins again in a later turn
            held.stop()
            return False
        if held.crashed or not is_crash(status):
            raise explain_end(status, self._settings)
        held.crashed = True
        held.turn.clear()
        self._queue.put_back(number, self._now())
        self._give_turns()
        return False

    async def _relay(self, number: int, reader: asyncio.StreamReader, access: Access | None) -> bool:
        """Forward the child's messages, and store its results; return False if it ended without a result or an error."""
        left = self._settings.result_bytes
        while True:
            try:
                line = await reader.readuntil(b"\n")
            except asyncio.IncompleteReadError:
                return False
            except asyncio.LimitOverrunError:
                raise too_large(self._settings) from None
            if (left := left - len(line)) < 0:
                raise too_large(self._settings)
            if self._take(number, line, access) in ("result", "error"):
                return True

    def _take(self, number: int, line: bytes, access: Access | None) -> str:
        """Forward a child's line under the job's number, or store its content; return the line's one key."""
        try:
            ((key, value),) = from_line(line).items()
            if key == "keep":
                if access is not None:
                    self._keep(number, str(value["name"]), b64decode(value["data"], validate=True), access)
                return key
            elif key not in ("progress", "partial", "result", "error"):
                raise ValueError
            if key == "progress":
                self._jobs[number].progress = clip_progress(value)
            figures = key == "partial" and bool(value.get("estimates"))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise JobError("the job wrote something that is not an answer", todo="try again") from None
        self._send(b'{"id":%d,%s' % (number, line.lstrip()[1:]))
        if figures:
            self._queue.show(number)
            self._give_turns()
        return key

    def _keep(self, number: int, name: str, data: bytes, access: Access) -> None:
        """Keep a result of a job under a name that its question may write, and tell a client that shares it."""
        name = access.stored_name(name)
        if not self._tapes.put(access.architecture, name, data):
            logging.getLogger(__name__).warning("a job's value of %d bytes was not kept: it is too large", len(data))
        self._queue.keep(number, self._now())
        if self._settings.sharing == "yes":
            self._reply(number, keep={"name": name, "data": b64encode(data).decode("ascii")})

    def _reply(self, number: int, **content: object) -> None:
        self._send(to_line({"id": number, **content}))


def _to_number(message: dict) -> int:
    if type(number := message.get("run")) is not int:
        raise ValueError('"run" must be a whole number')
    return number


def _to_tapes(tapes: object) -> dict[str, bytes]:
    if not isinstance(tapes, dict) or not all(isinstance(data, str) for data in tapes.values()):
        raise ValueError('"tapes" must be an object of texts')
    return {name: b64decode(data, validate=True) for name, data in tapes.items()}


def _to_visitor(message: dict) -> Visitor:
    match message.get("visitor", ["", ""]):
        case [str(address), str(session)]:
            return Visitor(address=address, session=session)
    raise ValueError('"visitor" must be an address and a session')


def missing_layers(settings: Settings) -> dict[str, str]:
    """Return the layers of a job's wall that this system lacks, each with the reason, tested in a child."""
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


@contextmanager
def _memory_group(settings: Settings, missing: dict[str, str]) -> Iterator[MemoryGroup | None]:
    """Provide the control group of the jobs; None without one, with the reason added to `missing`."""
    group = None
    try:
        if settings.launch == "fork" and settings.budget_bytes:
            group = MemoryGroup(settings.budget_bytes)
        else:
            raise OSError("no budget of memory, or jobs that are not forked")
    except OSError as error:
        missing[GROUP] = f"{error.strerror or error}; their memory is polled four times a second"
    try:
        yield group
    finally:
        if group is not None:
            group.close()


def _unwalled(why: str) -> JobError:
    todo = f"run it on Linux with seccomp, or set {UNWALLED_VARIABLE}=1"
    return JobError(f"public mode needs seccomp to confine jobs, which is not to be had here ({why})", todo=todo)


def main() -> None:
    """Run the job server until stdin ends."""
    settings = Settings.from_arguments(sys.argv[1:])
    output = os.dup(1)
    os.dup2(2, 1)  # a library's prints go to stderr, not between the answers

    def send(data: bytes) -> None:
        write(output, data)

    try:
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
        with _memory_group(settings, missing) as group:
            template = Template(settings, None if group is None else group.jobs) if settings.launch == "fork" else None
            send(to_line({"ready": versions, "missing": missing}))
            lines = read_pipe if settings.launch == "fork" else read_thread
            asyncio.run(Server(settings, send, versions, template, group).serve(lines(settings.request_bytes)))
    except* BrokenPipeError:  # the app has ended; the error comes alone or as one of a group of tasks
        pass
    if home := os.environ.get(HOME_VARIABLE):
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()

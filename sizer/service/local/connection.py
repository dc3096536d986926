"""A job client's connection without a job server: each question has its own worker with only the imports that it needs.

    client: pool ─► WorkerConnection ─► local.worker: question, placeholders ─► forked, confined child
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from sizer.base.errors import JobError, SizerError, quote
from sizer.processes.process import ChildProcess
from sizer.processes.wire import error_to_wire, from_line
from sizer.service.settings import Settings

WORKER = "sizer.service.local.worker"
LAST = frozenset(("result", "error"))


class WorkerConnection:
    """Starts a worker for each question. `receive` gets a job server's messages; `lost` is never called.

    For commands with one or two questions: questions do not wait for each other, and do not share imports.
    """

    ready = True

    def __init__(
        self,
        settings: Settings,
        receive: Callable[[WorkerConnection, dict], None],
        lost: Callable[[WorkerConnection, JobError], None],
    ):
        self._settings, self._receive = settings, receive
        self._lock = threading.Lock()
        self._processes: dict[int, ChildProcess | None] = {}  # by question, None during the start
        self._threads: list[threading.Thread] = []

    @property
    def heard_at(self) -> float:
        """The time by `time.monotonic`: whether a worker lives is known at any time."""
        return time.monotonic()

    def send(self, message: dict) -> None:
        """Start a worker for a question, or end one. Never blocks."""
        if "run" in message:
            self._processes[message["run"]] = None
            thread = threading.Thread(target=self._ask, args=(message["run"], message), daemon=True)
            self._threads.append(thread)
            thread.start()
        elif "cancel" in message:
            self._end(message["cancel"])

    def close(self) -> None:
        """End all workers."""
        for number in list(self._processes):
            self._end(number)
        for thread in self._threads:
            thread.join()

    def kill(self, failure: JobError) -> None:
        """End all workers; their questions fail by themselves."""
        self.close()

    def _end(self, number: int) -> None:
        """End the worker of a question, or let it end itself as soon as it has started."""
        with self._lock:
            process = self._processes.pop(number, None)
        if process is not None:
            process.kill()

    def _ask(self, number: int, message: dict) -> None:
        try:
            process = ChildProcess(WORKER, *self._settings.to_arguments(), name="the worker")
        except JobError as error:
            return self._receive(self, {"id": number, "error": error_to_wire(error)})
        with self._lock:
            wanted = number in self._processes
            if wanted:
                self._processes[number] = process
        if not wanted:
            process.kill()
        failure: SizerError | None = None
        ended = False
        try:
            process.send(message)
            process.close_stdin()
            for line in process.lines(self._settings.result_bytes + 1000):
                said = from_line(line)
                ended = ended or bool(said.keys() & LAST)
                self._receive(self, {"id": number, **said})
        except (OSError, ValueError) as error:
            failure = JobError(f"a message of the worker was not understood ({quote(str(error))})")
        finally:
            process.kill()
            status = process.wait()
        if not ended:
            failure = failure or JobError(f"the worker ended (exit status {status}){process.saying()}", todo="try again")
            self._receive(self, {"id": number, "error": error_to_wire(failure)})

"""One job server process and the two threads that talk to it: one writes requests, one reads answers."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from sizer.base.errors import JobError, quote
from sizer.processes.process import CLOSE_SECONDS, ChildProcess
from sizer.processes.wire import error_from_wire, from_line
from sizer.service.settings import Settings


class Connection:
    """Starts a job server. `receive` gets each message of it, `lost` the reason of its end, both on the reading thread.

    Raises JobError where the process could not be started.
    """

    def __init__(
        self,
        settings: Settings,
        receive: Callable[[Connection, dict], None],
        lost: Callable[[Connection, JobError], None],
    ):
        self.ready = False
        self.heard_at = time.monotonic()  # when it said something last
        self._settings = settings
        self._receive, self._lost = receive, lost
        self._failure: JobError | None = None
        self._outbox: queue.SimpleQueue[dict | None] = queue.SimpleQueue()
        self._process = ChildProcess("sizer.service.server", *settings.to_arguments(), name="the job server")
        self._reader = threading.Thread(target=self._read, daemon=True)
        for thread in (self._reader, threading.Thread(target=self._write, daemon=True)):
            thread.start()

    def send(self, message: dict) -> None:
        """Queue a message; never blocks, not even while the server is importing."""
        self._outbox.put(message)

    def close(self) -> None:
        """End the server by closing its stdin, by force where it does not react, and wait for it."""
        self._outbox.put(None)
        if not self.ready:  # it is importing, and reads nothing yet; it has no children
            self._process.kill()
        if not self._process.ends_within(CLOSE_SECONDS):
            self._process.kill()
        self._reader.join(CLOSE_SECONDS)

    def kill(self, failure: JobError) -> None:
        """End the server at once; `failure` is the reason that `lost` gets."""
        self._failure = failure
        self._process.kill()

    @property
    def process_id(self) -> int:
        """The process id of the server."""
        return self._process.id

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # it has ended; the reader says why
            while (message := self._outbox.get()) is not None:
                self._process.send(message)
        self._process.close_stdin()

    def _read(self) -> None:
        try:
            for line in self._process.lines(self._settings.result_bytes + 1000):
                self.heard_at = time.monotonic()
                self._take(from_line(line))
        except Exception as error:  # of any kind; our own server writes nothing that raises
            self._failure = JobError(f"the job server said something that was not understood ({quote(str(error))})")
            self._process.kill()
        self._outbox.put(None)
        status = self._process.wait()
        ended = JobError(
            f"the job server ended (exit status {status}){self._process.saying()}",
            todo="try again",
        )
        self._lost(self, self._failure or ended)

    def _take(self, message: dict) -> None:
        if "fatal" in message:
            failure = error_from_wire(message["fatal"])
            self._failure = failure if isinstance(failure, JobError) else JobError(str(failure))
        elif "refused" in message or "pong" in message:
            return  # it lives; a line that it refused was of a job that has got its error from `submit`
        else:
            self.ready = self.ready or "ready" in message
            self._receive(self, message)

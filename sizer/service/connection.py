"""One job server process and the three threads that talk to it: write requests, read answers, keep its last words."""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable

from sizer.errors import JobError, quote
from sizer.processes.wire import error_from_wire, from_line, to_line
from sizer.service.settings import Settings, server_environment

CLOSE_SECONDS = 5.0


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
        self._settings = settings
        self._receive, self._lost = receive, lost
        self._failure: JobError | None = None
        self._last_words: collections.deque[str] = collections.deque(maxlen=20)
        self._outbox: queue.SimpleQueue[dict | None] = queue.SimpleQueue()
        self._home = tempfile.mkdtemp(prefix="sizer-")
        self._process = self._start()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        for thread in (self._listener, self._reader, threading.Thread(target=self._write, daemon=True)):
            thread.start()

    def send(self, message: dict) -> None:
        """Queues a message; never blocks, not even while the server is importing."""
        self._outbox.put(message)

    def close(self) -> None:
        """Ends the server by closing its stdin, by force where it does not react, and waits for it."""
        self._outbox.put(None)
        if not self.ready:  # it imports and does not listen; it has no children yet
            self._process.kill()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reader.join(CLOSE_SECONDS)

    @property
    def process_id(self) -> int:
        """The process id of the server."""
        return self._process.pid

    def _start(self) -> subprocess.Popen:
        try:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "sizer.service.server", *self._settings.to_arguments()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=server_environment(self._home),
                start_new_session=os.name == "posix",  # Ctrl-C in the app's terminal is for the app
            )
        except OSError as error:
            shutil.rmtree(self._home, ignore_errors=True)
            raise JobError(f"the job server could not be started ({error.strerror})") from error

    def _write(self) -> None:
        with contextlib.suppress(OSError), self._process.stdin as pipe:  # OSError: it has died; the reader tells
            while (message := self._outbox.get()) is not None:
                pipe.write(to_line(message))
                pipe.flush()

    def _listen(self) -> None:
        with self._process.stderr as pipe:
            for line in iter(lambda: pipe.readline(1000), b""):
                self._last_words.append(line.decode("utf-8", "replace").strip())

    def _read(self) -> None:
        with self._process.stdout as pipe:
            try:
                while line := pipe.readline(self._settings.result_bytes + 1000):
                    self._take(from_line(line))
            except Exception as error:  # never from our own server
                self._failure = JobError(f"the job server said something that was not understood ({quote(str(error))})")
                self._process.kill()
        self._outbox.put(None)
        status = self._process.wait()
        self._listener.join(CLOSE_SECONDS)
        shutil.rmtree(self._home, ignore_errors=True)
        self._lost(self, self._failure or self._explain_end(status))

    def _take(self, message: dict) -> None:
        if "fatal" in message:
            failure = error_from_wire(message["fatal"])
            self._failure = failure if isinstance(failure, JobError) else JobError(str(failure))
        elif "refused" not in message:  # a line of ours that it did not take: its job has been answered by `submit`
            self.ready = self.ready or "ready" in message
            self._receive(self, message)

    def _explain_end(self, status: int) -> JobError:
        words = [line for line in self._last_words if line]
        said = f", saying {quote(words[-1], 300)}" if words else ""
        return JobError(f"the job server ended (exit status {status}){said}", todo="try again")

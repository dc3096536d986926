"""Keep a job server running: a server that has died or hangs is replaced, by a spare if there is one.

A server that is silent for `silence_seconds`, for example stopped, is killed and treated as dead. After the first death the
next server starts at once; the spare is already running. After further deaths without a result in between, the pause before
each start doubles. Two threads handle a server's process: one writes requests, one reads answers.
"""

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
    """Starts a job server. `receive` gets each of its messages, `lost` the reason of its end, both on the reading thread.

    Raises JobError if the process could not be started.
    """

    def __init__(
        self,
        settings: Settings,
        receive: Callable[[Connection, dict], None],
        lost: Callable[[Connection, JobError], None],
    ):
        self.ready = False
        self.heard_at = time.monotonic()  # time of its last message
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
        """End the server by closing its stdin, by force if it does not react, and wait for it."""
        self._outbox.put(None)
        if not self.ready:  # it is importing, and does not read yet; it has no children
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
        with contextlib.suppress(OSError):  # it has ended; the reader reports why
            while (message := self._outbox.get()) is not None:
                self._process.send(message)
        self._process.close_stdin()

    def _read(self) -> None:
        try:
            for line in self._process.lines(self._settings.result_bytes + 1000):
                self.heard_at = time.monotonic()
                self._take(from_line(line))
        except Exception as error:  # any kind of error; our own server never writes such lines
            self._failure = JobError(f"a message of the job server was not understood ({quote(str(error))})")
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
            return  # it lives; the refused line belonged to a job that got its error from `submit`
        else:
            self.ready = self.ready or "ready" in message
            self._receive(self, message)


# ---------------------------------------------------------------------------------------------------------- supervisor


HEARTBEAT_SECONDS = 0.5
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = (
    0.5,
    30.0,
)  # before the start after the second death in a row, and after many


Receive = Callable[[Connection, dict], None]
Lost = Callable[[Connection, JobError], None]
Connect = Callable[[Settings, Receive, Lost], Connection]


class Supervisor:
    """The job server in use, and its spares. Thread-safe; `receive`, `lost` and `restarted` are called on its own threads.

    `connect` starts a server, or connects to a replacement (`sizer.service.broker.connection`). `receive` gets each message of
    a server. `lost` gets the server in use that has ended, with the reason. `restarted` is called when a server is available
    again after a pause.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        connect: Connect = Connection,
        receive: Receive,
        lost: Lost,
        restarted: Callable[[], None],
    ):
        self._settings, self._connect = settings, connect
        self._take, self._tell_lost, self._restarted = receive, lost, restarted
        self._lock = threading.RLock()
        self._used: Connection | None = None
        self._spares: list[Connection] = []
        self._deaths = 0  # without a result since
        self._pause: threading.Timer | None = None
        self._closed = threading.Event()
        self._heart: threading.Thread | None = None

    @property
    def used(self) -> Connection | None:
        """The job server in use, None before the first start."""
        return self._used

    def connection(self) -> Connection | None:
        """Return the job server in use, started if needed; None during a pause. Raises JobError if it cannot be started."""
        with self._lock:
            if self._used is None and self._pause is None:
                self._used = self._next()
            return self._used

    def prosper(self) -> None:
        """Take note that a job has ended well: the next death is the first again."""
        self._deaths = 0

    def close(self) -> None:
        """End all servers."""
        with self._lock:
            self._closed.set()
            connections = [*([self._used] if self._used else []), *self._spares]
            self._used, self._spares = None, []
            if self._pause is not None:
                self._pause.cancel()
        for connection in connections:
            connection.close()

    def _next(self) -> Connection:
        """Return a spare that is ready, else a new server."""
        ready = next((spare for spare in self._spares if spare.ready), None)
        if ready is None:
            return self._start()
        self._spares.remove(ready)
        self._fill_up()
        return ready

    def _start(self) -> Connection:
        if self._heart is None:
            self._heart = threading.Thread(target=self._beat, daemon=True)
            self._heart.start()
        return self._connect(self._settings, self._receive, self._lost)

    def _fill_up(self) -> None:
        """Start the spares that are missing."""
        while not self._closed.is_set() and len(self._spares) < self._settings.spares:
            self._spares.append(self._start())

    def _receive(self, connection: Connection, message: dict) -> None:
        if "ready" in message:
            with self._lock:
                if connection is self._used:
                    self._fill_up()
        self._take(connection, message)

    def _lost(self, connection: Connection, failure: JobError) -> None:
        """Replace a server that has ended."""
        with self._lock:
            if connection in self._spares:
                self._spares.remove(connection)  # the next time one is ready, or taken, it is replaced
                return
            if connection is self._used:
                self._used = None
                if connection.ready:
                    self._deaths += 1
                    self._wait_before_next()
        self._tell_lost(connection, failure)

    def _wait_before_next(self) -> None:
        if self._deaths > 1 and not self._closed.is_set():
            seconds = min(FIRST_PAUSE_SECONDS * 2 ** (self._deaths - 2), LONGEST_PAUSE_SECONDS)
            self._pause = threading.Timer(seconds, self._end_pause)
            self._pause.daemon = True
            self._pause.start()

    def _end_pause(self) -> None:
        with self._lock:
            self._pause = None
            if self._closed.is_set():
                return
        self._restarted()

    def _beat(self) -> None:
        """Send every server a ping, and kill those that have been silent for too long.

        Time counts by these heartbeats: on a machine so busy that they are late, a server may be late, too.
        """
        unanswered: dict[Connection, int] = {}
        before = time.monotonic()
        while not self._closed.wait(HEARTBEAT_SECONDS):
            with self._lock:
                connections = [*([self._used] if self._used else []), *self._spares]
            unanswered = {
                connection: 0 if connection.heard_at > before else unanswered.get(connection, 0) + 1
                for connection in connections
            }
            before = time.monotonic()
            for connection, beats in unanswered.items():
                limit = self._settings.silence_seconds if connection.ready else self._settings.start_seconds
                if beats * HEARTBEAT_SECONDS > limit:
                    silence = time.monotonic() - connection.heard_at
                    connection.kill(JobError(f"the job server has not answered for {silence:.0f} s", todo="try again"))
                elif connection.ready:
                    connection.send({"ping": 0})

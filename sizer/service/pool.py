"""The running and waiting questions of this process.

Identical questions share one job, and finished ones are cached for a time.

A question of a job server that has ended is asked again automatically (`sizer.service.supervisor`). Thread-safe.
"""

from __future__ import annotations

import atexit
import functools
import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from sizer.base.errors import ConfigError, HubError, JobError, SizerError, quote
from sizer.catalogue.sources import fetch
from sizer.processes.wire import clip_progress, error_from_wire, to_line
from sizer.query.request import Request
from sizer.service.fair_queue import check_room
from sizer.service.job import Job, SharedJob, View
from sizer.service.job_memory import CONFINEMENT, GROUP
from sizer.service.monitoring import JobMetrics
from sizer.service.server_job import STARTED
from sizer.service.settings import Settings
from sizer.service.supervisor import Connect, Connection, Supervisor

T = TypeVar("T")


class Cache(Generic[T]):
    """The most recently used values, each for a limited time."""

    def __init__(self, ttl_seconds: float, max_entries: int, clock: Callable[[], float]):
        self._ttl_seconds, self._max_entries, self._clock = ttl_seconds, max_entries, clock
        self._entries: OrderedDict[tuple, tuple[float, T]] = OrderedDict()

    def get(self, key: tuple) -> T | None:
        expires, value = self._entries.get(key, (0.0, None))
        if value is None or self._clock() >= expires:
            self._entries.pop(key, None)
            return None
        self._entries.move_to_end(key)
        return value

    def put(self, key: tuple, value: T, ttl_seconds: float | None = None) -> None:
        self._entries[key] = (self._clock() + (ttl_seconds or self._ttl_seconds), value)
        self._entries.move_to_end(key)
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def clear(self) -> None:
        self._entries.clear()


# ---------------------------------------------------------------------------------------------------------------- pool


FAILURE_SECONDS, HUB_FAILURE_SECONDS = 30.0, 60.0  # for which an error is returned for repeated questions
MOST_FAILURES = 256
MOST_LOSSES = 2  # servers that a question may lose before it is given up

_log = logging.getLogger(__name__)

Fetch = Callable[[str, str | None], bytes]


class JobPool:
    """Jobs by question, each with all its waiters.

    `own_fetch` downloads the config of a repository and revision, None for the function of the request's source.
    """

    def __init__(self, settings: Settings, cache: Cache, own_fetch: Fetch | None, connect: Connect = Connection):
        self._settings, self._cache, self._fetch = settings, cache, own_fetch
        self._failures: Cache[SizerError] = Cache(FAILURE_SECONDS, MOST_FAILURES, time.monotonic)
        self._lock = threading.RLock()
        self._shared_jobs: dict[tuple, SharedJob] = {}
        self._supervisor = Supervisor(
            settings,
            connect=connect,
            receive=self._receive,
            lost=self._lost,
            restarted=self._ask_those_that_wait,
        )
        self.versions: dict[str, str] | None = None
        self.missing_layers: dict[str, str] | None = None
        self._answered_at: float | None = None
        self._metrics = JobMetrics()
        self._closed = False

    @property
    def connection(self) -> Connection | None:
        """The job server in use, None before the first start."""
        return self._supervisor.used

    def start(self) -> None:
        """Start the job server if it does not run."""
        with self._lock:
            self._connect()

    def answered_ago(self) -> float | None:
        """Return the seconds since a job ended with a result; None without one."""
        return None if self._answered_at is None else time.monotonic() - self._answered_at

    def close(self) -> None:
        """End the job server; jobs that run get a JobError."""
        with self._lock:
            self._closed = True
            shared_jobs = list(self._shared_jobs.values())
            self._shared_jobs.clear()
        for shared in shared_jobs:
            shared.finish(failure=JobError("the job client was closed"))
        self._supervisor.close()
        atexit.unregister(self.close)

    # ------------------------------------------------------------------------------------------ from submit to dispatch

    def check_size(self, message: dict, what: str = "config") -> None:
        """Raise ConfigError for a message that the job server would not read."""
        if len(to_line(message)) > self._settings.request_bytes - 200:
            raise ConfigError(f"{what} is too large", allowed=f"{self._settings.request_bytes:,} bytes as a JSON text")

    def submit(
        self,
        shared: SharedJob,
        from_hub: Request | None = None,
        view: View = lambda value: value,
        *,
        anew: bool = False,
    ) -> Job:
        """Return a share in the job for the same question as `shared`: a new job if there is none yet.

        Raises as `JobClient.submit`.

        The config of a request `from_hub` is downloaded first, in a thread. With `anew`, a cached answer is ignored.
        """
        with self._lock:
            if self._closed:
                raise JobError("the job client was closed")
            if not anew and (value := self._cache.get(shared.key)) is not None:
                shared.finish(value)
                return Job(shared, self._cancel, view)
            if not anew and (failure := self._failures.get(shared.key)) is not None:
                shared.finish(failure=failure)
                return Job(shared, self._cancel, view)
            known = self._shared_jobs.get(shared.key)
            if known is None:
                self._admit(shared, from_hub)
            shared = known or shared
            shared.waiters += 1
            return Job(shared, self._cancel, view)

    def _admit(self, shared: SharedJob, from_hub: Request | None) -> None:
        present = (one.visitor for one in self._shared_jobs.values())
        check_room(present, shared.visitor, self._settings.max_jobs + self._settings.max_waiting)
        if from_hub is None:
            self._dispatch(shared)
        self._shared_jobs[shared.key] = shared
        if from_hub is not None:
            shared.fetching = True
            shared.progress = clip_progress(f"fetching the config of {from_hub.name}")
            threading.Thread(target=self._fetch_then_dispatch, args=(shared, from_hub), daemon=True).start()

    def _fetch_then_dispatch(self, shared: SharedJob, request: Request) -> None:
        try:
            get = self._fetch or functools.partial(fetch, request.source)
            shared.message["config_text"] = get(request.name, request.revision).decode("utf-8")
            self.check_size(shared.message)
            with self._lock:
                shared.fetching = False
                if self._shared_jobs.get(shared.key) is shared:  # else cancelled meanwhile
                    self._dispatch(shared)
        except SizerError as error:
            self._fail(shared, error)
        except UnicodeDecodeError:
            self._fail(shared, ConfigError("config is not UTF-8", given=quote(request.name)))
        except Exception as error:  # any kind of error: waiters must get an answer
            self._finish(shared, failure=JobError(f"the config could not be fetched ({type(error).__name__})"))

    def _dispatch(self, shared: SharedJob) -> None:
        shared.connection = self._connect()
        if shared.connection is None:
            shared.progress = "the job server is started again in a moment"
            return
        shared.number = secrets.randbits(128)  # the token of its answers, which cannot be guessed
        shared.progress = "waiting" if shared.connection.ready else "starting the job server"
        visitor = [shared.visitor.address, shared.visitor.session]
        shared.connection.send({"run": shared.number, "visitor": visitor, **shared.message})

    def _connect(self) -> Connection | None:
        if self._closed:
            raise JobError("the job client was closed")
        if self._supervisor.used is None:
            atexit.unregister(self.close)
            atexit.register(self.close)
        return self._supervisor.connection()

    # ------------------------------------------------------------------------------------------------ answers

    def _receive(self, connection: Connection, message: dict) -> None:
        """Handle a message of the server, on the connection's thread. Raises KeyError, TypeError if it is invalid."""
        if "ready" in message:
            self._set_missing_layers(message["missing"])
            return self.set_versions(message["ready"])
        with self._lock:
            shared = self._find(connection, message["id"])
        if shared is None:  # cancelled meanwhile
            return
        if "progress" in message:
            shared.progress = clip_progress(message["progress"])
            if message["progress"] == STARTED and shared.began_at is None:
                shared.began_at = time.monotonic()
        elif "error" in message:
            self._fail(shared, error_from_wire(message["error"]))
        elif "partial" in message:
            self._take(shared, shared.take_partial, message["partial"])
        else:
            self._take(shared, lambda data: self._finish(shared, value=shared.read(data)), message["result"])

    def _set_missing_layers(self, missing: dict[str, str]) -> None:
        for layer, why in missing.items():
            level = logging.INFO if layer == GROUP else logging.WARNING  # with the group missing, memory is polled
            _log.log(level, "jobs run without %s (%s): %s", layer, CONFINEMENT[layer], why)
        self.missing_layers = missing

    def set_versions(self, versions: dict[str, str]) -> None:
        """Note the versions of a job server, and clear answers of other versions."""
        with self._lock:
            if self.versions and versions != self.versions:
                self._failures.clear()
                self._cache.clear()  # a report is valid for the versions with which it was made
            self.versions = versions

    def _find(self, connection: Connection, number: int) -> SharedJob | None:
        found = (
            shared
            for shared in self._shared_jobs.values()
            if shared.number == number and shared.connection is connection
        )
        return next(found, None)

    def _take(self, shared: SharedJob, take: Callable[[dict], None], data: dict) -> None:
        """Store an answer, or a part of one; fail the job if it is invalid."""
        try:
            take(data)
        except Exception as error:  # any kind of error: the data come from a process that has read untrusted input
            failure = JobError(f"the job's answer is invalid ({quote(str(error), 200)})")
            self._finish(shared, failure=failure)
            if shared.connection is not None:
                shared.connection.send({"cancel": shared.number})

    def _fail(self, shared: SharedJob, failure: SizerError) -> None:
        """End a job with an error, which is cached for a moment: a hundred pages that ask for it cost one job."""
        with self._lock:
            self._failures.put(shared.key, failure, HUB_FAILURE_SECONDS if isinstance(failure, HubError) else None)
        self._finish(shared, failure=failure)

    def _finish(self, shared: SharedJob, value: object = None, failure: SizerError | None = None) -> None:
        with self._lock:
            if self._shared_jobs.get(shared.key) is shared:
                del self._shared_jobs[shared.key]
                if failure is None:
                    self._cache.put(shared.key, value)
                    self._answered_at = time.monotonic()
                    self._supervisor.prosper()
                self._record(shared, failure)
        shared.finish(value, failure)

    def _record(self, shared: SharedJob, failure: SizerError | None) -> None:
        now = time.monotonic()
        began = shared.began_at or now
        facts = {
            "task": shared.key[0],
            "outcome": "result" if failure is None else type(failure).__name__,
            "waited_seconds": round(began - shared.asked_at, 3),
            "ran_seconds": round(now - began, 3),
        }
        self._metrics.add(**facts)
        _log.info("a job has ended", extra=facts)

    def metrics(self) -> str:
        """Return counts and seconds of the jobs so far, in Prometheus' text format."""
        with self._lock:
            return self._metrics.text(present=len(self._shared_jobs))

    def _lost(self, connection: Connection, failure: JobError) -> None:
        """Ask the questions of an ended server again; fail those asked too often, and all if the server could not start."""
        with self._lock:
            lost = [shared for shared in self._shared_jobs.values() if shared.connection is connection]
            for shared in lost:
                shared.connection, shared.losses = None, shared.losses + 1
        for shared in lost:
            if connection.ready and shared.losses <= MOST_LOSSES and not self._closed:
                self._ask_again(shared)
            else:
                self._finish(shared, failure=failure)

    def _ask_again(self, shared: SharedJob) -> None:
        try:
            with self._lock:
                if self._shared_jobs.get(shared.key) is shared and shared.connection is None:
                    self._dispatch(shared)
        except JobError as error:
            self._finish(shared, failure=error)

    def _ask_those_that_wait(self) -> None:
        """Send questions that arrived, or lost their server, while no server was available."""
        with self._lock:
            waiting = [
                shared for shared in self._shared_jobs.values() if shared.connection is None and not shared.fetching
            ]
        for shared in waiting:
            self._ask_again(shared)

    def _cancel(self, job: Job) -> None:
        with self._lock:
            if job.done:
                return
            shared, job.cancelled = job.shared, True
            shared.waiters -= 1
            if shared.waiters > 0 or self._shared_jobs.get(shared.key) is not shared:
                return
            del self._shared_jobs[shared.key]
            if shared.connection is not None:
                shared.connection.send({"cancel": shared.number})
        shared.finish(failure=JobError("the job was cancelled"))

"""A job as its callers see it: progress, whether it is done, its result or its error. Several jobs can be joined."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from sizer.base.errors import JobError, SizerError
from sizer.processes.outcome import Outcome
from sizer.report.report import Report
from sizer.service.fair_queue import Visitor
from sizer.service.supervisor import Connection

SILENT = "the job server does not answer; if this continues, another server replaces it"
SILENT_SECONDS = 0.9
LEAVE_SECONDS = 2.0  # a page that reruns asks again within far less

Read = Callable[[dict], Any]
View = Callable[[Any], Any]


class Job:
    """One caller's share in a job of the server. Identical requests share a job, and each has its own Job."""

    def __init__(self, shared: SharedJob, give_up: Callable[[Job], None], view: View = lambda value: value):
        self.shared, self.cancelled = shared, False
        self._give_up, self._view = give_up, view

    @property
    def progress(self) -> str:
        """One short line on the current activity, or that the job server, which sends a heartbeat twice a second, is silent."""
        return SILENT if self.shared.is_silent() else self.shared.progress

    @property
    def partial(self) -> Any:
        """The result so far, None if there is none; it remains when the job fails or is cancelled."""
        value = self.shared.partial
        return None if value is None else self._view(value)

    @property
    def parts(self) -> int:
        """Number of received parts of the result."""
        return self.shared.parts

    @property
    def done(self) -> bool:
        """Return True if `result` would return at once."""
        return self.cancelled or self.shared.done

    def result(self, timeout: float | None = None) -> Any:
        """Return the result, or None if it is not ready after `timeout` seconds (None: waits until it is done).

        Raises the job's own error (ConfigError, HubError, BuildError, TraceError ...), or JobError if it was cancelled, hit a
        limit, crashed, or lost its job server; such a job may be submitted again.
        """
        if not self.cancelled:
            self.shared.wait(timeout)
        if self.cancelled:
            raise JobError("the job was cancelled")
        value = self.shared.result(0)
        return None if value is None else self._view(value)

    def waited(self, timeout: float, ready: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the job is done or the caller is `ready`, at most `timeout` seconds. Return whether the job is done."""
        if not self.cancelled:
            self.shared.wait(timeout, ready)
        return self.done

    def leave(self) -> None:
        """Give up this share after a moment, so that a repeated request before then finds the job still running."""
        timer = threading.Timer(LEAVE_SECONDS, self.cancel)
        timer.daemon = True
        timer.start()

    def cancel(self) -> None:
        """Give up this share; the job is stopped if no other caller waits for it. A finished job is not changed."""
        self._give_up(self)


class SharedJob(Outcome):
    """A job of the server, shared by its callers. Everything except `result` happens under the pool's lock.

    It counts as the job of the `visitor` who submitted it first.
    """

    def __init__(self, key: tuple, message: dict, read: Read, visitor: Visitor):
        super().__init__()
        self.key, self.message, self.read, self.visitor = key, message, read, visitor
        self.partial: Any = None
        self.parts = 0
        self.waiters = 0
        self.losses = 0  # job servers that ended under it
        self.fetching = False
        self.asked_at = time.monotonic()
        self.began_at: float | None = None  # when its turn came first
        self.number: int | None = None
        self.connection: Connection | None = None

    def is_silent(self) -> bool:
        """Return whether the server in use has been silent for longer than a live server would be."""
        server = self.connection
        if self.done or server is None or not server.ready:
            return False
        return time.monotonic() - server.heard_at > SILENT_SECONDS

    def take_partial(self, data: dict) -> None:
        """Store a partial result. Raises errors of `read`."""
        value = self.read(data)
        if isinstance(value, Report) and isinstance(self.partial, Report):  # a partial report only contains new parts
            value = value.after(self.partial)
        self.partial = value
        self.parts += 1
        self.tell_change()


# ---------------------------------------------------------------------------------------------------------- joined job


class JoinedJob:
    """One caller's share in several jobs.

    `join` makes one value from the known results of each part, in order, None if unknown; from all parts it makes the result.
    """

    def __init__(self, jobs: Sequence[Job], join: Callable[[list[Any]], Any]) -> None:
        self.jobs, self._join = tuple(jobs), join

    @property
    def progress(self) -> str:
        """Progress of the first job that is not done."""
        return next((job.progress for job in self.jobs if not job.done), "")

    @property
    def partial(self) -> Any:
        """The result so far, None if there is none; it remains when a job fails or is cancelled."""
        return self._join([_known(job) for job in self.jobs])

    @property
    def parts(self) -> int:
        """Number of received parts of the result."""
        return sum(job.parts for job in self.jobs)

    @property
    def done(self) -> bool:
        """Return True if all jobs are done."""
        return all(job.done for job in self.jobs)

    def result(self, timeout: float | None = None) -> object | None:
        """Return the result, or None if a part is missing after `timeout` seconds (None: waits until all are done).

        Raises the error of the first job that failed; the others are then cancelled.
        """
        until = None if timeout is None else time.monotonic() + timeout
        found = []
        for job in self.jobs:
            try:
                found.append(job.result(None if until is None else max(0.0, until - time.monotonic())))
            except SizerError:
                self.cancel()
                raise
        return None if any(one is None for one in found) else self._join(found)

    def leave(self) -> None:
        """Give up this share in a moment, as that of one job."""
        for job in self.jobs:
            job.leave()

    def cancel(self) -> None:
        """Give up this share."""
        for job in self.jobs:
            job.cancel()


def _known(job: Job) -> object | None:
    """Return the known part of a job's result, or the whole result."""
    if job.done:
        with contextlib.suppress(SizerError):
            return job.result(0)
    return job.partial

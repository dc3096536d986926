"""A job as the server holds it: its task, its turn, and its child while there is one."""

from __future__ import annotations

import asyncio
from typing import Protocol

from sizer.base.errors import JobError

STARTED = "started"  # progress of a job at the start of its turn


class Child(Protocol):
    """A process that can be paused, on systems that support it."""

    id: int

    def pause(self) -> bool: ...

    def go_on(self) -> None: ...

    def kill(self) -> None: ...


class ServerJob:
    """State of a job between two turns of it. The time that it is paused does not count as its own."""

    def __init__(self, task: asyncio.Task):
        self.task = task
        self.turn = asyncio.Event()  # set from the start of its turn on
        self.progress = STARTED  # its last message
        self.crashed = False
        self._child: Child | None = None
        self._limit: asyncio.Timeout | None = None
        self._left = 0.0  # seconds, while it is paused
        self._stopped = False
        self.failure: JobError | None = None  # the reason for its end

    @property
    def process(self) -> int | None:
        """Return the process id of its child, None without one."""
        return None if self._child is None else self._child.id

    def hold(self, child: Child, limit: asyncio.Timeout) -> None:
        """Attach a child; its time ends at `limit`."""
        self._child, self._limit, self._stopped = child, limit, False

    def end_time(self) -> None:
        """Have no limit any more: the child has answered, or is about to be ended. From now on it is neither paused nor goes on."""
        self._limit = None

    def release(self) -> bool:
        """Detach the child; return whether it was stopped for other jobs."""
        self._child = self._limit = None
        return self._stopped

    def end(self, failure: JobError) -> None:
        """End the child, and the job with it."""
        self.failure = failure
        if self._child is not None:
            self._child.kill()

    def start(self, now: float) -> str:
        """Begin a turn, or continue the child; return its current progress."""
        self.turn.set()
        if (timed := self._timed()) is not None and not self._stopped:
            child, limit = timed
            limit.reschedule(now + self._left)
            child.go_on()
        return self.progress

    def pause(self, now: float) -> None:
        """End a turn."""
        self.turn.clear()
        if (timed := self._timed()) is not None:
            child, limit = timed
            if not child.pause():
                return self.stop()
            ends = limit.when()
            assert ends is not None, "its time runs"
            self._left = ends - now
            limit.reschedule(None)

    def _timed(self) -> tuple[Child, asyncio.Timeout] | None:
        """Return the child and its limit while its time runs."""
        if self._child is None or self._limit is None or self._limit.expired():
            return None
        return self._child, self._limit

    def stop(self) -> None:
        """End the child; the job will be started again in a later turn."""
        self.progress = STARTED
        if self._child is not None:
            self._stopped = True
            self._child.kill()

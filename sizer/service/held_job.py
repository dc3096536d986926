"""A job as the server holds it: its task, its turn, and its child while there is one."""

from __future__ import annotations

import asyncio
from typing import Protocol

from sizer.errors import JobError

STARTED = "started"  # the progress of a job whose turn has come


class Child(Protocol):
    """A process that can be paused where the system can do that: whether it was."""

    id: int

    def pause(self) -> bool: ...

    def go_on(self) -> None: ...

    def kill(self) -> None: ...


class HeldJob:
    """What is to be known of a job between two turns of it. The time that it is paused does not count as its own."""

    def __init__(self, task: asyncio.Task):
        self.task = task
        self.turn = asyncio.Event()  # set from the start of its turn on
        self.progress = STARTED  # what it said last
        self.crashed = False
        self._child: Child | None = None
        self._limit: asyncio.Timeout | None = None
        self._left = 0.0  # seconds, while it is paused
        self._stopped = False
        self.failure: JobError | None = None  # what it was ended with

    @property
    def process(self) -> int | None:
        """The process id of its child, None while it has none."""
        return None if self._child is None else self._child.id

    def hold(self, child: Child, limit: asyncio.Timeout) -> None:
        """Have a child from now on, whose time ends at `limit`."""
        self._child, self._limit, self._stopped = child, limit, False

    def end_time(self) -> None:
        """Have no limit any more: the child has answered, or is about to be ended. From now on it is neither paused nor goes on."""
        self._limit = None

    def release(self) -> bool:
        """Have no child any more; whether it was stopped for other jobs."""
        self._child = self._limit = None
        return self._stopped

    def end(self, failure: JobError) -> None:
        """End the child, and the job with it."""
        self.failure = failure
        if self._child is not None:
            self._child.kill()

    def start(self, now: float) -> str:
        """Begin a turn, or let the child go on; what it is doing now."""
        self.turn.set()
        if self._is_timed() and not self._stopped:
            self._limit.reschedule(now + self._left)
            self._child.go_on()
        return self.progress

    def pause(self, now: float) -> None:
        """End a turn."""
        self.turn.clear()
        if self._is_timed():
            if not self._child.pause():
                return self.stop()
            self._left = self._limit.when() - now
            self._limit.reschedule(None)

    def _is_timed(self) -> bool:
        return self._child is not None and self._limit is not None and not self._limit.expired()

    def stop(self) -> None:
        """End the child; the job will be started again in a later turn."""
        self.progress = STARTED
        if self._child is not None:
            self._stopped = True
            self._child.kill()

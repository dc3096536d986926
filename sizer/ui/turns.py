"""Turns: one page is drawn at a time. Where many are asked for at once each would else be drawn as slowly as all of them.

Drawing is work of the interpreter, of which one thread does some at a time. A page gives its turn to others while it waits for a
job, and does not wait for a turn for longer than PATIENCE_SECONDS: whatever holds the others up, it is drawn.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

AT_ONCE = 1  # two take turns at the interpreter every half a millisecond, and a hundred pages a sixth longer
PATIENCE_SECONDS = 5.0


class Awaited(Protocol):
    """A job, or a measurement."""

    @property
    def done(self) -> bool:
        """Return whether it has ended."""

    def result(self, timeout: float | None = None) -> Any:
        """Its value, None while there is none after so many seconds."""


_turns = threading.Semaphore(AT_ONCE)
_own = threading.local()  # taken: whether this thread has a turn


@contextmanager
def drawing() -> Iterator[None]:
    """Draw a page within, in its turn."""
    _take()
    try:
        yield
    finally:
        _give()


def result_of(job: Awaited, timeout: float | None = None) -> Any:
    """Return what `job.result` gives and raises; other pages are drawn meanwhile."""
    if job.done or not getattr(_own, "taken", False):
        return job.result(timeout=timeout)
    _give()
    try:
        return job.result(timeout=timeout)
    finally:
        _take()


def give_back() -> None:
    """Give this page's turn to others: all that is left of its run is to wait for a job, and to say how far that is."""
    _give()


def _take() -> None:
    _own.taken = _turns.acquire(timeout=PATIENCE_SECONDS)


def _give() -> None:
    if getattr(_own, "taken", False):
        _own.taken = False
        _turns.release()

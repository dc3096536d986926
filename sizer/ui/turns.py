"""Turns: one page is drawn at a time. Many pages drawn together would each finish as late as the last one.

Drawing needs the interpreter, which runs one thread at a time. A page gives up its turn while it waits for a job, and waits for a
turn for at most PATIENCE_SECONDS.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from sizer.service.job import Job

AT_ONCE = 1  # two pages would switch threads every half a millisecond; a hundred pages then take a sixth longer
PATIENCE_SECONDS = 5.0


class Awaited(Protocol):
    """A job or a measurement that can be waited for."""

    @property
    def done(self) -> bool:
        """Return True if it has ended."""

    def result(self, timeout: float | None = None) -> Any:
        """Return its value; None if there is none after this number of seconds."""


_turns = threading.Semaphore(AT_ONCE)
_own = threading.local()  # taken: whether this thread has a turn


@contextmanager
def drawing() -> Iterator[None]:
    """Wait for this page's turn, and hold it within the context."""
    _take()
    try:
        yield
    finally:
        _give()


def result_of(job: Awaited, timeout: float | None = None) -> Any:
    """Return the result of `job.result`, or raise its error. Other pages are drawn meanwhile."""
    if not job.done:
        with _let_others_draw():
            return job.result(timeout=timeout)
    return job.result(timeout=timeout)


def waited(job: Job, timeout: float, ready: Callable[[], bool]) -> bool:
    """Return the result of `job.waited`. Other pages are drawn meanwhile."""
    with _let_others_draw():
        return job.waited(timeout, ready)


@contextmanager
def _let_others_draw() -> Iterator[None]:
    """Give back this page's turn, if it has one, within the context."""
    if not getattr(_own, "taken", False):
        yield
        return
    _give()
    try:
        yield
    finally:
        _take()


def give_back() -> None:
    """End this page's turn: the rest of its run only waits for a job and shows progress."""
    _give()


def _take() -> None:
    _own.taken = _turns.acquire(timeout=PATIENCE_SECONDS)


def _give() -> None:
    if getattr(_own, "taken", False):
        _own.taken = False
        _turns.release()

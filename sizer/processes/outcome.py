"""Outcome of a job: a value or an error, and until then its progress. For any number of threads that wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from sizer.base.errors import SizerError
from sizer.processes.wire import error_from_wire, error_to_wire


class Outcome:
    """A value or an error that is available later; until then `progress` is one short line on the current activity."""

    def __init__(self, progress: str = "starting"):
        self.progress = progress
        self._finished = False
        self._changed = threading.Condition()
        self._value: Any = None
        self._failure: dict | None = None

    @property
    def done(self) -> bool:
        """Return True if there is a value or an error."""
        return self._finished

    def finish(self, value: object = None, failure: SizerError | None = None) -> None:
        """Set the value, or the error; the first one stays."""
        with self._changed:
            if not self._finished:
                self._value, self._failure = value, None if failure is None else error_to_wire(failure)
                self.progress = "failed" if failure else "done"
                self._finished = True
                self._changed.notify_all()

    def tell_change(self) -> None:
        """Wake the waiting threads, so that they check whether they are ready."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, timeout: float | None = None, ready: Callable[[], bool] = lambda: False) -> None:
        """Wait until the job is done, until a caller is `ready`, or for `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._finished or ready(), timeout)

    def result(self, timeout: float | None = None) -> Any:
        """Return the value, or None if there is none after `timeout` seconds (None: wait until the end).

        Raises the job's error, a new copy for each caller.
        """
        self.wait(timeout)
        if self._finished and self._failure is not None:
            raise error_from_wire(self._failure)
        return self._value

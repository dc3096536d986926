"""Outcome of a job: a value or an error, and until then its progress. For any number of threads that wait for it."""

from __future__ import annotations

import threading
from typing import Any

from sizer.base.errors import SizerError
from sizer.processes.wire import error_from_wire, error_to_wire


class Outcome:
    """A value or an error that will be there; `progress` is one short line on what is being done until then."""

    def __init__(self, progress: str = "starting"):
        self.progress = progress
        self._finished = threading.Event()
        self._value: Any = None
        self._failure: dict | None = None

    @property
    def done(self) -> bool:
        """Return whether there is a value or an error."""
        return self._finished.is_set()

    def finish(self, value: object = None, failure: SizerError | None = None) -> None:
        """Set the value, or the error; the first one stays."""
        if not self._finished.is_set():
            self._value, self._failure = value, None if failure is None else error_to_wire(failure)
            self.progress = "failed" if failure else "done"
            self._finished.set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the job is done, or for `timeout` seconds."""
        self._finished.wait(timeout)

    def result(self, timeout: float | None = None) -> Any:
        """The value, or None while there is none after `timeout` seconds (None: waits to the end).

        Raises the error, a fresh copy for each caller.
        """
        self._finished.wait(timeout)
        if self._finished.is_set() and self._failure is not None:
            raise error_from_wire(self._failure)
        return self._value

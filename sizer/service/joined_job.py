"""Several jobs of which each makes a part of one answer, as their callers see them: like one job."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from sizer.base.errors import SizerError
from sizer.service.job import Job


class JoinedJob:
    """One caller's share in several jobs.

    `join` makes one value of what is known of each part, in order, None where nothing is; of all parts it makes the result.
    """

    def __init__(self, jobs: Sequence[Job], join: Callable[[list[Any]], Any]) -> None:
        self.jobs, self._join = tuple(jobs), join

    @property
    def progress(self) -> str:
        """What the first job that is not done is doing now."""
        return next((job.progress for job in self.jobs if not job.done), "")

    @property
    def partial(self) -> Any:
        """What is known of the result so far, None where nothing is; it stays when a job fails or is cancelled."""
        return self._join([_known(job) for job in self.jobs])

    @property
    def parts(self) -> int:
        """How many parts of the result have come."""
        return sum(job.parts for job in self.jobs)

    @property
    def done(self) -> bool:
        """Whether all jobs are."""
        return all(job.done for job in self.jobs)

    def result(self, timeout: float | None = None) -> object | None:
        """The result, or None while some part of it is missing after `timeout` seconds (None: waits until all are there).

        Raises what the first of the jobs raises that ended with an error; the others are cancelled then.
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
    """What is known of a job's result, all of it where there is one."""
    if job.done:
        with contextlib.suppress(SizerError):
            return job.result(0)
    return job.partial

"""A job of the service as the command line waits for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from sizer.errors import SizerError
from sizer.service.client import JobClient

POLL_SECONDS = 0.1

MakeClient = Callable[[], JobClient]


def wait(job: Any) -> Any:
    """The result of a job; shows its progress where somebody looks on. Raises what the job raises."""
    shown = sys.stderr.isatty()
    try:
        while (result := job.result(timeout=POLL_SECONDS)) is None:
            if shown:
                print(f"\r\x1b[K{job.progress}", end="", file=sys.stderr, flush=True)
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return result


def wait_for_what_is_known(job: Any) -> tuple[Any, SizerError | None]:
    """The result of a job; where it ended early, what was known of it by then, and the error. Raises that where nothing was."""
    try:
        return wait(job), None
    except SizerError as error:
        if job.partial is None:
            raise
        return job.partial, error

"""A job of the service as the command line waits for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

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

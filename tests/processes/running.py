"""Whether a process still runs, and how to wait for its end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_SECONDS = 30.0

TESTS = str(Path(__file__).parents[1])  # where the scripts are that jobs run in the place of their tasks


def is_running(process: int) -> bool:
    """Whether the process exists and is not a zombie that nobody has reaped yet."""
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_until(holds: Callable[[], object]) -> object:
    """The first true value of `holds`, asked again and again; raises AssertionError after PATIENCE_SECONDS."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not (value := holds()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
    return value


def template_of(server: int) -> int:
    """The process that a job server forks its jobs from: its only child."""
    (process,) = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return int(process)

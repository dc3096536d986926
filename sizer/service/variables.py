"""The environment variables that an operator sets, in one table: switches, and limits that are whole numbers.

A switch with a value that it does not know is taken to be on the safe side; a limit that is no number in its range is refused.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from sizer.base.errors import JobError, quote

BROKER_VARIABLE = (
    "SIZER_BROKER"  # address of the broker, for apps and workers; without it each app has its own job server
)

FOLDER_VARIABLE = "SIZER_TAPES"  # the folder of tapes; empty for none


def default_folder() -> str:
    """Return the folder of this user's tapes, empty if tapes are not stored."""
    if (given := os.environ.get(FOLDER_VARIABLE)) is not None:
        return given
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.path.expanduser(cache)
    return os.path.join(folder, "sizer") if os.path.isabs(folder) else ""  # tapes are not stored for a user without a home


def broker_url() -> str | None:
    """Return the URL of the broker, or None without a broker.

    Raises JobError if it is not an address of a Redis server.
    """
    url = os.environ.get(BROKER_VARIABLE, "").strip()
    if url and not url.startswith(("redis://", "rediss://", "unix://")):
        raise JobError(
            f"{BROKER_VARIABLE} cannot be used", allowed="redis://host:port/number"
        )  # it may hold a password
    return url or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A variable that holds a whole number, from 1 (or `least`) to `most`. `default` describes the behaviour without it."""

    name: str
    what: str
    default: str
    least: int = 1
    most: int = 10**6


JOBS = Limit(name="SIZER_JOBS", what="jobs that run at once", default="one for each CPU", most=256)
WAITING = Limit(name="SIZER_WAITING", what="jobs that wait; more are refused", default="128")
JOB_SECONDS = Limit(name="SIZER_JOB_SECONDS", what="seconds that a job may run", default="120")
JOB_MEMORY = Limit(name="SIZER_JOB_MEMORY_GIB", what="address space of a job, in GiB", default="8", least=4, most=4096)
MEMORY = Limit(
    name="SIZER_MEMORY_GIB",
    what="memory of all jobs together, in GiB",
    default="half of the memory of the machine, or of its control group",
    most=4096,
)
ANSWERS = Limit(name="SIZER_ANSWERS", what="finished answers that are kept for an hour", default="64")
SPARES = Limit(
    name="SIZER_SPARES", what="job servers started beforehand", default="1 in public mode, else 0", least=0, most=4
)
SESSIONS = Limit(name="SIZER_SESSIONS", what="open pages; half of them from one address", default="200")
SESSION_UPLOADS = Limit(name="SIZER_SESSION_UPLOAD_MIB", what="files that one page holds, in MiB", default="32")
UPLOADS = Limit(name="SIZER_UPLOAD_MIB", what="files that all pages hold, in MiB", default="128")

LIMITS = (JOBS, WAITING, JOB_SECONDS, JOB_MEMORY, MEMORY, ANSWERS, SPARES, SESSIONS, SESSION_UPLOADS, UPLOADS)


def read_limit(limit: Limit, default: int) -> int:
    """Return the number in the environment, `default` if it is not set. Raises JobError if it is out of its range."""
    text = os.environ.get(limit.name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and limit.least <= int(text) <= limit.most):
        allowed = f"a whole number from {limit.least} to {limit.most:,}"
        raise JobError(f"{limit.name} ({limit.what}) cannot be used", given=quote(text), allowed=allowed)
    return int(text)

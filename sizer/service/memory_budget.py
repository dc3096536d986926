"""Memory that jobs hold, and the limit on their sum. Only Linux reports it; elsewhere each job has its own limit."""

from __future__ import annotations

import contextlib
from pathlib import Path

from sizer.base.units import GIB
from sizer.service.variables import MEMORY, read_limit

CONTROL_GROUPS = Path("/sys/fs/cgroup")  # version 2
OWN_GROUP = Path("/proc/self/cgroup")
MACHINE = Path("/proc/meminfo")


def budget_bytes() -> int:
    """Return the bytes that all jobs may hold together: SIZER_MEMORY_GIB, else half of the memory; 0 if that is unknown."""
    return read_limit(MEMORY, 0) * GIB or (host_bytes() or 0) // 2


def host_bytes() -> int | None:
    """Return the memory of this machine, or of a control group of this process if that is smaller; None if unknown."""
    known = []
    with contextlib.suppress(OSError, ValueError):  # not Linux; or "max", which is no limit
        known.append(int(MACHINE.read_text().split("MemTotal:")[1].split()[0]) * 1024)
    with contextlib.suppress(OSError):
        own = own_group()
        for group in (own, *own.parents):
            with contextlib.suppress(OSError, ValueError):
                known.append(int((group / "memory.max").read_text()))
    return min(known, default=None)


def own_group() -> Path:
    """Return the folder of this process's control group. Raises OSError if there is none of version 2."""
    for line in OWN_GROUP.read_text().splitlines():
        if line.startswith("0::/"):
            return CONTROL_GROUPS / line.removeprefix("0::/")
    raise OSError("this system has no control groups of version 2")


def private_bytes(process: int) -> int:
    """Return the bytes of a process that are not mapped from files, shared memory included; 0 if it has ended or is unknown."""
    with contextlib.suppress(OSError, ValueError):
        lines = (line.split() for line in Path(f"/proc/{process}/status").read_text().splitlines())
        return sum(int(line[1]) * 1024 for line in lines if line and line[0] in ("RssAnon:", "RssShmem:"))
    return 0

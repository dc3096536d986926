"""How much memory jobs hold, and how much they may hold together. Linux alone tells; elsewhere each job has its own limit alone."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from sizer.service.variables import MEMORY, read_limit
from sizer.units import GIB

CONTROL_GROUP = Path("/sys/fs/cgroup/memory.max")  # of the group that a container runs in, version 2
MACHINE = Path("/proc/meminfo")


def budget_bytes() -> int:
    """What all jobs may hold together; 0 where this system does not tell how much there is, and nobody has said."""
    return read_limit(MEMORY, 0) * GIB or (host_bytes() or 0) // 2


def host_bytes() -> int | None:
    """The memory of this machine, or of the control group that this process is in where that has less; None where unknown."""
    known = []
    with contextlib.suppress(OSError, ValueError):  # not Linux; or "max", which is no limit
        known.append(int(MACHINE.read_text().split("MemTotal:")[1].split()[0]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        known.append(int(CONTROL_GROUP.read_text()))
    return min(known, default=None)


def private_bytes(process: int) -> int:
    """What a process holds that is mapped from no file; 0 where it has ended, or the system does not tell."""
    with contextlib.suppress(OSError, ValueError):
        _, resident, shared, *_ = map(int, Path(f"/proc/{process}/statm").read_text().split())
        return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
    return 0

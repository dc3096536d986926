"""A control group of the kernel for the jobs of a server, so that they never exceed their total memory limit.

It is created if the group of this process may be divided: version 2, with the memory controller, writable, and with no
processes in it except the app's own (systemd's `Delegate=yes`). A group that distributes controllers may not contain processes
itself (docs.kernel.org/admin-guide/cgroup-v2.html, "No Internal Process Constraint"), so the app's processes move into a child
group.

    the app's group            its limit is set by the operator
    ├── sizer-app              the app, its job servers, and the processes that jobs are forked from
    └── sizer-jobs             memory.max: $SIZER_MEMORY_GIB; when it is exceeded, the kernel kills the largest job here

Jobs' memory is also polled four times a second (`private_bytes`), with or without such a group. Polling can pause and stop
jobs; the kernel kills jobs that grow faster than that.

*Known limitations*: root may write everywhere, so it is assumed to own the group if no other process is in it.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from sizer.base.units import GIB
from sizer.processes.wall import LAYERS
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


GROUP = "control group"
# The confinement of jobs, for the message that a part is missing: the layers of their wall, and the control group.
CONFINEMENT = LAYERS | {GROUP: "the kernel limits the total memory of all jobs at any time"}
APP, JOBS = "sizer-app", "sizer-jobs"
ROUNDS = 10  # of moving processes, which may start other processes meanwhile


class MemoryGroup:
    """The control group of the jobs, shared by the servers of one app. Raises OSError, with the reason, if it cannot be made."""

    def __init__(self, budget_bytes: int):
        import fcntl  # not on Windows

        own = own_group()
        self._base = own.parent if own.name == APP else own
        self.jobs = self._base / JOBS
        _check(self._base)
        self._used = os.open(self._base, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._used, fcntl.LOCK_SH)
            self._divide()
            self.jobs.mkdir(exist_ok=True)
            (self.jobs / "memory.max").write_text(str(budget_bytes))
            with contextlib.suppress(FileNotFoundError):  # a kernel without swap
                (self.jobs / "memory.swap.max").write_text("0")
            self._seen = self._kills()
        except OSError:
            self.close()
            raise

    def has_killed(self) -> bool:
        """Return True if the kernel has killed a job for its memory since the last call that returned True for one."""
        if self._kills() <= self._seen:
            return False
        self._seen += 1
        return True

    def close(self) -> None:
        """Restore the groups, if no other server uses them."""
        import fcntl

        with contextlib.suppress(OSError):  # another process uses it; or the group was removed with its creator
            fcntl.flock(self._used, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self.jobs.exists():
                self.jobs.rmdir()
            (self._base / "cgroup.subtree_control").write_text("-memory")
            _move(self._base / APP, self._base)
            (self._base / APP).rmdir()
        os.close(self._used)

    def _divide(self) -> None:
        """Move the group's processes to a child group, and enable its memory controller for children."""
        (self._base / APP).mkdir(exist_ok=True)
        _move(self._base, self._base / APP)
        (self._base / "cgroup.subtree_control").write_text("+memory")

    def _kills(self) -> int:
        """Return how often the kernel has ended a process of the group for its memory."""
        events = (self.jobs / "memory.events").read_text().split()
        return int(events[events.index("oom_kill") + 1])


def join(group: Path) -> None:
    """Move the calling process into a group. If the cgroup no longer exists, do nothing; memory is then polled."""
    with contextlib.suppress(OSError):
        (group / "cgroup.procs").write_text("0")


def _check(base: Path) -> None:
    """Raise OSError, with the reason, if the app may not divide a group."""
    controllers = base / "cgroup.controllers"
    if not controllers.exists() or "memory" not in controllers.read_text().split():
        raise OSError("no control group of version 2 with a controller of memory")
    if not (base / "memory.max").exists():
        raise OSError("the app is in the group of the whole machine")
    if _processes(base) - _family():
        raise OSError("the group has other processes in it than the app's")
    if any(path.is_dir() and path.name not in (APP, JOBS) for path in base.iterdir()):
        raise OSError("the group is divided already")


def _processes(group: Path) -> set[int]:
    return set(map(int, (group / "cgroup.procs").read_text().split()))


def _move(source: Path, target: Path) -> None:
    """Move all processes of one group to another. Raises OSError if new processes keep appearing."""
    for _ in range(ROUNDS):
        if not (left := _processes(source)):
            return
        for process in left:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                (target / "cgroup.procs").write_text(str(process))
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))


def _family() -> set[int]:
    """Return the app, which has started this process, all its descendants, and the first process of a container."""
    parents = {int(path.name): _parent(path) for path in Path("/proc").iterdir() if path.name.isdecimal()}
    family = {os.getppid()}
    while found := {process for process, parent in parents.items() if parent in family} - family:
        family |= found
    return family | {1}


def _parent(process: Path) -> int:
    """Return the process id of a process' parent; 0 if it has ended. proc(5)."""
    with contextlib.suppress(OSError):
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    return 0

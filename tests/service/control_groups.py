"""A folder that stands for the kernel's file system of control groups, as far as a group for jobs needs it; and the real one."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path, PosixPath

from sizer.service import job_memory

FILES = (
    "cgroup.procs",
    "cgroup.controllers",
    "cgroup.subtree_control",
    "memory.max",
    "memory.swap.max",
    "memory.events",
)


class Group(PosixPath):
    """A group's folder, or a file in it, that behaves as the kernel's: a process is in one group, and none is in one that hands out
    controllers (docs.kernel.org/admin-guide/cgroup-v2.html)."""

    def mkdir(self, *arguments: object, **options: object) -> None:
        if self.exists() and options.get("exist_ok"):
            return
        super().mkdir(*arguments, **options)
        for name in FILES:
            Path(self, name).touch()
        handed_out = Path(self.parent, "cgroup.subtree_control")
        Path(self, "cgroup.controllers").write_text(
            handed_out.read_text() if handed_out.exists() else "cpu memory pids\n"
        )
        Path(self, "memory.events").write_text("low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\noom_group_kill 0\n")

    def rmdir(self) -> None:
        if Path(self, "cgroup.procs").read_text().split() or any(one.is_dir() for one in Path(self).iterdir()):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        shutil.rmtree(self)

    def write_text(self, text: str, *arguments: object, **options: object) -> int:
        if self.name == "cgroup.procs":
            self._take(text if text != "0" else str(os.getpid()))
        elif self.name == "cgroup.subtree_control":
            if Path(self.parent, "cgroup.procs").read_text().split():
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
            Path(self).write_text("memory\n" if text == "+memory" else "")
        else:
            Path(self).write_text(text)
        return len(text)

    def _take(self, process: str) -> None:
        if not Path(f"/proc/{process}").exists():
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        members = Path(self).read_text().split()
        top = next(one for one in self.parents if not Path(one.parent, "cgroup.procs").exists())
        for file in Path(top).rglob("cgroup.procs"):
            left = [one for one in file.read_text().split() if one != process]
            file.write_text("\n".join(left))
        Path(self).write_text("\n".join([*members, process]))


def stand_in(folder: str, *, own: str = "/") -> Group:
    """Have `job_memory` take a folder for the kernel's; the group of this process, which is made where it is not there."""
    job_memory.CONTROL_GROUPS = Group(folder)
    job_memory.OWN_GROUP = Path(f"{folder}.own")
    job_memory.OWN_GROUP.write_text(f"12:pids:/x\n0::{own}\n")
    group = job_memory.CONTROL_GROUPS / own.strip("/")
    group.mkdir(exist_ok=True)
    return group


def real_group() -> Path:
    """A new group of the kernel's with the controller of memory, of no process yet. Raises OSError where none can be made."""
    root = job_memory.CONTROL_GROUPS
    if "memory" not in Path(root, "cgroup.subtree_control").read_text().split():
        Path(root, "cgroup.subtree_control").write_text("+memory")
    group = root / f"sizer-test-{os.getpid()}"
    group.mkdir()
    return group

"""The computer around the accelerators: its processor and memory, read from the operating system alone."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path

from sizer.base.units import KIB

COMMAND_SECONDS = 10
_CGROUP = "/sys/fs/cgroup"


class Host:
    """What the operating system says. Tests put another one in its place."""

    def read(self, path: str) -> str | None:
        """The text of a file of the system; None where there is none."""
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def run(self, *command: str) -> str | None:
        """What a program of the system prints; None where it is missing or fails."""
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() or None

    def environment(self, name: str) -> str | None:
        """An environment variable; None where it is not set."""
        return os.environ.get(name)

    def macos(self) -> str | None:
        """The version of macOS; None on other systems."""
        return platform.mac_ver()[0] or None

    def processor_name(self) -> str:
        """The processor as its maker calls it, else the architecture."""
        listed = re.search(r"^model name\s*:\s*(.+)$", self.read("/proc/cpuinfo") or "", re.MULTILINE)
        if listed:
            return listed[1].strip()
        named = self.run("sysctl", "-n", "machdep.cpu.brand_string") if self.macos() else None
        return named or platform.processor() or platform.machine()

    def total_bytes(self) -> int | None:
        """The memory (bytes) of this computer; None where the system does not tell (Windows)."""
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):
            return None

    def free_bytes(self) -> int | None:
        """What new work may use (bytes): the kernel's own guess, less where a container's limit comes first.

        None where the system does not tell (macOS, Windows).
        """
        listed = re.search(r"^MemAvailable:\s*(\d+) kB", self.read("/proc/meminfo") or "", re.MULTILINE)
        if not listed:
            return None
        limit, used = (self.read(f"{_CGROUP}/memory.{name}") or "" for name in ("max", "current"))
        available = int(listed[1]) * KIB
        if limit.strip().isdigit() and used.strip().isdigit():
            cache = re.search(r"^inactive_file (\d+)$", self.read(f"{_CGROUP}/memory.stat") or "", re.MULTILINE)
            room = int(limit) - int(used) + (int(cache[1]) if cache else 0)
            return max(0, min(available, room))
        return available

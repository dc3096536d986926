"""What a measurement is held to while it runs on the CPU: one thread, and no more memory than the computer has."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from sizer.base.units import KIB


@contextmanager
def one_thread() -> Iterator[None]:
    """Within the context, PyTorch's kernels work with one thread: with more, they hold buffers for each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def memory_limited(free_bytes: int | None) -> Iterator[None]:
    """Within the context, an allocation fails that takes more than `free_bytes` beyond what the process holds now.

    Without it Linux grants what it cannot back, and kills the process when it is used. None, or another system: no limit.
    """
    if free_bytes is None or sys.platform != "linux":
        yield
        return
    import resource

    held = re.search(r"^VmData:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert held is not None  # Linux says it of every process
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(held[1]) * KIB + free_bytes
    known = [value for value in (limit, soft, hard) if value != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(known), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

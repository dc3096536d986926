"""The devices of this machine that PyTorch can use. Run as a program, prints them as JSON: the caller imports no torch.

python -m sizer.service.devices
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator

from sizer.errors import JobError, quote
from sizer.service.settings import PROJECT

TIMEOUT_SECONDS = 120


def find_devices() -> list[dict]:
    """Rows {"device", "name", "total_bytes", "capability"}, from a process of its own that imports torch and ends.

    `total_bytes` is what PyTorch reports, None where that is nothing (meta). Raises JobError where torch does not work.
    """
    path = os.pathsep.join([PROJECT, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-P", "-m", "sizer.service.devices"]
    try:
        done = subprocess.run(
            command, capture_output=True, env={**os.environ, "PYTHONPATH": path}, timeout=TIMEOUT_SECONDS
        )
        if done.returncode == 0:
            return json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise JobError(f"the devices could not be listed within {TIMEOUT_SECONDS} s") from None
    words = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"exit status {done.returncode}"]
    raise JobError(
        f"the devices could not be listed ({quote(words[-1], 300)})", todo="check that torch can be imported"
    )


def list_devices() -> Iterator[dict]:
    """The rows of `find_devices`, in this process. Imports torch; makes no context on any device."""
    import torch

    yield _row("cpu", platform.processor() or platform.machine(), _host_bytes())
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        yield _row(f"cuda:{index}", found.name, found.total_memory, f"{found.major}.{found.minor}")
    if torch.backends.mps.is_available():
        yield _row("mps", "Apple GPU", torch.mps.recommended_max_memory())
    if torch.xpu.is_available():
        for index in range(torch.xpu.device_count()):
            found = torch.xpu.get_device_properties(index)
            yield _row(f"xpu:{index}", found.name, found.total_memory)
    yield _row("meta", "planning only: no memory, no results", None)


def _row(device: str, name: str, total_bytes: int | None, capability: str | None = None) -> dict:
    return {"device": device, "name": name, "total_bytes": total_bytes, "capability": capability}


def _host_bytes() -> int | None:
    """The host's memory; None where the system does not tell (Windows)."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


if __name__ == "__main__":
    json.dump(list(list_devices()), sys.stdout)

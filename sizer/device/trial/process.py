"""The measuring process as the system sees it: how it is started, in which environment, and how it is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import IO

from sizer.errors import JobError
from sizer.service.settings import server_environment

# What an accelerator's driver and libraries read, which estimates have no use for; settings of PyTorch's own allocator stay out,
# so that the device is measured as PyTorch sets it up.
_DEVICE_VARIABLES = ("CUDA_", "NVIDIA_", "HIP_", "ROCR_", "ROCM_", "HSA_", "ZE_", "MTL_", "OMP_", "MKL_", "OPENBLAS_")


def spawn(home: str, words: IO[bytes]) -> subprocess.Popen:
    """The process that measures, with pipes to and from it, in a session of its own; `words` is a file for its stderr.

    `home` is an empty folder in the place of the user's own. Raises JobError where it cannot be started.
    """
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "sizer.device.trial.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
            env=environment(home),
            start_new_session=os.name == "posix",
        )
    except OSError as error:
        raise JobError(f"the measuring process could not be started ({error.strerror})") from error


def environment(home: str) -> dict[str, str]:
    """The job server's environment, with the accelerators and threads that this process has."""
    base = {name: value for name, value in server_environment(home).items() if not name.startswith(_DEVICE_VARIABLES)}
    return base | {name: value for name, value in os.environ.items() if name.upper().startswith(_DEVICE_VARIABLES)}


def kill(process: subprocess.Popen) -> None:
    """Kills a process that was not waited for yet, with all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended; macOS: only a zombie is left
        if os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()

"""The environment variables of a child process: an allow-list, an empty home, and the accelerators if needed."""

from __future__ import annotations

import os
import site
import sys
from pathlib import Path

HOME_VARIABLE = "SIZER_SERVICE_HOME"  # the empty folder, for the child to remove when its parent cannot
PROJECT = str(Path(__file__).resolve().parents[2])

_KEPT_PREFIXES = ("PYTHON", "LD_", "DYLD_", "LC_", "COVERAGE")
_KEPT_NAMES = (
    *("PATH", "LANG", "TZ", "TMPDIR", "TEMP", "TMP", "VIRTUAL_ENV", "CONDA_PREFIX", "USER", "USERNAME", "LOGNAME"),
    "NUMBA_CACHE_DIR",  # folder of compiled code, for reuse
    *("SYSTEMROOT", "SYSTEMDRIVE", "WINDIR", "COMSPEC", "PATHEXT", "NUMBER_OF_PROCESSORS"),
)
_FIXED = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONHASHSEED": "0",  # Gemma 3's code makes a table for each member of a set of words, in the set's order
}
# Variables that an accelerator's driver and libraries read; estimates do not need them. Settings of PyTorch's allocator are left
# out, so that the device is measured with PyTorch's defaults.
_DEVICE_PREFIXES = (
    "CUDA_",
    "NVIDIA_",
    "HIP_",
    "ROCR_",
    "ROCM_",
    "HSA_",
    "ZE_",
    "MTL_",
    "NCCL_",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
)


def environment(home: str, *, accelerators: bool = False) -> dict[str, str]:
    """Return the environment of a child: no token, offline, `home` an empty folder; no accelerator and one thread.

    With `accelerators` the child gets this process's accelerators and thread settings. The variables are an allow-list: all
    other variables of this process (keys, proxies, cloud settings) are left out.
    """
    kept = {name: value for name, value in os.environ.items() if name.upper().startswith(_KEPT_PREFIXES)}
    kept |= {name: value for name, value in os.environ.items() if name.upper() in _KEPT_NAMES}
    kept["PYTHONPATH"] = _python_path(kept.get("PYTHONPATH"))
    if site.ENABLE_USER_SITE:
        kept["PYTHONUSERBASE"] = site.getuserbase()
    if sys.platform == "darwin":  # its Objective-C runtime otherwise ends a forked child that touches it
        kept["OBJC_DISABLE_INITIALIZE_FORK_SAFETY"] = "YES"
    kept |= dict.fromkeys(("HOME", "HF_HOME", "TORCH_HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"), home)
    kept |= _FIXED | {HOME_VARIABLE: home}
    if not accelerators:
        return kept
    kept = {name: value for name, value in kept.items() if not name.startswith(_DEVICE_PREFIXES)}
    return kept | {name: value for name, value in os.environ.items() if name.upper().startswith(_DEVICE_PREFIXES)}


def own_environment() -> dict[str, str]:
    """Return this process's whole environment, with which the project can be imported from any folder."""
    return {**os.environ, "PYTHONPATH": _python_path(os.environ.get("PYTHONPATH"))}


def _python_path(given: str | None) -> str:
    return os.pathsep.join([PROJECT, *filter(None, [given])])

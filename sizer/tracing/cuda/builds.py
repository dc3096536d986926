"""Check if a build of PyTorch has kernels for a GPU.

A kernel compiled for sm_XY runs on capability X.Z with Z >= Y. PTX for compute_XY can be compiled for that capability and newer
ones (CUDA C++ Programming Guide, "Binary Compatibility" and "PTX Compatibility").
"""

from __future__ import annotations

import re

from sizer.base.versions import Version, format_version, installed_version
from sizer.catalogue.gpus import Gpu

# torch._C._cuda_getArchFlags() of PyTorch's wheels for Linux in the Python Package Index. Read in 2.11.0 (CUDA 13.0) and 2.15.0
# (CUDA 13.2), which have the same flags; the versions between are assumed to have them too. The flags of 2.6.0 (CUDA 12.4) come
# from its warnings on newer GPUs, as users quote them. The flags of 2.7 to 2.10 are unknown.
_CUDA_13 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
_CUDA_12_4 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
WHEELS: dict[Version, tuple[str, ...]] = {(2, 6): _CUDA_12_4, **{(2, minor): _CUDA_13 for minor in range(11, 16)}}

_FLAG = re.compile(r"(sm|compute)_(\d+)(\d)[af]?")


def runs_on(capability: tuple[int, int], flags: tuple[str, ...]) -> bool:
    """Return whether a build for these flags ("sm_90", "compute_120") has kernels for a GPU of a capability."""
    for kind, major, minor in _FLAG.findall(" ".join(flags)):
        built = int(major), int(minor)
        same = built[0] == capability[0] and built[1] <= capability[1]
        if same if kind == "sm" else built <= capability:
            return True
    return False


def installed_flags() -> tuple[str, ...]:
    """Return the flags for which the installed PyTorch was built; empty if it was built without CUDA. Imports torch."""
    import torch

    return () if torch.version.cuda is None else tuple(torch._C._cuda_getArchFlags().split())


def flags_of(version: Version, installed: tuple[str, ...] | None = None) -> tuple[str, ...] | None:
    """Return the flags for which this version of PyTorch was built; None if they are unknown.

    The installed version's own flags are used, else those of its wheels. `installed` is the result of `installed_flags`, if
    known.
    """
    if version == installed_version() and (own := installed_flags() if installed is None else installed):
        return own
    return WHEELS.get(version)


def caution(gpu: Gpu, version: Version, installed: tuple[str, ...] | None = None) -> str | None:
    """Return a warning for an NVIDIA GPU on which PyTorch of this version cannot run; None if it can or the builds are unknown.

    `installed` is as in `flags_of`.
    """
    flags = flags_of(version, installed)
    if gpu.capability is None or gpu.maker != "NVIDIA" or flags is None or runs_on(gpu.capability, flags):
        return None
    major, minor = gpu.capability
    return (
        f"PyTorch {format_version(version)} has no kernels for the {gpu.name}, whose capability is {major}.{minor}: it was "
        f"built for {', '.join(flags)} and would fail there; the figures are those of a build that has them"
    )

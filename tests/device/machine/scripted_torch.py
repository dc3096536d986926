"""As much of PyTorch and of a computer as the inventory asks about, in any state one likes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace

from sizer.base.units import GIB
from sizer.device.machine.computer import GpuMemory, Host, Machine

# PyTorch 2.11 to 2.15, c10/cuda/CUDAFunctions.cpp
NO_DRIVER = (
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from "
    "http://www.nvidia.com/Download/index.aspx"
)
TOO_OLD = (
    "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by "
    "downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx Alternatively, go to: "
    "https://pytorch.org to install a PyTorch version that has been compiled with your version of the CUDA driver."
)
NO_GPU = "No CUDA GPUs are available"


class Scripted(Host):
    """A computer with these files, programs and variables."""

    def __init__(self, files: dict | None = None, programs: dict | None = None, variables: dict | None = None):
        self.files, self.programs, self.variables = files or {}, programs or {}, variables or {}
        self.system = None

    def read(self, path: str) -> str | None:
        return self.files.get(path)

    def run(self, *command: str) -> str | None:
        return self.programs.get(command[0])

    def environment(self, name: str) -> str | None:
        return self.variables.get(name)

    def macos(self) -> str | None:
        return self.system

    def total_bytes(self) -> int | None:
        return 64 * GIB


class Library:
    """NVIDIA's management library for GPUs of these UUIDs, each with 70 of 80 GiB free."""

    def __init__(self, *uuids: str):
        self.uuids = uuids

    def driver_version(self) -> str:
        return "570.86.15"

    def memory(self, uuid: str) -> GpuMemory | None:
        known = GpuMemory(total_bytes=80 * GIB, free_bytes=70 * GIB, used_bytes=10 * GIB)
        return known if uuid in self.uuids else None


def gpu(name: str = "NVIDIA H100", capability: tuple[int, int] = (9, 0), uuid: str = "u0") -> SimpleNamespace:
    """The properties of a GPU with 80 GiB, and with 132 multiprocessors of 2,048 threads."""
    major, minor = capability
    return SimpleNamespace(
        name=name,
        total_memory=80 * GIB,
        major=major,
        minor=minor,
        uuid=uuid,
        multi_processor_count=132,
        max_threads_per_multi_processor=2048,
    )


def cuda(
    gpus: Sequence[SimpleNamespace] = (),
    *,
    warning: str | None = None,
    refusal: str = NO_DRIVER,
    built: Sequence[str] = ("sm_80", "sm_90", "compute_90"),
    free: Callable[[int], tuple[int, int]] = lambda index: (60 * GIB, 80 * GIB),
) -> SimpleNamespace:
    """torch.cuda with these GPUs; without any, `warning` is what asking for them warns of, `refusal` what init() raises."""

    def is_available() -> bool:
        if warning:
            warnings.warn(warning, UserWarning, stacklevel=2)
        return bool(gpus)

    def init() -> None:
        if refusal:
            raise RuntimeError(refusal)

    return SimpleNamespace(
        is_available=is_available,
        device_count=lambda: len(gpus),
        init=init,
        get_device_properties=lambda index: gpus[index],
        get_arch_list=lambda: list(built),
        mem_get_info=free,
    )


def torch_with(
    *,
    cuda: SimpleNamespace | None = None,
    version: str | None = "13.0",
    hip: str | None = None,
    mps: int | bool | None = False,
    xpu: Sequence[SimpleNamespace] | None = None,
    xpu_free: Callable[[int], tuple[int, int]] = lambda index: (10 * GIB, 16 * GIB),
) -> SimpleNamespace:
    """PyTorch of a build (`version`, `hip`) with these devices; `mps` is its memory, None where unavailable, False: not built."""
    mps_backend = SimpleNamespace(is_built=lambda: mps is not False, is_available=lambda: bool(mps))
    intel = SimpleNamespace(
        _is_compiled=lambda: xpu is not None,
        is_available=lambda: bool(xpu),
        device_count=lambda: len(xpu or ()),
        get_device_properties=lambda index: (xpu or ())[index],
        mem_get_info=xpu_free,
    )
    return SimpleNamespace(
        __version__="2.15.0",
        version=SimpleNamespace(cuda=version, hip=hip),
        cuda=cuda,
        backends=SimpleNamespace(cudnn=SimpleNamespace(version=lambda: 92600), mps=mps_backend),
        mps=SimpleNamespace(recommended_max_memory=lambda: mps),
        xpu=intel,
    )


def machine(torch: SimpleNamespace, host: Scripted | None = None, library: Library | None = None) -> Machine:
    """A machine for `take_inventory`."""
    return Machine(torch=torch, host=host or Scripted(), open_nvml=lambda: library)

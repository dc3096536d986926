"""The computer and its accelerators.

Processor and memory come from the operating system, CUDA, ROCm, MPS and XPU devices from their drivers. Importing this module
imports no torch; torch is passed as an argument. A missing device has a reason in a sentence.

NVIDIA's management library is queried without creating a context on any GPU, because a context's memory would count as used.
The library comes with the driver (libnvidia-ml.so.1, nvml.dll), so it exists wherever CUDA works. Functions and structs are
those of nvml.h (API version 2, in every driver since R295).
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sizer.base.errors import quote
from sizer.base.units import KIB
from sizer.device.record.measurement import DeviceFacts

COMMAND_SECONDS = 10
_CGROUP = "/sys/fs/cgroup"


class Host:
    """Access to the operating system. Tests put another one in its place."""

    def read(self, path: str) -> str | None:
        """Return the text of a file of the system; None if it does not exist."""
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def run(self, *command: str) -> str | None:
        """Return the output of a program of the system; None if it is missing or fails."""
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() or None

    def environment(self, name: str) -> str | None:
        """Return an environment variable; None if it is not set."""
        return os.environ.get(name)

    def macos(self) -> str | None:
        """Return the version of macOS; None on other systems."""
        return platform.mac_ver()[0] or None

    def processor_name(self) -> str:
        """Return the maker's name of the processor, else the architecture."""
        listed = re.search(r"^model name\s*:\s*(.+)$", self.read("/proc/cpuinfo") or "", re.MULTILINE)
        if listed:
            return listed[1].strip()
        named = self.run("sysctl", "-n", "machdep.cpu.brand_string") if self.macos() else None
        return named or platform.processor() or platform.machine()

    def total_bytes(self) -> int | None:
        """Return the memory (bytes) of this computer; None if the system does not report it (Windows)."""
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):
            return None

    def free_bytes(self) -> int | None:
        """Return the bytes available for new work: the kernel's own estimate, or less if a container's limit is lower.

        None if the system does not report it (macOS, Windows).
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


# -------------------------------------------------------------------------------------------------------- accelerators


_VERSION_CHARACTERS = 96  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE is 80
_INSUFFICIENT_SIZE = 7  # NVML_ERROR_INSUFFICIENT_SIZE: more entries than fit in the list, which was empty
_LIBRARY = "nvml.dll" if os.name == "nt" else "libnvidia-ml.so.1"


class _Memory(ctypes.Structure):  # nvmlMemory_t
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """One GPU's memory in bytes as the driver counts it, over all processes."""

    total_bytes: int
    free_bytes: int
    used_bytes: int


class Nvml:
    """The driver's own view of the machine's NVIDIA GPUs. Use `open_nvml`."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library

    def driver_version(self) -> str | None:
        """Return the driver's version, such as "570.86.15"; None if it does not report one."""
        text = ctypes.create_string_buffer(_VERSION_CHARACTERS)
        try:
            status = self._library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(_VERSION_CHARACTERS))
        except AttributeError:  # a library in parts, as on Jetson
            return None
        if status:
            return None
        return text.value.decode("ascii", "replace")

    def memory(self, uuid: str) -> GpuMemory | None:
        """Return the memory of the GPU with this UUID ("GPU-..." or as PyTorch gives it, without the prefix); None if unknown."""
        handle, found = self._handle(uuid), _Memory()
        if handle is None or self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(found)):
            return None
        return GpuMemory(total_bytes=found.total, free_bytes=found.free, used_bytes=found.used)

    def processes(self, uuid: str) -> int | None:
        """Return the number of processes that compute on the GPU with this UUID, or None if the driver does not report it."""
        handle, count = self._handle(uuid), ctypes.c_uint(0)
        if handle is None:
            return None
        try:
            status = self._library.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), None)
        except AttributeError:  # a driver before R510
            return None
        return count.value if status in (0, _INSUFFICIENT_SIZE) else None

    def _handle(self, uuid: str) -> ctypes.c_void_p | None:
        handle = ctypes.c_void_p()
        for name in (uuid, f"GPU-{uuid}", f"MIG-{uuid}"):
            if not self._library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)):
                return handle
        return None


def open_nvml(library: str = _LIBRARY) -> Nvml | None:
    """Return the management library, None if there is no NVIDIA driver or it does not answer."""
    try:
        loaded = ctypes.CDLL(library)
        return None if loaded.nvmlInit_v2() else Nvml(loaded)
    except (OSError, AttributeError):
        return None


# -------------------------------------------------------------------------------------------------------- accelerators


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Everything the inventory looks at: PyTorch, the operating system, NVIDIA's library. Tests script all three."""

    torch: Any
    host: Host
    open_nvml: Callable[[], Nvml | None] = open_nvml


def find_accelerators(machine: Machine) -> tuple[list[DeviceFacts], list[str]]:
    """Return each CUDA (or ROCm) device, MPS and each XPU, memory in bytes, and a sentence for each missing kind.

    Missing kinds are those that this build of PyTorch supports and does not find. No context is made on a CUDA device if
    NVIDIA's management library reports the free memory.
    """
    found = [_cuda(machine), _mps(machine.torch, machine.host), _xpu(machine.torch)]
    return [facts for devices, _ in found for facts in devices], [sentence for _, sentence in found if sentence]


def without_kernels(torch: Any, devices: Iterable[DeviceFacts]) -> Iterator[tuple[str, str]]:
    """Yield the CUDA devices for which this build has no code, each with a sentence."""
    for facts in devices:
        if facts.kind != "cuda" or not torch.version.cuda or facts.capability is None:
            continue
        built = torch.cuda.get_arch_list()
        if built and not any(_runs(arch, facts.capability) for arch in built):
            yield (
                facts.device,
                f"{facts.device} ({facts.name}) has compute capability {facts.capability_text}, for which this build of "
                f"PyTorch has no kernels (it has {', '.join(built)}); install a build with them.",
            )


def _runs(arch: str, capability: tuple[int, int]) -> bool:
    """Return whether code for `arch` runs on a device.

    Machine code (sm_86) runs within one major version, PTX (compute_86) on any later one.

    Source: CUDA C++ Programming Guide, "Binary Compatibility" and "PTX Compatibility".
    """
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", arch)
    if match is None:
        return True  # a name unknown to us is no reason to refuse
    built = (int(match[2]), int(match[3]))
    return built <= capability and (match[1] == "compute" or built[0] == capability[0])


# ------------------------------------------------------------------------------------------------------------ CUDA, ROCm


def _cuda(machine: Machine) -> tuple[Sequence[DeviceFacts], str | None]:
    torch = machine.torch
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return (), None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            nvml = machine.open_nvml() if torch.version.cuda else None
            versions = _versions_under(machine, nvml)
            return [_cuda_facts(torch, index, versions, nvml) for index in range(torch.cuda.device_count())], None
        words = " ".join(str(warning.message) for warning in caught)
    return (), _why_no_cuda(machine, words or _refusal(torch))


def _cuda_facts(torch: Any, index: int, versions: dict[str, str], nvml: Nvml | None) -> DeviceFacts:
    found = torch.cuda.get_device_properties(index)
    threads = found.multi_processor_count * found.max_threads_per_multi_processor if torch.version.cuda else None
    return DeviceFacts(
        device=f"cuda:{index}",
        name=found.name,
        total_bytes=found.total_memory,
        free_bytes=_cuda_free_bytes(torch, index, found, nvml),
        capability=(found.major, found.minor),
        resident_threads=threads,
        versions=versions,
    )


def _cuda_free_bytes(torch: Any, index: int, found: Any, nvml: Nvml | None) -> int | None:
    """Return the free bytes by NVML, without a context; else by the runtime, which first allocates some 0.5 GiB for a context."""
    uuid = str(getattr(found, "uuid", ""))
    memory = nvml.memory(uuid) if nvml and uuid else None
    if memory:
        return memory.free_bytes
    try:
        return torch.cuda.mem_get_info(index)[0]
    except (RuntimeError, AssertionError):  # a device in exclusive use by another process, or broken
        return None


def _versions_under(machine: Machine, nvml: Nvml | None) -> dict[str, str]:
    torch, host = machine.torch, machine.host
    cudnn = torch.backends.cudnn.version()
    rocm = getattr(torch.version, "hip", None)
    ask_smi = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    driver = host.read("/sys/module/amdgpu/version") if rocm else (nvml and nvml.driver_version()) or host.run(*ask_smi)
    known = {
        "driver": driver and driver.split()[0],
        "cuda": torch.version.cuda,
        "rocm": rocm,
        "cudnn" if not rocm else "miopen": cudnn and _cudnn_text(cudnn),
    }
    return {name: str(version) for name, version in known.items() if version}


def _cudnn_text(version: int) -> str:
    # cudnn_version.h: major * 10000 + minor * 100 + patch since 9, major * 1000 + ... before
    major, rest = divmod(version, 10_000 if version >= 90_000 else 1_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _refusal(torch: Any) -> str:
    """Return why CUDA cannot be initialized, in PyTorch's own words."""
    try:
        torch.cuda.init()
    except Exception as error:  # RuntimeError, AssertionError, DeferredCudaCallError: its words are wanted
        return str(error)
    return ""


def _why_no_cuda(machine: Machine, words: str) -> str:
    """Return why there is no CUDA device, in one sentence.

    The compared words are those of c10/cuda/CUDAFunctions.cpp, the same in PyTorch 2.11 to 2.15.
    """
    torch, hidden = machine.torch, machine.host.environment("CUDA_VISIBLE_DEVICES")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    if old := re.search(r"driver on your system is too old \(found version (\d+)\)", words):
        knows = f"{int(old[1]) // 1000}.{int(old[1]) % 1000 // 10}"
        return (
            f"The NVIDIA driver is too old: it knows CUDA {knows}, this build of PyTorch is for {build}; update the driver, or "
            "install a build for an older CUDA."
        )
    if "no NVIDIA driver" in words:
        return f"No NVIDIA driver is installed; this build of PyTorch ({build}) could use an NVIDIA GPU with one."
    if hidden is not None and ("No CUDA GPUs are available" in words or not words):
        return (
            f"CUDA_VISIBLE_DEVICES is {quote(hidden)}, which leaves PyTorch no GPU; unset it, or name those to be used."
        )
    if "No CUDA GPUs are available" in words or not words:
        return f"No GPU was found that this build of PyTorch ({build}) can use, though its driver is installed."
    return f"CUDA could not be started; PyTorch says {quote(' '.join(words.split()), 300)}."


# -------------------------------------------------------------------------------------------------------------- MPS, XPU


def _mps(torch: Any, host: Host) -> tuple[Sequence[DeviceFacts], str | None]:
    if not torch.backends.mps.is_built():
        return (), None
    macos = host.macos()
    if not torch.backends.mps.is_available():
        return (
            (),
            f"MPS is not available: macOS {macos or 'of unknown version'} or its GPU does not offer what PyTorch needs.",
        )
    total = torch.mps.recommended_max_memory()
    versions = {"macos": macos} if macos else {}
    return [
        DeviceFacts(device="mps", name=f"GPU of {host.processor_name()}", total_bytes=total, versions=versions)
    ], None


def _xpu(torch: Any) -> tuple[Sequence[DeviceFacts], str | None]:
    if not (hasattr(torch, "xpu") and torch.xpu._is_compiled()):
        return (), None
    if not torch.xpu.is_available():
        return (), "No Intel GPU was found, or its driver is missing; this build of PyTorch could use one."
    return [_xpu_facts(torch, index) for index in range(torch.xpu.device_count())], None


def _xpu_facts(torch: Any, index: int) -> DeviceFacts:
    found = torch.xpu.get_device_properties(index)
    driver = getattr(found, "driver_version", None)
    try:
        free = torch.xpu.mem_get_info(index)[0]
    except (RuntimeError, AttributeError):  # not every Intel GPU reports it
        free = None
    return DeviceFacts(
        device=f"xpu:{index}",
        name=found.name,
        total_bytes=found.total_memory,
        free_bytes=free,
        versions={"driver": str(driver)} if driver else {},
    )

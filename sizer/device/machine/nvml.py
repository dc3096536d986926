"""NVIDIA's management library, asked without making a context on any GPU: its own memory would count as used otherwise.

The library comes with the driver (libnvidia-ml.so.1, nvml.dll), so it is there wherever CUDA works. Functions and structs are
those of nvml.h (API version 2, in every driver since R295).
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

_VERSION_CHARACTERS = 96  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE is 80
_INSUFFICIENT_SIZE = 7  # NVML_ERROR_INSUFFICIENT_SIZE: there are more than fit in the list, which was none
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
        """The driver's version, such as "570.86.15"; None where it does not say."""
        text = ctypes.create_string_buffer(_VERSION_CHARACTERS)
        try:
            status = self._library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(_VERSION_CHARACTERS))
        except AttributeError:  # a library in parts, as on Jetson
            return None
        if status:
            return None
        return text.value.decode("ascii", "replace")

    def memory(self, uuid: str) -> GpuMemory | None:
        """The memory of the GPU with this UUID ("GPU-..." or as PyTorch gives it, without the prefix); None if unknown."""
        handle, found = self._handle(uuid), _Memory()
        if handle is None or self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(found)):
            return None
        return GpuMemory(total_bytes=found.total, free_bytes=found.free, used_bytes=found.used)

    def processes(self, uuid: str) -> int | None:
        """How many processes compute on the GPU with this UUID; None where the driver does not say."""
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
    """The management library, None where there is no NVIDIA driver or it does not answer."""
    try:
        loaded = ctypes.CDLL(library)
        return None if loaded.nvmlInit_v2() else Nvml(loaded)
    except (OSError, AttributeError):
        return None

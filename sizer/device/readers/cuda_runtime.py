"""What PyTorch and the driver can be asked about one CUDA device: one-line calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sizer.device.machine.nvml import open_nvml

ENTRIES = 4_000_000  # of the allocator's history; one that is full has lost its beginning


class CudaRuntime:
    """All that a reader asks of PyTorch and the driver about one CUDA device ("cuda:0" and so on). Tests script it."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._nvml = open_nvml()
        self._uuid = str(getattr(torch.cuda.get_device_properties(self._device), "uuid", ""))

    def open(self) -> None:
        """Make the context on the device, if there is none."""
        torch.cuda.set_device(self._device)
        torch.cuda.synchronize(self._device)

    def has_context(self) -> bool:
        """Whether this process has a context on the device, whose memory the driver counts as used."""
        return torch._C._cuda_hasPrimaryContext(self._device.index)

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        torch.cuda.synchronize(self._device)

    def stats(self) -> dict[str, int]:
        """torch.cuda.memory_stats."""
        return torch.cuda.memory_stats(self._device)

    def reset_peaks(self) -> None:
        """Reset the allocator's peaks to what is there."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def used_bytes(self) -> int | None:
        """The device's memory in use by all processes, as the driver says without a context; None where it does not say."""
        memory = self._nvml.memory(self._uuid) if self._nvml and self._uuid else None
        return memory.used_bytes if memory else None

    def free_and_total_bytes(self) -> tuple[int, int]:
        """The device's free and total memory as the context sees it."""
        return torch.cuda.mem_get_info(self._device)

    def processes(self) -> int | None:
        """How many processes compute on the device; None where the driver does not say."""
        return self._nvml.processes(self._uuid) if self._nvml and self._uuid else None

    def start_history(self) -> None:
        """Have the allocator keep its events, without stacks."""
        # stacks="python" with context=None: no stacks at all, so that recording costs little
        torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=ENTRIES)

    def history(self) -> list[dict[str, Any]]:
        """The events that the allocator kept."""
        return torch.cuda.memory._snapshot(self._device)["device_traces"][self._device.index]

    def stop_history(self) -> None:
        """Have the allocator forget its events."""
        torch.cuda.memory._record_memory_history(None)

    def on_out_of_memory(self, call: Callable[[int, int], None]) -> None:
        """Have `call(requested bytes, the device's free bytes)` called where an allocation fails. Some are tried again smaller."""
        # OutOfMemoryObserver in c10/cuda/CUDACachingAllocator.h: device, bytes asked for, bytes in all, bytes free
        torch._C._cuda_attach_out_of_memory_observer(lambda device, asked, total, free: call(asked, free))

"""Apple's GPU: the current figures of the Metal allocator, and its peaks if they can be read."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as optimizers

from sizer.base.units import format_bytes
from sizer.device.readers.events import LiveTensors
from sizer.device.readers.reader import Reader, read_error
from sizer.device.record.measurement import COUNTED, SAMPLED, DeviceFacts, DeviceOutOfMemory, PhaseReading


class MpsRuntime:
    """The calls of a reader to PyTorch about MPS. Tests replace it."""

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        torch.mps.synchronize()

    def allocated_bytes(self) -> int:
        """Return the bytes of tensors."""
        return torch.mps.current_allocated_memory()

    def driver_bytes(self) -> int:
        """Return the bytes that Metal gave this process: the allocator's heaps, caches of compiled graphs."""
        return torch.mps.driver_allocated_memory()

    def peak_bytes(self) -> int | None:
        """Return the peak bytes of tensors since the last reset; None if PyTorch has no such counter."""
        with contextlib.suppress(RuntimeError, AttributeError, NotImplementedError):  # an allocator without statistics
            peak = torch.accelerator.max_memory_allocated()
            return peak if peak >= self.allocated_bytes() else None
        return None

    def reset_peak(self) -> None:
        """Reset the peak, if there is one."""
        with contextlib.suppress(RuntimeError, AttributeError, NotImplementedError):
            torch.accelerator.reset_peak_memory_stats()


class MpsReader(Reader):
    """Bytes of Apple's GPU.

    If PyTorch has a peak counter, it is read (COUNTED). Otherwise allocated bytes are sampled before and after the forward of
    every module, after every gradient, and around optimizer steps (SAMPLED). Peaks inside one module's forward or one
    optimizer's step are then missed. The allocator has no history, so nothing is recorded.
    """

    def __init__(self, facts: DeviceFacts, runtime: MpsRuntime) -> None:
        super().__init__(facts, torch.device("mps"))
        self.source = SAMPLED
        self._runtime = runtime
        self._handles: list[Any] = []
        self._most = 0

    def synchronize(self) -> None:
        self._runtime.synchronize()

    def begin(self, *, record: bool) -> None:
        self._runtime.synchronize()
        if live := self._runtime.allocated_bytes():
            self._doubt(f"{format_bytes(live)} were allocated before the measurement began")
        self._runtime.reset_peak()
        self.source = SAMPLED if self._runtime.peak_bytes() is None else COUNTED
        register = nn.modules.module
        self._handles = [
            register.register_module_forward_pre_hook(self._sample),
            register.register_module_forward_hook(self._sample, always_call=True),
            optimizers.register_optimizer_step_pre_hook(self._sample),
            optimizers.register_optimizer_step_post_hook(self._sample),
        ]
        self._most = self._runtime.allocated_bytes()

    def watch(self, module: nn.Module) -> None:
        for parameter in module.parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._sample))

    def mark(self, phase: str, live: LiveTensors | None = None) -> None:
        self._runtime.synchronize()
        self._sample()
        counted = self._runtime.peak_bytes()
        allocated = self._counter("current_allocated_memory", self._runtime.allocated_bytes())
        self._phases.append(
            PhaseReading(
                phase=phase,
                allocated_bytes=allocated or 0,
                peak_allocated_bytes=self._most if counted is None else max(self._most, counted),
                driver_bytes=self._counter("driver_allocated_memory", self._runtime.driver_bytes()),
            )
        )
        self._runtime.reset_peak()
        self._most = allocated or 0

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def out_of_memory(self, error: BaseException, phase: str) -> DeviceOutOfMemory | None:
        return read_error(error, phase)

    def _sample(self, *ignored: object) -> None:
        """Sample the allocated bytes; accepts the arguments of any hook."""
        self._most = max(self._most, self._runtime.allocated_bytes())

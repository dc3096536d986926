"""The CPU as a device: torch.profiler's memory events are its counters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from sizer.allocator.timeline import running_bytes
from sizer.device.machine.computer import Host
from sizer.device.readers.events import LiveTensors, make_tape
from sizer.device.readers.profiler import Profiled, Profiler
from sizer.device.readers.reader import Reader, read_error
from sizer.device.record.measurement import PROFILED, DeviceFacts, DeviceOutOfMemory, PhaseReading
from sizer.tape.tape import Tape


class CpuReader(Reader):
    """Bytes of PyTorch's tensors on the CPU: every allocation, summed.

    There is no cache and so nothing reserved. Tensors that were there before `begin` do not count.
    *Known limitations*: allocations of the C++ runtime and of Python are not tensors and not counted.
    """

    source = PROFILED

    def __init__(self, facts: DeviceFacts, *, free_bytes: Callable[[], int | None] | None = None) -> None:
        super().__init__(facts, torch.device("cpu"))
        self._free_bytes = free_bytes or Host().free_bytes
        self._profiler = Profiler()
        self._profiled = Profiled()
        self._live: dict[str, LiveTensors] = {}
        self._records = False

    def synchronize(self) -> None:
        """Return at once: the CPU runs each operator before it returns."""

    def begin(self, *, record: bool) -> None:
        self._records = record
        self._profiler.start()

    def watch(self, module: nn.Module) -> None:
        self._profiler.watch(module)

    def mark(self, phase: str, live: LiveTensors | None = None) -> None:
        self._live[phase] = live or {}
        self._profiler.mark(phase)

    def end(self) -> None:
        stopped = self._profiler.stop()
        self._profiled = stopped if stopped.events else self._profiled

    def phases(self) -> tuple[PhaseReading, ...]:
        return read_phases(self._tape(1))

    def recording(self, batch: int) -> Tape | None:
        return self._tape(batch) if self._records else None

    def scratch(self) -> dict[str, int]:
        """Return, per operator, the peak bytes inside one call beyond those before and after it. Call after `end`."""
        return self._profiled.scratch("cpu")

    def out_of_memory(self, error: BaseException, phase: str) -> DeviceOutOfMemory | None:
        found = read_error(error, phase, always=MemoryError)
        if found is None:
            return None
        return replace(
            found,
            free_bytes=self._free_bytes(),
            allocated_bytes=self._most_since_last_mark(),
            reserved_bytes=None,
            message=found.message or type(error).__name__,
        )

    def _tape(self, batch: int) -> Tape:
        return make_tape(self._profiled.on("cpu"), self._profiled.phase_ends("cpu", self._live), batch=batch)

    def _most_since_last_mark(self) -> int | None:
        """Return the peak of the phase that did not end, because the error's frames have released their tensors since."""
        tape = self._tape(1)
        last = tape.marks[-1][0] if tape.marks else 0
        return max(running_bytes(tape.order, tape.sizes)[last:])


def read_phases(tape: Tape) -> tuple[PhaseReading, ...]:
    """Return the bytes alive at each phase's end and the peak within it, its first moment included, by plain addition."""
    levels, begin, phases = running_bytes(tape.order, tape.sizes), 0, []
    for end, phase in tape.marks:
        peak = max(levels[begin : end + 1])
        phases.append(PhaseReading(phase=phase, allocated_bytes=levels[end], peak_allocated_bytes=peak))
        begin = end
    return tuple(phases)

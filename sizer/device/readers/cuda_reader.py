"""CUDA devices: the caching allocator's own counters and events, and the process memory by PyTorch and the driver."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from sizer.base.units import format_bytes, pluralize
from sizer.device.machine.computer import open_nvml
from sizer.device.readers.events import LiveTensors, PhaseEnd, make_recording, read_trace
from sizer.device.readers.profiler import Profiled, Profiler
from sizer.device.readers.reader import Reader, read_error
from sizer.device.record.measurement import COUNTED, DeviceFacts, DeviceOutOfMemory, PhaseReading
from sizer.device.record.recording import Segment
from sizer.tape.tape import Tape

ENTRIES = 4_000_000  # of the allocator's history; a full history has lost its beginning


class CudaRuntime:
    """The calls of a reader to PyTorch and the driver about one CUDA device ("cuda:0" and so on). Tests replace it."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._nvml = open_nvml()
        self._uuid = str(getattr(torch.cuda.get_device_properties(self._device), "uuid", ""))

    def open(self) -> None:
        """Make the context on the device, if there is none."""
        torch.cuda.set_device(self._device)
        torch.cuda.synchronize(self._device)

    def has_context(self) -> bool:
        """Return whether this process has a context on the device; the driver counts its memory as used."""
        return torch._C._cuda_hasPrimaryContext(self._device.index)

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        torch.cuda.synchronize(self._device)

    def stats(self) -> dict[str, int]:
        """Return torch.cuda.memory_stats."""
        return torch.cuda.memory_stats(self._device)

    def reset_peaks(self) -> None:
        """Reset the allocator's peaks to the current values."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def used_bytes(self) -> int | None:
        """Return the device's memory in use by all processes, by the driver without a context; None if it does not report it."""
        memory = self._nvml.memory(self._uuid) if self._nvml and self._uuid else None
        return memory.used_bytes if memory else None

    def free_and_total_bytes(self) -> tuple[int, int]:
        """Return the device's free and total memory as the context sees it."""
        return torch.cuda.mem_get_info(self._device)

    def processes(self) -> int | None:
        """Return the number of processes that compute on the device, or None if the driver does not report it."""
        return self._nvml.processes(self._uuid) if self._nvml and self._uuid else None

    def start_history(self) -> None:
        """Make the allocator record its events, without stacks."""
        # stacks="python" with context=None records no stacks, so that recording is cheap
        torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=ENTRIES)

    def history(self) -> list[dict[str, Any]]:
        """Return the events that the allocator recorded."""
        return torch.cuda.memory._snapshot(self._device)["device_traces"][self._device.index]

    def stop_history(self) -> None:
        """Have the allocator forget its events."""
        torch.cuda.memory._record_memory_history(None)

    def on_out_of_memory(self, call: Callable[[int, int], None]) -> None:
        """Register `call(requested bytes, the device's free bytes)` for failing allocations.

        The allocator retries some at a smaller size.
        """
        # OutOfMemoryObserver in c10/cuda/CUDACachingAllocator.h: device, bytes requested, total bytes, bytes free
        torch._C._cuda_attach_out_of_memory_observer(lambda device, asked, total, free: call(asked, free))


# ----------------------------------------------------------------------------------------------------------- the reader


@dataclass(frozen=True, slots=True)
class _Failed:
    """The counters at the moment an allocation failed, before the error released any tensors."""

    requested_bytes: int
    free_bytes: int
    allocated_bytes: int | None
    reserved_bytes: int | None


class CudaReader(Reader):
    """Bytes of one CUDA device by the allocator's counters.

    `driver_bytes` is the increase of used device memory since before this process made its context, by the driver's management
    library (NVML). Without NVML it is all used memory of the device, and `doubts` says so. With `record` the allocator records
    its history, and torch.profiler records the operator and module of each allocation; neither uses device memory.
    """

    source = COUNTED

    def __init__(self, facts: DeviceFacts, runtime: CudaRuntime) -> None:
        super().__init__(facts, torch.device(facts.device))
        self._runtime = runtime
        self._before: int | None = None  # bytes in use before our context
        self._had_context: bool | None = None  # None until other processes are noted
        self._others = 0  # processes
        self._before_begin: dict[str, int] = {}  # counters
        self._ends: list[PhaseEnd] = []
        self._failed: _Failed | None = None
        self._profiler: Profiler | None = None
        self._profiled = Profiled()
        self._history: list[dict[str, Any]] | None = None
        self._after_end: dict[str, int] = {}

    def synchronize(self) -> None:
        self._runtime.synchronize()

    def note_others(self) -> None:
        self._before = self._runtime.used_bytes()
        self._had_context = self._runtime.has_context()
        self._others = (self._runtime.processes() or 0) - self._had_context

    def begin(self, *, record: bool) -> None:
        runtime = self._runtime
        if self._had_context is None:
            self.note_others()
        runtime.open()
        if self._had_context and self._before is not None:
            self._doubt("this process had a context before the measurement: the driver's figure leaves it out")
        if self._before is None:
            self._doubt("the driver's figure is that of the whole device, other processes included")
        if self._others > 0:
            self._doubt(
                f"{pluralize(self._others, 'other process', 'other processes')} computed on the device: the driver's figure may "
                "include what changed there"
            )
        with contextlib.suppress(AttributeError):  # a build without the observer: the error's text remains
            runtime.on_out_of_memory(self._note_failure)
        self._before_begin = dict(runtime.stats())
        if live := self._before_begin.get("allocated_bytes.all.current", 0):
            self._doubt(f"{format_bytes(live)} were allocated before the measurement began")
        runtime.reset_peaks()
        if record:
            runtime.start_history()
            self._profiler = Profiler()
            self._profiler.start()

    def watch(self, module: nn.Module) -> None:
        if self._profiler is not None:
            self._profiler.watch(module)

    def mark(self, phase: str, live: LiveTensors | None = None) -> None:
        self._runtime.synchronize()
        stats = self._runtime.stats()

        def counter(name: str) -> int | None:
            return self._counter(name, stats.get(name))

        self._phases.append(
            PhaseReading(
                phase=phase,
                allocated_bytes=counter("allocated_bytes.all.current") or 0,
                peak_allocated_bytes=counter("allocated_bytes.all.peak"),
                reserved_bytes=counter("reserved_bytes.all.current"),
                peak_reserved_bytes=counter("reserved_bytes.all.peak"),
                driver_bytes=self._driver_bytes(),
            )
        )
        if self._profiler is not None:
            self._ends.append(PhaseEnd(position=len(self._runtime.history()), phase=phase, live=live or {}))
        self._runtime.reset_peaks()

    def end(self) -> None:
        if self._profiler is not None:
            with self._doubting("the operators' names"):
                self._profiled = self._profiler.stop()
            with self._doubting("the allocator's history"):
                self._history = self._runtime.history()
                self._runtime.stop_history()
            self._profiler = None
        with self._doubting("the counters of retries"):
            self._after_end = dict(self._runtime.stats())

    @contextlib.contextmanager
    def _doubting(self, what: str) -> Iterator[None]:
        """Record a failure within the context as a doubt: a lost device no longer answers, and earlier readings remain valid."""
        try:
            yield
        except Exception as error:  # any kind of error: the driver and PyTorch raise various ones on a lost device
            self._doubt(f"{what} could not be read at the end ({type(error).__name__})")

    def recording(self, batch: int) -> Tape | None:
        made = self._recording(batch)
        return None if made is None else made[0]

    def segments(self) -> tuple[Segment, ...]:
        """Return the segments that the allocator got and released, placed among the events of `recording`."""
        made = self._recording(1)
        return () if made is None else made[1]

    def retries(self) -> int | None:
        return self._times("num_alloc_retries")

    def doubts(self) -> tuple[str, ...]:
        found = list(self._doubts)
        if retries := self.retries():
            found.append(f"the allocator was out of memory and emptied its cache {pluralize(retries, 'time')}")
        if (failed := self._times("num_ooms")) and self._failed is not None:
            found.append(f"{pluralize(failed, 'allocation')} failed; a kernel that can do with less was then given less")
        if self._history is not None and len(self._history) >= ENTRIES:
            found.append("the allocator's history was full and is not kept")
        return tuple(found)

    def out_of_memory(self, error: BaseException, phase: str) -> DeviceOutOfMemory | None:
        found = read_error(error, phase, always=torch.OutOfMemoryError)
        if found is None or self._failed is None:
            return found
        failed, self._failed = self._failed, None
        return replace(
            found,
            requested_bytes=failed.requested_bytes,
            free_bytes=failed.free_bytes,
            allocated_bytes=failed.allocated_bytes or found.allocated_bytes,
            reserved_bytes=failed.reserved_bytes or found.reserved_bytes,
        )

    def _times(self, counter: str) -> int | None:
        """Return the number of events from `begin` to `end`, or None without the counter."""
        if counter not in self._after_end:
            return None
        return max(0, self._after_end[counter] - self._before_begin.get(counter, 0))

    def _note_failure(self, requested_bytes: int, free_bytes: int) -> None:
        stats: dict[str, int] = {}
        with contextlib.suppress(Exception):
            stats = self._runtime.stats()
        allocated, reserved = (stats.get(f"{name}_bytes.all.current") for name in ("allocated", "reserved"))
        self._failed = _Failed(requested_bytes, free_bytes, allocated, reserved)

    def _recording(self, batch: int) -> tuple[Tape, tuple[Segment, ...]] | None:
        if self._history is None or len(self._history) >= ENTRIES:
            return None
        events, ends = read_trace(self._history, self._ends, self._profiled.on("cuda"))
        return make_recording(events, ends, batch=batch)

    def _driver_bytes(self) -> int | None:
        if self._before is None:
            free, total = self._runtime.free_and_total_bytes()
            return max(0, total - free)
        used = self._runtime.used_bytes()
        if used is None or used < self._before:
            self._doubt(
                "the driver's figure fell below what it was before the measurement: another process gave memory back"
            )
            return None
        return used - self._before

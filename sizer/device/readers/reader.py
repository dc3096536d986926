"""Interface of devices in a measurement, and the contents of PyTorch's errors about memory.

Importing this imports no torch.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from sizer.device.readers.events import LiveTensors
from sizer.device.record.measurement import DeviceFacts, DeviceOutOfMemory, PhaseReading
from sizer.device.record.recording import Segment

if TYPE_CHECKING:
    import torch
    from torch import nn

    from sizer.tape.tape import Tape


class Reader(ABC):
    """One device and its counters, for one run: begin, watch, mark after every phase, end, then the results.

    `source` is the origin of the bytes (PROFILED, COUNTED or SAMPLED of `sizer.device.record.measurement`).
    """

    source: str

    def __init__(self, facts: DeviceFacts, device: torch.device) -> None:
        self.device = device
        self._facts = facts
        self._phases: list[PhaseReading] = []
        self._doubts: dict[str, None] = {}

    def facts(self) -> DeviceFacts:
        """Return the driver's facts on the device."""
        return self._facts

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device is idle."""

    def note_others(self) -> None:
        """Read the device memory of other processes, before this process uses the device. Otherwise `begin` does so."""
        return None  # unless the device counts more than this process

    @abstractmethod
    def begin(self, *, record: bool) -> None:
        """Start counting from an empty device; with `record` also record the allocator's events."""

    @abstractmethod
    def watch(self, module: nn.Module) -> None:
        """Learn the names of the children of the module that is now on the device, and the places to sample."""

    @abstractmethod
    def mark(self, phase: str, live: LiveTensors | None = None) -> None:
        """Wait for the device, read its counters for the phase that ends here, and reset the peaks.

        `live` gives the recording the tensors at each address.
        """

    @abstractmethod
    def end(self) -> None:
        """Stop counting and recording. Never raises, and may be called on a device that was lost."""

    def phases(self) -> tuple[PhaseReading, ...]:
        """Return the readings (bytes) of every phase that was marked. Call after `end`."""
        return tuple(self._phases)

    def recording(self, batch: int) -> Tape | None:
        """Return the allocator's events as a tape; None if they were not recorded or the device has none. Call after `end`."""
        return None

    def segments(self) -> tuple[Segment, ...]:
        """Return the segments that the allocator got and released, placed among the events of `recording`.

        Empty if it has none.
        """
        return ()

    def retries(self) -> int | None:
        """Return how often the allocator freed memory and tried again since `begin`, or None without that counter."""
        return None

    def doubts(self) -> tuple[str, ...]:
        """Return why figures may be wrong."""
        return tuple(self._doubts)

    def _doubt(self, text: str) -> None:
        self._doubts.setdefault(text)

    def _counter(self, name: str, value: int | None) -> int | None:
        """Return the value of a counter; None, and a doubt, if it is missing or negative."""
        if value is None or value < 0:
            self._doubt(f"the counter {name} was {'missing' if value is None else value}")
            return None
        return value

    @abstractmethod
    def out_of_memory(self, error: BaseException, phase: str) -> DeviceOutOfMemory | None:
        """Return the facts of an out-of-memory exception; None for other exceptions. Call after `end`."""


# -------------------------------------------------------------------------------------------------- errors about memory


# CUDACachingAllocator.cpp's format_size writes "2.00 GiB", MPSAllocator.mm's "2.00 GB" or, later, "2.00 GiB": powers of two
# both; alloc_cpu.cpp writes "you tried to allocate 123 bytes".
_UNITS = {"bytes": 1, **{f"{letter}{end}": 1024**n for n, letter in enumerate("KMGT", 1) for end in ("B", "iB")}}
_SIZE = r"([\d.]+)\s*(bytes|[KMGT]i?B)\b"
_SIGNS = (
    "out of memory",
    "status_alloc_failed",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "bad_alloc",
)


def read_error(
    error: BaseException, phase: str, *, always: type[BaseException] | None = None
) -> DeviceOutOfMemory | None:
    """Return the facts of an out-of-memory error, in bytes to its three digits; None for other errors.

    A fact that the text lacks is None. An error of class `always` is always accepted. Reads the text of a
    torch.OutOfMemoryError (CUDA) and of the RuntimeError of MPS or the CPU.
    """
    text = " ".join(str(error).split())
    if not (always and isinstance(error, always)) and not any(sign in text.lower() for sign in _SIGNS):
        return None
    allocated = _find(rf"{_SIZE} is allocated by PyTorch", text) or _find(rf"MPS allocated: {_SIZE}", text)
    cached = _find(rf"{_SIZE} is reserved by PyTorch but unallocated", text)
    allowed, others = _find(rf"max allowed: {_SIZE}", text), _find(rf"other allocations: {_SIZE}", text)
    left = None
    if allowed is not None and others is not None and allocated is not None:
        left = max(0, allowed - others - allocated)
    return DeviceOutOfMemory(
        phase=phase,
        requested_bytes=_find(rf"[Tt]ried to allocate {_SIZE}", text),
        free_bytes=left if left is not None else _find(rf"of which {_SIZE} is free", text),
        allocated_bytes=allocated,
        reserved_bytes=None if allocated is None or cached is None else allocated + cached,
        message=text,
    )


def _find(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return None if match is None else round(float(match[1]) * _UNITS[match[2]])

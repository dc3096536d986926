"""What every device can be asked in a measurement. Importing this imports no torch."""

from __future__ import annotations

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

    `source` says where the bytes come from (PROFILED, COUNTED or SAMPLED of `sizer.device.record.measurement`).
    """

    source: str

    def __init__(self, facts: DeviceFacts, device: torch.device) -> None:
        self.device = device
        self._facts = facts
        self._phases: list[PhaseReading] = []
        self._doubts: dict[str, None] = {}

    def facts(self) -> DeviceFacts:
        """The device as the driver describes it."""
        return self._facts

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device is idle."""

    def note_others(self) -> None:
        """Read what others have in use on the device, before this process has anything there. `begin` does so otherwise."""
        return None  # unless the device counts more than this process

    @abstractmethod
    def begin(self, *, record: bool) -> None:
        """Start counting from an empty device; with `record` keep the allocator's events, too."""

    @abstractmethod
    def watch(self, module: nn.Module) -> None:
        """Learn the names of the children of the module that is on the device now, and where to sample."""

    @abstractmethod
    def mark(self, phase: str, live: LiveTensors | None = None) -> None:
        """Wait for the device, read its counters as those of the phase that ends here, and reset the peaks.

        `live` says for the recording what lives at which address.
        """

    @abstractmethod
    def end(self) -> None:
        """Stop counting and recording. Never raises, and may be called on a device that was lost."""

    def phases(self) -> tuple[PhaseReading, ...]:
        """The readings (bytes) of every phase that was marked, after `end`."""
        return tuple(self._phases)

    def recording(self, batch: int) -> Tape | None:
        """The allocator's events as a tape, after `end`; None where they were not recorded or the device has none."""
        return None

    def segments(self) -> tuple[Segment, ...]:
        """The segments that the allocator got and gave back, placed among the events of `recording`; empty where it has none."""
        return ()

    def retries(self) -> int | None:
        """How often the allocator gave memory back and tried again since `begin`; None without that counter."""
        return None

    def doubts(self) -> tuple[str, ...]:
        """Why figures may not be trusted."""
        return tuple(self._doubts)

    def _doubt(self, text: str) -> None:
        self._doubts.setdefault(text)

    def _counter(self, name: str, value: int | None) -> int | None:
        """The value of a counter; None, and a doubt, where it is missing or negative."""
        if value is None or value < 0:
            self._doubt(f"the counter {name} was {'missing' if value is None else value}")
            return None
        return value

    @abstractmethod
    def out_of_memory(self, error: BaseException, phase: str) -> DeviceOutOfMemory | None:
        """What an exception says about memory that was not there, after `end`; None where it is about something else."""

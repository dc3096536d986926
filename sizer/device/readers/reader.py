"""The seam between a measurement and a device: what every device can be asked, and who answers for which.

Importing this imports no torch; `open_reader` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from sizer.device.readers.events import LiveTensors
from sizer.device.record.measurement import DeviceFacts, DeviceOutOfMemory, PhaseReading
from sizer.device.record.recording import Segment
from sizer.errors import DeviceError, quote

if TYPE_CHECKING:
    import torch
    from torch import nn

    from sizer.memory.tape import Tape


class Reader(Protocol):
    """One device and its counters, for one run: begin, watch, mark after every phase, end, then the results.

    `source` says where the bytes come from (PROFILED, COUNTED or SAMPLED of `sizer.device.record.measurement`).
    """

    source: str
    device: torch.device

    def facts(self) -> DeviceFacts:
        """The device as the driver describes it."""

    def synchronize(self) -> None:
        """Wait until the device is idle."""

    def begin(self, *, record: bool) -> None:
        """Start counting from an empty device; with `record` keep the allocator's events, too."""

    def watch(self, module: nn.Module) -> None:
        """Learn the names of the children of the module that is on the device now, and where to sample."""

    def mark(self, phase: str, live: LiveTensors | None = None) -> None:
        """Wait for the device, read its counters as those of the phase that ends here, and reset the peaks.

        `live` says for the recording what lives at which address.
        """

    def end(self) -> None:
        """Stop counting and recording. Never raises, and may be called on a device that was lost."""

    def phases(self) -> tuple[PhaseReading, ...]:
        """The readings (bytes) of every phase that was marked, after `end`."""

    def recording(self, batch: int) -> Tape | None:
        """The allocator's events as a tape, after `end`; None where they were not recorded or the device has none."""

    def segments(self) -> tuple[Segment, ...]:
        """The segments that the allocator got and gave back, placed among the events of `recording`; empty where it has none."""

    def retries(self) -> int | None:
        """How often the allocator gave memory back and tried again since `begin`; None without that counter."""

    def doubts(self) -> tuple[str, ...]:
        """Why figures may not be trusted."""

    def out_of_memory(self, error: BaseException, phase: str) -> DeviceOutOfMemory | None:
        """What an exception says about memory that was not there, after `end`; None where it is about something else."""


def open_reader(device: str) -> Reader:
    """The reader of the device that PyTorch calls so: "cpu", "cuda:0" (or "cuda"), "mps".

    Raises DeviceError with the devices that are there, or with what hinders PyTorch from using this one.
    """
    from sizer.device.machine.inventory import take_inventory

    facts = take_inventory().find(device)
    if facts.kind == "cpu":
        from sizer.device.readers.cpu import CpuReader

        return CpuReader(facts)
    if facts.kind == "cuda":
        from sizer.device.readers.cuda import CudaReader
        from sizer.device.readers.cuda_runtime import CudaRuntime

        return CudaReader(facts, CudaRuntime(facts.device))
    if facts.kind == "mps":
        from sizer.device.readers.mps import MpsReader, MpsRuntime

        return MpsReader(facts, MpsRuntime())
    raise DeviceError("nothing is measured on this kind of device yet", given=quote(device), allowed="cpu, cuda, mps")

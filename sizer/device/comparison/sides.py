"""Both sides of a comparison: what the estimate says of a piece of work, what a device showed, and which block is which."""

from __future__ import annotations

from dataclasses import dataclass

from sizer.catalogue.gpus import Backend, Gpu
from sizer.device.comparison.alignment import Alignment, Side
from sizer.device.comparison.family import Family
from sizer.device.record.measurement import Measurement
from sizer.report.estimate import Estimate
from sizer.tape.tape import Tape


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """What every part of a comparison looks at; recording and alignment are None where the device was not recorded."""

    estimate: Estimate
    tape: Tape
    gpu: Gpu
    measured: Measurement
    recording: Tape | None
    alignment: Alignment | None
    family: Family

    @property
    def kind(self) -> Backend:
        """The device's kind, by whose allocator's rules both sides are counted."""
        return self.gpu.backend

    @property
    def is_complete(self) -> bool:
        """Whether the device came to the end of the work."""
        return self.measured.out_of_memory is None and self.measured.failure is None

    @property
    def tapes(self) -> tuple[tuple[Side, Tape], ...]:
        """The tapes of both sides, the device's only where there is one."""
        if self.recording is None:
            return (("estimate", self.tape),)
        return ("estimate", self.tape), ("device", self.recording)


def bounds_of(tape: Tape, phase: str | None) -> tuple[int, int] | None:
    """(events done when a phase begins, when it ends), None where the tape has no such phase; with None those of the whole
    tape up to its last mark."""
    if phase is None:
        return 0, tape.marks[-1][0] if tape.marks else len(tape.order)
    begins = [0, *(end for end, _ in tape.marks)]
    return next(((begin, end) for begin, (end, name) in zip(begins, tape.marks, strict=False) if name == phase), None)

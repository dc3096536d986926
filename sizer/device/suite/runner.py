"""What runs the cases of the suite, each in a process of its own, and tells the time. No torch in this process."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from sizer.device.record.kernels import KernelRecord
from sizer.device.record.recording import Measured
from sizer.device.suite.cases import Case
from sizer.device.trial import launch
from sizer.processes.program import run_program


class Runner(Protocol):
    """What runs the cases and tells the time; tests put another one in its place."""

    def measure(self, case: Case, seconds: float) -> Measured:
        """The measurement of a case, from a process that is killed after so many seconds. Raises SizerError."""

    def kernels(self, case: Case, seconds: float) -> KernelRecord:
        """What the case's kernels hold inside, likewise."""

    def now(self) -> float:
        """Seconds on a clock that only goes forward."""

    def date(self) -> datetime:
        """The date and time in UTC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRunner:
    """Runs cases on a real device: in fresh processes, each of which has it alone."""

    device: str
    record: bool

    def measure(self, case: Case, seconds: float) -> Measured:
        """Through `sizer.device.trial.launch`; times the step as well, except on the CPU, where it would take longest of all."""
        timing = not self.device.startswith("cpu")
        return launch.measure(case.query, self.device, timing=timing, record=self.record, seconds=seconds)

    def kernels(self, case: Case, seconds: float) -> KernelRecord:
        """Through `sizer.device.suite.kernel_log`."""
        what = "the kernels could not be recorded"
        answer = run_program("sizer.device.suite.kernel_log", case.query, self.device, seconds=seconds, what=what)
        return KernelRecord.from_dict(answer)

    def now(self) -> float:
        """The process's own clock."""
        return time.monotonic()

    def date(self) -> datetime:
        """The computer's date."""
        return datetime.now(UTC)

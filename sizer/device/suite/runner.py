"""What runs the cases of the suite, each in a process of its own, and tells the time. No torch in this process."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sizer.device.record.kernels import KernelRecord
from sizer.device.record.recording import Measured
from sizer.device.suite.cases import Case
from sizer.device.trial import launch
from sizer.device.trial.launch_ranks import start_ranks
from sizer.processes.program import run_program


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """Runs cases on a real device: in fresh processes, each of which has it alone. Tests put another one in its place."""

    device: str
    record: bool

    def measure(self, case: Case, seconds: float) -> Measured:
        """The measurement of a case, from a process that is killed after so many seconds; of ranks that of the one that needs most.

        Raises SizerError. The step of one process is timed, too, except on the CPU, where that would take longest of all.
        """
        if case.ranks > 1:
            return self._measure_ranks(case, seconds)
        timing = not self.device.startswith("cpu")
        return launch.measure(case.query, self.device, timing=timing, record=self.record, seconds=seconds)

    def _measure_ranks(self, case: Case, seconds: float) -> Measured:
        job = start_ranks(case.query, self.device.partition(":")[0], record=self.record, seconds=seconds)
        try:
            ranks: Any = job.result()  # a tuple of Measured
            return max(ranks, key=lambda one: one.measurement.peak_allocated_bytes or 0)
        finally:
            job.cancel()  # only where the waiting was cut short

    def kernels(self, case: Case, seconds: float) -> KernelRecord:
        """What the case's kernels hold inside, likewise."""
        what = "the kernels could not be recorded"
        answer = run_program("sizer.device.suite.kernel_log", case.query, self.device, seconds=seconds, what=what)
        return KernelRecord.from_dict(answer)

    def now(self) -> float:
        """Seconds on a clock that only goes forward."""
        return time.monotonic()

    def date(self) -> datetime:
        """The date and time in UTC."""
        return datetime.now(UTC)

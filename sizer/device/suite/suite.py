"""The suite: every case is measured in a separate process and written to its own file, so that a run can stop and resume.

    python -m sizer suite --device cuda:0 [--record] [--minutes 9] [--only SUBSTRING] [--out FOLDER] [--again]

A case with an existing file is skipped. A case that fails is a result with its reason; `--again` runs it again. Needs torch,
torchvision and transformers; no torch in this process.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sizer.base.errors import DeviceError, JobError, RequestError, quote
from sizer.base.units import format_bytes, pluralize
from sizer.device.machine.inventory import Inventory, find_inventory
from sizer.device.record.measurement import DeviceFacts, KernelRecord, Measurement, TensorBytes
from sizer.device.record.recording import (
    Measured,
    are_kernels_recorded,
    delete_case,
    delete_kernels,
    is_measured,
    read_case,
    write_kernels,
    write_measured,
)
from sizer.device.suite.cases import Case, cases_for
from sizer.device.trial import launch
from sizer.device.trial.launch import start_ranks
from sizer.processes.process import run_program
from sizer.query.text import format_query, parse_query


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """Runs cases on a real device, in fresh processes that use it exclusively. Tests replace it."""

    device: str
    record: bool

    def measure(self, case: Case, seconds: float) -> Measured:
        """Return the measurement of a case, from a process that is killed after `seconds`; of several ranks the largest one.

        Raises SizerError. The step of a single process is timed too, except on the CPU, where that would take longest of all.
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
            job.cancel()  # only if the waiting was interrupted

    def kernels(self, case: Case, seconds: float) -> KernelRecord:
        """Return the memory inside the case's kernels, from a process that is killed after `seconds`."""
        what = "the kernels could not be recorded"
        answer = run_program("sizer.device.suite.kernel_log", case.query, self.device, seconds=seconds, what=what)
        return KernelRecord.from_dict(answer)

    def now(self) -> float:
        """Return the seconds of a monotonic clock."""
        return time.monotonic()

    def date(self) -> datetime:
        """Return the date and time in UTC."""
        return datetime.now(UTC)


# ---------------------------------------------------------------------------------------------------------------- suite


CASE_SECONDS = 300.0  # limit of one process
START_SECONDS = 30.0  # with less time left no process is started
MEASURED = Path("tests/measured")
NOTHING = "nothing was measured"  # the source of a measurement that failed before it began
_COUNTS_KERNELS = ("cuda", "xpu", "cpu")
Outcome = TypeVar("Outcome")
_PATH = re.compile(r"(?<![\w./])(?:[A-Za-z]:\\|/)(?:[\w.+~-]+[\\/])+(?=[\w.+-])")


def choose_cases(kind: str, only: str) -> tuple[Case, ...]:
    """Return the cases for a kind of device with `only` in their name. Raises RequestError if there is none."""
    cases = cases_for(kind)
    chosen = tuple(case for case in cases if only in case.name)
    if not chosen:
        raise RequestError(
            "no case of the suite has this in its name",
            given=quote(only),
            allowed=", ".join(case.name for case in cases[:3]) + ", ...",
            todo="`python -m sizer suite --list` shows all",
        )
    return chosen


def split_by_places(cases: Iterable[Case], places: int) -> tuple[tuple[Case, ...], tuple[Case, ...]]:
    """Return the cases for which this number of cores or GPUs suffices, and the others."""
    cases = tuple(cases)
    return tuple(case for case in cases if case.ranks <= places), tuple(case for case in cases if case.ranks > places)


def folder_for(inventory: Inventory, facts: DeviceFacts, today: datetime) -> Path:
    """Return the default folder for a device's files: tests/measured/<device>-<torch>-<date> in the current folder."""
    torch = ".".join(inventory.versions["torch"].split(".")[:2])
    return MEASURED / f"{short_name(facts)}-{torch}-{today:%Y-%m-%d}"


def short_name(facts: DeviceFacts) -> str:
    """Return a device's name as part of a file's name: "h200", "rtx-4090", "cpu"."""
    if facts.kind == "cpu":
        return "cpu"
    words = re.findall(r"[a-z0-9]+", facts.name.lower())
    left = [word for word in words if word not in ("nvidia", "geforce", "tesla", "amd", "intel", "apple", "gpu", "of")]
    return "-".join(left) or facts.kind


def run_suite(
    cases: Iterable[Case],
    facts: DeviceFacts,
    folder: Path,
    runner: Runner,
    *,
    record: bool,
    seconds: float,
    say: Callable[[str], None],
) -> tuple[str, ...]:
    """Measure every case that `folder` does not hold yet, then with `record` its kernels; return the remaining cases.

    Ends within `seconds`: a process that would take longer is not started, or is killed and its case remains. Raises
    DeviceError if the device is no longer available.
    """
    cases, end, left = tuple(cases), runner.now() + seconds, []
    folder.mkdir(parents=True, exist_ok=True)
    passes = [partial(_measure, facts=facts, folder=folder, runner=runner)]
    if record and facts.kind in _COUNTS_KERNELS:
        passes.append(partial(_record, facts=facts, folder=folder, runner=runner))
    for do in passes:
        for case in cases:
            room = end - runner.now()
            if (line := do(case, room=room)) is None:
                left.append(case.name)
            elif line:
                say(line)
    if record and facts.kind not in _COUNTS_KERNELS:
        say(f"{facts.device} has no peak counter: memory inside its kernels cannot be recorded")
    return tuple(dict.fromkeys(left))


def delete_failures(cases: Iterable[Case], folder: Path) -> None:
    """Delete the files of the cases that failed, so that they are measured again; out of memory is not a failure."""
    for case in cases:
        if is_measured(folder, case.name):
            record = read_case(folder, case.name)
            if record.measured.measurement.failure is not None:
                delete_case(folder, case.name)
            elif record.kernels is not None and record.kernels.failure is not None:
                delete_kernels(folder, case.name)


def find_device(name: str) -> tuple[Inventory, DeviceFacts]:
    """Return the machine and its device of this name. Raises DeviceError if it is missing or cannot be measured."""
    inventory = find_inventory()
    return inventory, inventory.find(name)


# ------------------------------------------------------------------------------------------------------------ one case


def _measure(case: Case, *, facts: DeviceFacts, folder: Path, runner: Runner, room: float) -> str | None:
    """Measure a case; return one line on the result or failure, "" if the file exists, None without enough time."""
    if is_measured(folder, case.name):
        return ""
    if room < START_SECONDS:
        return None
    start = runner.now()
    measured = _run(runner.measure, case, runner, room, lambda error: _failed(case, facts, runner.date(), error))
    if measured is None:
        return None
    failure = measured.measurement.failure
    if failure is not None:
        measured = replace(measured, measurement=replace(measured.measurement, failure=without_paths(failure)))
    write_measured(folder, case.name, measured)
    return f"{case.name:46} {_figures(measured.measurement)}  ({runner.now() - start:.0f} s)"


def _record(case: Case, *, facts: DeviceFacts, folder: Path, runner: Runner, room: float) -> str | None:
    """Record the kernels of a case, like `_measure`; ranks have the same kernels as one process, and are not recorded."""
    if case.ranks > 1 or are_kernels_recorded(folder, case.name) or not is_measured(folder, case.name):
        return ""
    if room < START_SECONDS:
        return None
    start = runner.now()

    def failed(error: Exception) -> KernelRecord:
        return KernelRecord(query=_complete(case), device=facts, versions={}, rows=(), failure=str(error))

    record = _run(runner.kernels, case, runner, room, failed)
    if record is None:
        return None
    if record.failure is not None:
        record = replace(record, failure=without_paths(record.failure))
    write_kernels(folder, case.name, record)
    kinds = pluralize(len(record.rows), "kind of calls", "kinds of calls")
    outcome = f"kernels: {kinds}" + (f", then {record.failure}" if record.failure else "")
    return f"{case.name:46} {outcome}  ({runner.now() - start:.0f} s)"


def _run(
    work: Callable[[Case, float], Outcome],
    case: Case,
    runner: Runner,
    room: float,
    failed: Callable[[Exception], Outcome],
) -> Outcome | None:
    """Return the result of a case, or `failed(error)` if it raises, so that the other cases still run.

    None if its process was killed at the end of this run's time, rather than at a case's own limit.
    """
    start = runner.now()
    try:
        return work(case, min(room, CASE_SECONDS))
    except DeviceError:
        raise
    except Exception as error:  # any kind of error
        cut_short = isinstance(error, JobError) and room < CASE_SECONDS and runner.now() - start >= room - 1
        return None if cut_short else failed(error)


def _failed(case: Case, facts: DeviceFacts, date: datetime, error: Exception) -> Measured:
    """Return the record of a case that could not be measured at all."""
    request = parse_query(case.query)
    measurement = Measurement(
        query=_complete(case),
        dtype=request.dtypes[0],
        batch=request.batches[0],
        device=facts,
        versions={},
        measured_at=date.isoformat(timespec="seconds"),
        source=NOTHING,
        phases=(),
        tensors=TensorBytes(),
        failure=f"{type(error).__name__}: {error}"[:1000],
    )
    return Measured(measurement=measurement)


def without_paths(text: str) -> str:
    """Return a message without the folders of its machine: files keep only their names."""
    return _PATH.sub("", text)


def _complete(case: Case) -> str:
    return format_query(parse_query(case.query), complete=True)


def _figures(measurement: Measurement) -> str:
    if measurement.failure is not None:
        return f"failed: {measurement.failure}"
    if measurement.out_of_memory is not None:
        return f"out of memory in {measurement.out_of_memory.phase}"
    figures = (
        ("peak allocated", measurement.peak_allocated_bytes),
        ("reserved", measurement.peak_reserved_bytes),
        ("process", measurement.process_bytes),
    )
    return ", ".join(f"{name} {format_bytes(value)}" for name, value in figures if value is not None)

"""The files of the suite, one set per case, written and read back: no torch here.

<case>.json               the Measurement
<case>.tape.json.gz       the allocator's events as a tape; its segments beside it where the device is CUDA
<case>.kernels.json.gz    what kernels held inside, a row per distinct call
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from sizer.base.codec import DecodeError
from sizer.device.record.measurement import KernelRecord, Measurement
from sizer.device.record.recording import (
    Measured,
    read_facts,
    segments_from_lists,
    segments_to_lists,
    tape_from_dict,
    write_packed,
    write_recording,
)

MEASUREMENT, TAPE, KERNELS = ".json", ".tape.json.gz", ".kernels.json.gz"
LIMIT_MEASUREMENT_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRecord:
    """All that was written of one case; what was not recorded is None."""

    name: str
    measured: Measured
    kernels: KernelRecord | None = None


def write_measured(folder: Path, name: str, measured: Measured) -> None:
    """Write a case's measurement, and its tape where it was recorded. A file is there as a whole or not at all.

    The measurement comes last: where it is there, the tape is too.
    """
    if measured.recording is not None:
        write_recording(folder / f"{name}{TAPE}", measured.recording, segments=segments_to_lists(measured.segments))
    text = json.dumps(measured.measurement.to_dict(), indent=1, allow_nan=False)
    part = folder / f"{name}{MEASUREMENT}.part"
    part.write_text(f"{text}\n", encoding="utf-8", newline="\n")
    os.replace(part, folder / f"{name}{MEASUREMENT}")


def write_kernels(folder: Path, name: str, record: KernelRecord) -> None:
    """Write what the kernels of a case held inside."""
    write_packed(folder / f"{name}{KERNELS}", record.to_dict())


def is_measured(folder: Path, name: str) -> bool:
    """Whether the case needs no measuring any more."""
    return (folder / f"{name}{MEASUREMENT}").exists()


def are_kernels_recorded(folder: Path, name: str) -> bool:
    """Whether the case needs no recording of its kernels any more."""
    return (folder / f"{name}{KERNELS}").exists()


def delete_case(folder: Path, name: str) -> None:
    """Delete all files of a case, the measurement last."""
    for suffix in (KERNELS, TAPE, MEASUREMENT):
        (folder / f"{name}{suffix}").unlink(missing_ok=True)


def delete_kernels(folder: Path, name: str) -> None:
    """Delete what was recorded of a case's kernels."""
    (folder / f"{name}{KERNELS}").unlink(missing_ok=True)


def read_measured(folder: Path) -> tuple[CaseRecord, ...]:
    """Every case in a folder, in the order of their names.

    Raises DecodeError, naming the file, where one is not what the suite writes, and where a tape or a record of kernels has
    no measurement beside it.
    """
    names = {path.name.removesuffix(MEASUREMENT) for path in folder.glob(f"*{MEASUREMENT}")}
    for suffix in (TAPE, KERNELS):
        for path in folder.glob(f"*{suffix}"):
            if path.name.removesuffix(suffix) not in names:
                raise DecodeError(f"{path.name} has no {path.name.removesuffix(suffix)}{MEASUREMENT} beside it")
    return tuple(read_case(folder, name) for name in sorted(names))


def read_case(folder: Path, name: str) -> CaseRecord:
    """One case of a folder. Raises DecodeError naming the file, OSError where there is no such case."""
    tape, segments, kernels = None, (), None
    if (path := folder / f"{name}{TAPE}").exists():
        facts = read_facts(path)
        tape = _named(path, tape_from_dict, facts.get("tape"))
        segments = _named(path, segments_from_lists, facts.get("segments", []))
    if are_kernels_recorded(folder, name):
        path = folder / f"{name}{KERNELS}"
        kernels = _named(path, KernelRecord.from_dict, read_facts(path))
    path = folder / f"{name}{MEASUREMENT}"
    measurement = _named(path, Measurement.from_dict, _read_json(path))
    measured = Measured(measurement=measurement, recording=tape, segments=segments)
    return CaseRecord(name=name, measured=measured, kernels=kernels)


def _read_json(path: Path) -> object:
    with path.open("rb") as file:
        data = file.read(LIMIT_MEASUREMENT_BYTES + 1)
    if len(data) > LIMIT_MEASUREMENT_BYTES:
        raise DecodeError(f"{path.name} has more than {LIMIT_MEASUREMENT_BYTES} bytes")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"{path.name} is not JSON: {error!s:.200}") from None


def _named(path: Path, read, data: object):
    """What `read` makes of the data of a file; its DecodeError then names the file."""
    try:
        return read(data)
    except DecodeError as error:
        raise DecodeError(f"{path.name}: {error}") from None

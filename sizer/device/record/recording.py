"""A measurement with the allocator's own events, as JSON and as the suite's files. No torch.

The suite writes these files for each case:

    <case>.json               the Measurement
    <case>.tape.json.gz       the allocator's events as a tape, with its segments if the device is CUDA
    <case>.kernels.json.gz    memory inside kernels, a row per distinct call
"""

from __future__ import annotations

import gzip
import json
import os
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sizer.base.codec import DecodeError, decode, encode
from sizer.device.record.measurement import KernelRecord, Measurement
from sizer.tape.affine import LIMIT_BYTES
from sizer.tape.tape import CATEGORIES, PHASES, Tape

LIMIT_EVENTS = 8_000_000
LIMIT_NAMES = 200_000
LIMIT_FILE_BYTES = 2**30  # limit of a recording's JSON, after decompression
_COLUMNS = ("sizes", "ops", "modules")
_TEXTS = ("op_names", "module_names", "stand_ins")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A segment that the CUDA allocator got from the driver or released, just before event `position` of the recording.

    `address` is relative to the lowest one seen. Of two free blocks of one size the allocator takes the lower, so an exact
    replay needs the addresses. `stream` is numbered in the order of first use: only 0 means that there was one stream.
    """

    position: int
    action: str  # "alloc" or "free"
    address: int
    bytes: int
    stream: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The result of one run on a device: its figures, and the allocator's events if recorded.

    The recording is a tape of the device's own allocations (bytes as requested) and releases in order, with the ends of phases
    as marks. Its ops are the profiler's names ("aten::addmm"), its modules dotted paths, "" if unknown. `segments` are the CUDA
    allocator's, in order; empty on other devices.
    """

    measurement: Measurement
    recording: Tape | None = None
    segments: tuple[Segment, ...] = ()

    def to_dict(self) -> dict:
        """Return dicts, lists and scalars: {"measurement": ..., "recording": ... or None, "segments": [[...], ...]}."""
        recording = None if self.recording is None else tape_to_dict(self.recording)
        segments = segments_to_lists(self.segments)
        return {"measurement": self.measurement.to_dict(), "recording": recording, "segments": segments}

    @classmethod
    def from_dict(cls, data: object) -> Measured:
        """Return the run from the result of `to_dict`. Raises DecodeError for any other `data`."""
        if not isinstance(data, dict) or set(data) - {*cls.__slots__} or "measurement" not in data:
            raise DecodeError("a measured run is an object with the keys measurement, recording and segments")
        recording = data.get("recording")
        return cls(
            measurement=Measurement.from_dict(data["measurement"]),
            recording=None if recording is None else tape_from_dict(recording),
            segments=segments_from_lists(data.get("segments", [])),
        )


def segments_to_lists(segments: tuple[Segment, ...]) -> list[list]:
    """Return each segment's fields in their order."""
    return [list(encode(segment).values()) for segment in segments]


def segments_from_lists(data: object) -> tuple[Segment, ...]:
    """Return the segments from the result of `segments_to_lists`. Raises DecodeError for any other `data`."""
    if type(data) is not list or not all(type(row) is list and len(row) == len(Segment.__slots__) for row in data):
        raise DecodeError(f"segments were no list of lists of {len(Segment.__slots__)} values")
    rows = [dict(zip(Segment.__slots__, row, strict=True)) for row in data]
    return decode(tuple[Segment, ...], rows, "segments")


def tape_to_dict(tape: Tape) -> dict:
    """Return the tape as dicts, lists and scalars, with a list per column.

    Its order is written as "events": 0 allocates the next block, n > 0 releases the block that was allocated n blocks ago (1 is
    the latest). In that form steps repeat themselves, which makes a file ten times smaller. Raises ValueError if the blocks of
    a tape are not numbered in the order of their allocation.
    """
    return {
        "batch": tape.batch,
        "events": list(_events(tape.order)),
        **{name: getattr(tape, name).tolist() for name in _COLUMNS},
        "categories": list(tape.categories),
        **{name: list(getattr(tape, name)) for name in _TEXTS},
        "marks": [list(mark) for mark in tape.marks],
    }


def tape_from_dict(data: Any) -> Tape:
    """Return the tape from the result of `tape_to_dict`. Raises DecodeError if `data` violates an invariant of Tape."""
    try:
        _check_columns(data)
        return Tape(
            batch=data["batch"],
            order=array("q", _order(data["events"])),
            sizes=array("q", data["sizes"]),
            categories=bytes(data["categories"]),
            ops=array("l", data["ops"]),
            modules=array("l", data["modules"]),
            marks=tuple((position, phase) for position, phase in data["marks"]),
            op_names=tuple(data["op_names"]),
            module_names=tuple(data["module_names"]),
            stand_ins=tuple(data["stand_ins"]),
        ).validate()
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DecodeError(f"recording is not a tape: {error!s:.300}") from None


def _events(order: Iterable[int]) -> Iterator[int]:
    count = 0
    for event in order:
        if event >= 0:
            if event != count:
                raise ValueError(
                    f"block {event} is allocated after {count} others; number blocks in order of allocation"
                )
            count += 1
            yield 0
        else:
            yield count + event + 1


def _order(events: Iterable[int]) -> Iterator[int]:
    count = 0
    for event in events:
        if not 0 <= event <= count:
            raise ValueError(f"an event releases the block {event} blocks ago; {count} were allocated by then")
        yield count if event == 0 else ~(count - event)
        count += event == 0


def write_recording(path: Path, tape: Tape, **facts: object) -> None:
    """Write a tape together with `facts` (plain values) as gzipped JSON; the same tape gives the same bytes."""
    write_packed(path, {**facts, "tape": tape_to_dict(tape)})


def write_packed(path: Path, data: dict) -> None:
    """Write plain values as gzipped JSON, whole or not at all; the same values give the same bytes."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
        packed.write(text.encode("ascii"))
    os.replace(part, path)


def read_facts(path: Path) -> dict:
    """Return all that `write_recording` wrote, the tape as the dict "tape". Raises DecodeError, OSError."""
    try:
        with gzip.open(path, "rb") as packed:
            text = packed.read(LIMIT_FILE_BYTES + 1)
        if len(text) > LIMIT_FILE_BYTES:
            raise DecodeError(f"{path.name} holds more than {LIMIT_FILE_BYTES} bytes of JSON")
        data = json.loads(text)
    except (gzip.BadGzipFile, EOFError, ValueError, RecursionError) as error:
        raise DecodeError(f"{path.name} is not gzipped JSON: {error!s:.200}") from None
    if not isinstance(data, dict):
        raise DecodeError(f"{path.name} holds {type(data).__name__}; allowed is an object")
    return data


def _check_columns(data: dict) -> None:
    if type(data["batch"]) is not int or not 0 < data["batch"] < 2**31:
        raise ValueError(f"batch was {data['batch']!r:.80}; allowed are positive integers")
    for name in (*_COLUMNS, "events", "categories"):
        column = data[name]
        if type(column) is not list or len(column) > LIMIT_EVENTS or not all(type(item) is int for item in column):
            raise ValueError(f"{name} is not a list of at most {LIMIT_EVENTS} integers")
    if sum(data["sizes"]) >= LIMIT_BYTES:
        raise ValueError(f"its blocks take {LIMIT_BYTES} bytes or more")
    for name in _TEXTS:
        texts = data[name]
        if type(texts) is not list or len(texts) > LIMIT_NAMES or not all(_is_text(text) for text in texts):
            raise ValueError(f"{name} is not a list of short texts")
    if len(data["marks"]) > len(PHASES) or not all(type(position) is int for position, _ in data["marks"]):
        raise ValueError("marks are not a list of [position, phase]")
    if not all(0 <= category < len(CATEGORIES) for category in data["categories"]):
        raise ValueError(f"categories go from 0 to {len(CATEGORIES) - 1}")


def _is_text(value: object) -> bool:
    return type(value) is str and len(value) <= 1000 and value.isprintable()


# --------------------------------------------------------------------------------------------------------------- files


MEASUREMENT, TAPE, KERNELS = ".json", ".tape.json.gz", ".kernels.json.gz"
LIMIT_MEASUREMENT_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRecord:
    """The files of one case; parts that were not recorded are None."""

    name: str
    measured: Measured
    kernels: KernelRecord | None = None


def write_measured(folder: Path, name: str, measured: Measured) -> None:
    """Write a case's measurement, and its tape if recorded.

    Files are written atomically. The measurement comes last: if it exists, so does the tape.
    """
    if measured.recording is not None:
        write_recording(folder / f"{name}{TAPE}", measured.recording, segments=segments_to_lists(measured.segments))
    text = json.dumps(measured.measurement.to_dict(), indent=1, allow_nan=False)
    part = folder / f"{name}{MEASUREMENT}.part"
    part.write_text(f"{text}\n", encoding="utf-8", newline="\n")
    os.replace(part, folder / f"{name}{MEASUREMENT}")


def write_kernels(folder: Path, name: str, record: KernelRecord) -> None:
    """Write the memory inside the kernels of a case."""
    write_packed(folder / f"{name}{KERNELS}", record.to_dict())


def is_measured(folder: Path, name: str) -> bool:
    """Return whether the case has been measured."""
    return (folder / f"{name}{MEASUREMENT}").exists()


def are_kernels_recorded(folder: Path, name: str) -> bool:
    """Return whether the case's kernels have been recorded."""
    return (folder / f"{name}{KERNELS}").exists()


def delete_case(folder: Path, name: str) -> None:
    """Delete all files of a case, the measurement last."""
    for suffix in (KERNELS, TAPE, MEASUREMENT):
        (folder / f"{name}{suffix}").unlink(missing_ok=True)


def delete_kernels(folder: Path, name: str) -> None:
    """Delete the record of a case's kernels."""
    (folder / f"{name}{KERNELS}").unlink(missing_ok=True)


def read_measured(folder: Path) -> tuple[CaseRecord, ...]:
    """Return every case in a folder, in the order of their names.

    Raises DecodeError, naming the file, if the suite does not write such a file, or if a tape or a record of kernels has no
    measurement.
    """
    names = {path.name.removesuffix(MEASUREMENT) for path in folder.glob(f"*{MEASUREMENT}")}
    for suffix in (TAPE, KERNELS):
        for path in folder.glob(f"*{suffix}"):
            if path.name.removesuffix(suffix) not in names:
                raise DecodeError(f"{path.name} has no {path.name.removesuffix(suffix)}{MEASUREMENT} beside it")
    return tuple(read_case(folder, name) for name in sorted(names))


def read_case(folder: Path, name: str) -> CaseRecord:
    """Return one case of a folder. Raises DecodeError naming the file, OSError if there is no such case."""
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
    """Return the result of `read` for the data of a file; its DecodeError then names the file."""
    try:
        return read(data)
    except DecodeError as error:
        raise DecodeError(f"{path.name}: {error}") from None

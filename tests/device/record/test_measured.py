"""Recorded traces of real devices: the allocator's replay gives their allocated and reserved figures exactly.

There may be no GPU's recording yet, so that the same check is held against a scripted device as well, in the same files; and
against recordings that were tampered with, which it must refuse.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from sizer.base.codec import DecodeError
from sizer.device.readers.cuda_reader import CudaReader
from sizer.device.record.measurement import DeviceFacts, KernelRecord, KernelRow
from sizer.device.record.recording import (
    CaseRecord,
    Measured,
    is_measured,
    read_measured,
    write_kernels,
    write_measured,
)
from sizer.tape.tape import Tape
from tests.device.replayed import disagreements
from tests.device.suite import slow_device
from tests.device.suite.slow_device import scattered
from tests.tape.tapes import make_tape, random_tape

MEASURED = Path(__file__).parents[2] / "measured"
FOLDERS = sorted({file.parent for file in MEASURED.glob("*/*.json")})
MIB = 2**20


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_replays_give_what_the_device_read(folder: Path):
    recorded = [case for case in read_measured(folder) if case.measured.recording is not None]
    assert recorded
    assert [text for case in recorded for text in disagreements(case)] == []


def test_there_is_something_measured():
    assert FOLDERS  # else the test above would have nothing to hold


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_measurements_name_no_folder_of_their_machine(folder: Path):
    for path in folder.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert not any(word in text for word in ("/home/", "/root/", "/tmp/", "/usr/", "/work/", "\\\\Users"))


# ------------------------------------------------------------------------------------------------- a scripted CUDA device


def recorded(tmp_path: Path, measured: Measured) -> CaseRecord:
    """The measured run after it went through the suite's files."""
    write_measured(tmp_path, "case", measured)
    (case,) = read_measured(tmp_path)
    assert case.measured == measured
    return case


@pytest.mark.parametrize("seed", range(8))
def test_a_scripted_device_is_reproduced(tmp_path, seed):
    case = recorded(tmp_path, slow_device.run(random_tape(seed), scattered(seed)))
    assert len(case.measured.measurement.phases) == 3
    assert disagreements(case) == []


def test_segments_that_went_back_are_reproduced(tmp_path):
    # 60 + 2 MiB reserved, the 60 freed; 62 + 80 > 100, so the 60 go back: 82 MiB reserved. Then 10 more fit.
    work = [("a", 60 * MIB), ("s", 512), "-a", ("b", 80 * MIB), ("c", 10 * MIB)]
    tape = make_tape(work, marks=[(2, "load"), (5, "forward")])
    case = recorded(tmp_path, slow_device.run(tape, [3, 1, 2, 4], capacity=100 * MIB))
    assert [segment.action for segment in case.measured.segments] == ["alloc", "alloc", "free", "alloc", "alloc"]
    assert case.measured.measurement.phases[1].reserved_bytes == 92 * MIB
    assert disagreements(case) == []
    other = replace(case.measured.segments[2], bytes=40 * MIB)
    segments = (*case.measured.segments[:2], other, *case.measured.segments[3:])
    (text,) = disagreements(replace(case, measured=replace(case.measured, segments=segments)))
    assert text == f"case: event 3: {60 * MIB} bytes given back where the device gave back {40 * MIB}"


def test_addresses_decide_between_free_blocks_of_one_size():
    # x and y share the segment A of 40 MiB, b has B of 20. y and b are freed: two free blocks of 20 MiB; c takes the lower.
    # x is freed and d asks for 40 MiB: with c in B, A is free as a whole; with c in the place of y a third segment is needed.
    work = ["-z", ("x", 20 * MIB), ("y", 20 * MIB), ("b", 20 * MIB), "-y", "-b", ("c", 20 * MIB), "-x", ("d", 40 * MIB)]
    tape = make_tape([("z", 40 * MIB), *work])
    reserved = {}
    for name, places in (("A first", [1, 2, 3]), ("B first", [2, 1, 3])):
        case = CaseRecord(name="case", measured=slow_device.run(tape, places))
        reserved[name] = case.measured.measurement.phases[0].reserved_bytes
        assert disagreements(case) == []
    assert reserved == {"A first": 100 * MIB, "B first": 60 * MIB}


@pytest.mark.parametrize("seed", range(3))
def test_a_device_that_was_read_and_recorded_through_the_reader_is_reproduced(tmp_path, seed):
    tape, device = random_tape(seed), slow_device.SlowCuda(scattered(seed))
    reader = CudaReader(
        DeviceFacts(device="cuda:0", name="Scripted", total_bytes=80 * 2**30, capability=(8, 0)), device
    )
    reader.begin(record=True)
    begin = 0
    for end, phase in tape.marks:
        device.play(tape, begin, end)
        reader.mark(phase)
        begin = end
    reader.end()
    run = slow_device.run(tape, scattered(seed)).measurement
    measurement = replace(run, phases=reader.phases(), device=reader.facts(), retries=reader.retries())
    case = recorded(
        tmp_path, Measured(measurement=measurement, recording=reader.recording(tape.batch), segments=reader.segments())
    )
    assert [replace(reading, driver_bytes=None) for reading in reader.phases()] == list(run.phases)
    assert disagreements(case) == []


def test_by_hand(tmp_path):
    # load: 3 MiB from a segment of 20 MiB; 17 MiB are left. forward: 512 B from one of 2 MiB, 12 MiB from the 17 left.
    # Freed, the 12 stay reserved: 3 MiB + 512 allocated, 15 MiB + 512 at the peak, 22 MiB reserved.
    tape = make_tape([("w", 3 * MIB), ("a", 100), ("b", 12 * MIB), "-b"], marks=[(1, "load"), (4, "forward")])
    case = recorded(tmp_path, slow_device.run(tape, scattered(0)))
    load, forward = case.measured.measurement.phases
    assert (load.allocated_bytes, load.reserved_bytes) == (3 * MIB, 20 * MIB)
    assert (forward.allocated_bytes, forward.peak_allocated_bytes) == (3 * MIB + 512, 15 * MIB + 512)
    assert forward.reserved_bytes == 22 * MIB
    assert disagreements(case) == []


# ------------------------------------------------------------------------------------------------------ falsified recordings


def larger(tape: Tape) -> Tape:
    """The largest block that is alive at the end, 4 MiB larger: more than the rest of any block that is not split."""
    released = {~event for event in tape.order if event < 0}
    block = max((i for i in range(len(tape.sizes)) if i not in released), key=tape.sizes.__getitem__)
    sizes = array("q", tape.sizes)
    sizes[block] += 4 * MIB
    return replace(tape, sizes=sizes)


def never_released(tape: Tape) -> Tape:
    """The release of the largest released block left out."""
    block = max((~event for event in tape.order if event < 0), key=tape.sizes.__getitem__)
    position = tape.order.index(~block)
    order = array("q", [event for event in tape.order if event != ~block])
    return replace(tape, order=order, marks=tuple((end - (end > position), phase) for end, phase in tape.marks))


def later_phase(tape: Tape) -> Tape:
    """The first phase ends four events later."""
    (end, phase), *rest = tape.marks
    return replace(tape, marks=((end + 4, phase), *rest))


@pytest.mark.parametrize("with_segments", [True, False], ids=["segments", "tape"])
@pytest.mark.parametrize("falsify", [larger, never_released, later_phase])
def test_a_falsified_tape_fails(falsify, with_segments):
    measured = slow_device.run(random_tape(3), scattered(3))
    tape = falsify(measured.recording).validate()
    segments = measured.segments if with_segments else ()
    assert disagreements(CaseRecord(name="case", measured=replace(measured, recording=tape, segments=segments)))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
@pytest.mark.parametrize("falsify", [larger, never_released])
def test_a_real_recording_that_is_falsified_fails(falsify, folder):
    case = next(case for case in read_measured(folder) if case.measured.recording is not None)
    tape = falsify(case.measured.recording).validate()
    assert disagreements(replace(case, measured=replace(case.measured, recording=tape)))


@pytest.mark.parametrize("name", ["allocated_bytes", "peak_allocated_bytes", "reserved_bytes"])
def test_a_falsified_reading_fails(name):
    measured = slow_device.run(random_tape(3), scattered(3))
    first, *rest = measured.measurement.phases
    wrong = replace(first, **{name: getattr(first, name) + 512})
    measured = replace(measured, measurement=replace(measured.measurement, phases=(wrong, *rest)))
    (text,) = disagreements(CaseRecord(name="case", measured=measured))
    right = getattr(first, name)
    assert text == f"case: load: {name} is {right} in the replay and was {right + 512} on the device"


def test_a_segment_at_another_time_fails():
    measured = slow_device.run(random_tape(3), scattered(3))
    first, second, *rest = measured.segments
    moved = replace(second, position=second.position + 1)
    (text,) = disagreements(CaseRecord(name="case", measured=replace(measured, segments=(first, moved, *rest))))
    assert text == (
        f"case: event {second.position}: a segment of {second.bytes} bytes where the device got its next of {second.bytes} "
        f"at event {second.position + 1}"
    )


def test_a_segment_too_many_fails():
    measured = slow_device.run(random_tape(3), scattered(3))
    more = replace(measured.segments[-1], position=len(measured.recording.order) - 1, bytes=2 * MIB)
    (text,) = disagreements(CaseRecord(name="case", measured=replace(measured, segments=(*measured.segments, more))))
    assert text == f"case: event {more.position}: the device got {2 * MIB} bytes more"


def test_several_streams_are_not_passed_over():
    measured = slow_device.run(random_tape(3), scattered(3))
    segments = tuple(replace(segment, stream=index % 2) for index, segment in enumerate(measured.segments))
    with pytest.raises(ValueError, match="the recording has several streams; the replay knows one"):
        disagreements(CaseRecord(name="case", measured=replace(measured, segments=segments)))


def test_without_a_recording_nothing_is_proven():
    measured = replace(slow_device.run(random_tape(3), scattered(3)), recording=None)
    assert disagreements(CaseRecord(name="case", measured=measured)) == ["case: there is no recording"]


# --------------------------------------------------------------------------------------------------------------- the files


def test_kernels_go_through_their_file(tmp_path):
    measured = slow_device.run(make_tape([("w", 512)], marks=[(1, "load")]), scattered(0))
    row = KernelRow(
        op="aten.addmm.default",
        arguments=("float32[8,4]", "None"),
        calls=2,
        kept_bytes=512,
        most_kept_bytes=1024,
        inner_bytes=0,
    )
    record = KernelRecord(query="q", device=measured.measurement.device, versions={"torch": "2.11.0"}, rows=(row,))
    write_measured(tmp_path, "case", measured)
    write_kernels(tmp_path, "case", record)
    (case,) = read_measured(tmp_path)
    assert (case.name, case.measured, case.kernels) == ("case", measured, record)


def test_the_same_case_gives_the_same_files(tmp_path):
    measured = slow_device.run(random_tape(1), scattered(1))
    contents = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_measured(tmp_path / name, "case", measured)
        contents.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert contents[0] == contents[1]
    assert set(contents[0]) == {"case.json", "case.tape.json.gz"}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("case.json", "{", "case.json is not JSON"),
        ("case.json", "[]", "case.json: measurement was list of 0; allowed is an object"),
        ("case.json", json.dumps({"schema": 1}), "case.json: measurement was 'nothing'; allowed is the keys"),
        ("other.tape.json.gz", "x", "other.tape.json.gz has no other.json beside it"),
        ("case.tape.json.gz", "x", "case.tape.json.gz is not gzipped JSON"),
        ("case.kernels.json.gz", "x", "case.kernels.json.gz is not gzipped JSON"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, content, words):
    write_measured(tmp_path, "case", slow_device.run(random_tape(1), scattered(1)))
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(DecodeError, match=words):
        read_measured(tmp_path)


def test_a_measurement_cut_short_is_no_measurement(tmp_path):
    (tmp_path / "case.json.part").write_text("{", encoding="utf-8")
    assert not is_measured(tmp_path, "case")
    assert read_measured(tmp_path) == ()

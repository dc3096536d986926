"""Tapes of several streams: pools of their own, blocks that wait, and what refuses them."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from sizer.allocator.allocator import replay_events
from sizer.allocator.snapshot import make_snapshot
from sizer.catalogue.gpus import GPUS
from sizer.report.bounds import STREAMS
from sizer.report.fit import fit
from sizer.report.replays import Replays, find_unbounded
from sizer.tape.affine import NotAffineError, fit_affine
from sizer.tape.archive import Traced, pack, unpack
from sizer.tape.family import TapeFamily
from sizer.tape.loops import NotRepeatedError, find_repetition
from sizer.tape.tape import EMPTY_CACHE, Loop, Tape, by_stream, streams_behind
from tests.tape.tapes import make_tape

MIB = 2**20
EVENTS = [("a", 30 * MIB), "-a", ("b", 30 * MIB), "-b", ("c", 30 * MIB), "-c"]
GPU = GPUS["a100-80gb"]


def tape_of(streams: bytes, **others: object) -> Tape:
    return replace(make_tape(EVENTS), streams=streams, **others).validate()


@pytest.mark.parametrize("expandable", [False, True])
def test_what_one_stream_has_released_another_does_not_get(expandable: bool) -> None:
    # 30 MiB in a segment of their own, or in two pages of 20 MiB; the second stream gets its own, the third block the first's again
    size = 40 * MIB if expandable else 30 * MIB
    one, two = (
        replay_events(tape_of(streams), "cuda", None, expandable).reserved.tolist() for streams in (b"", b"\0\1\0")
    )
    assert one == [size] * 6
    assert two == [size, size, 2 * size, 2 * size, 2 * size, 2 * size]


@pytest.mark.parametrize("expandable", [False, True])
def test_all_streams_give_back_what_is_cached(expandable: bool) -> None:
    replayed = replay_events(tape_of(b"\0\1\2"), "cuda", 50 * MIB, expandable)
    size = 40 * MIB if expandable else 30 * MIB
    assert (replayed.reserved.tolist(), replayed.retries, replayed.failed_at) == ([size] * 6, 2, None)


def test_the_cpu_and_mps_know_no_streams() -> None:
    for backend in ("cpu", "mps"):
        several, one = (replay_events(tape_of(streams), backend).reserved for streams in (b"\0\1\0", b""))
        assert several.tolist() == one.tolist()


def test_runs_of_events_that_concern_one_stream() -> None:
    assert list(by_stream(tape_of(b"\0\1\1"), 0, 6)) == [(0, 2, 0), (2, 6, 1)]
    assert list(by_stream(tape_of(b"\0\1\1"), 3, 5)) == [(3, 5, 1)]
    assert list(by_stream(tape_of(b""), 1, 6)) == [(1, 6, 0)]


def test_blocks_that_wait_are_free_at_once_or_late() -> None:
    tape = tape_of(b"", awaited=frozenset({0}))
    assert list(streams_behind(tape).order) == [0, 1, ~1, 2, ~2, ~0]
    (found,) = (margin for margin in fit(tape, GPU).margins if margin.name == STREAMS)
    assert (found.less_bytes, found.more_bytes) == (0, 30 * MIB)
    assert streams_behind(tape_of(b"")).order == tape.order


def test_blocks_wait_at_most_until_the_host_has_waited() -> None:
    # block 0 is released by the event at 2, and free once the host has waited, before the event at 4 or at that of its release
    tape = tape_of(b"", awaited=frozenset({0}))
    events = list(tape.order)
    released = events.index(~0)
    for position in range(released + 1, len(events)):
        behind = list(streams_behind(replace(tape, settled=((position, 0),))).order)
        others = [event for event in events if event != ~0]
        assert behind == [*others[: position - 1], ~0, *others[position - 1 :]]
    assert streams_behind(replace(tape, settled=((released, 0),))).order == tape.order, "waited for beforehand"


def test_giving_cached_memory_back_waits_for_them() -> None:
    events = [("a", 30 * MIB), "-a", ("empty", 0), "-empty", ("b", 30 * MIB), "-b"]
    tape = replace(make_tape(events), awaited=frozenset({0}))
    tape = replace(tape, op_names=("aten.a", EMPTY_CACHE, "aten.b"))
    assert list(streams_behind(tape).order) == [0, ~0, 1, ~1, 2, ~2]


def test_tapes_that_differ_in_streams_alone_are_not_one() -> None:
    replays = Replays()
    tapes = tape_of(b""), tape_of(b"\0\1\0"), tape_of(b"", awaited=frozenset({0}))
    found = [find_unbounded(tape, "cuda", replays=replays) for tape in tapes]
    assert len({(one.timeline.peak_reserved_bytes, one.behind_bytes) for one in found}) == 3
    settled = find_unbounded(replace(tapes[2], settled=((2, 0),)), "cuda", replays=replays)
    assert settled.behind_bytes < found[2].behind_bytes


def test_a_line_is_of_the_same_streams() -> None:
    first, second = tape_of(b"\0\1\0"), replace(tape_of(b"\0\1\0"), batch=2)
    assert fit_affine(first, second).evaluate(3).streams == b"\0\1\0"
    with pytest.raises(NotAffineError, match=r"^event 4 is an allocation by aten.c in m.c \(block 2\) at batch 1"):
        fit_affine(first, replace(second, streams=b"\0\1\1"))
    awaited = {"awaited": frozenset({1}), "settled": ((4, 1),)}
    with pytest.raises(NotAffineError, match=r"is waits .* at batch 1 and waits"):
        fit_affine(replace(first, **awaited), replace(second, **awaited | {"settled": ((5, 1),)}))


def test_streams_come_back_from_an_archive() -> None:
    traced = Traced(
        family=TapeFamily(exact=(tape_of(b"\0\1\0", awaited=frozenset({1, 2}), settled=((3, 1),)), tape_of(b"")))
    )
    assert unpack(pack(traced)) == traced


def test_loops_are_of_one_stream() -> None:
    loops = (Loop(begin=2, end=4, count=3),)
    with pytest.raises(ValueError, match=r"^the tape has several streams and loops"):
        tape_of(b"\0\1\0", loops=loops)


def test_a_step_of_other_streams_is_another_step() -> None:
    # steps of one block each, which the next one releases
    tape = make_tape([("a", 512), ("b", 512), "-a", ("c", 512), "-b", ("d", 512), "-c"])
    tape = replace(tape, ops=array("l", [0] * 4), modules=array("l", [0] * 4))
    loop = Loop(begin=5, end=7, count=1)
    for streams in (b"", b"\0\0\1\1"):
        assert find_repetition(replace(tape, streams=streams), loop).blocks.tolist() == [3]
    with pytest.raises(NotRepeatedError, match=r"^the step at event 5 does not repeat the step before it$"):
        find_repetition(replace(tape, streams=b"\0\0\0\1"), loop)


@pytest.mark.parametrize("expandable", [False, True])
def test_a_snapshot_names_the_streams(expandable: bool) -> None:
    events = [("a", 30 * MIB), ("b", 30 * MIB), ("c", 30 * MIB)]
    tape = replace(make_tape(events), streams=b"\0\1\1")
    snapshot = make_snapshot(tape, GPU, expandable_segments=expandable)
    allocated = [event["stream"] for event in snapshot["device_traces"][0] if event["action"] == "alloc"]
    assert allocated == [0, 1, 1]
    reserved = {}
    for segment in snapshot["segments"]:
        reserved[segment["stream"]] = reserved.get(segment["stream"], 0) + segment["total_size"]
    assert reserved == ({0: 40 * MIB, 1: 60 * MIB} if expandable else {0: 30 * MIB, 1: 60 * MIB})


def test_columns_are_of_one_length() -> None:
    with pytest.raises(ValueError, match=r"^tape column streams has 2 rows and sizes has 3"):
        tape_of(b"\0\1")

"""The memory snapshot: what it says is alive and reserved is what the replay says, and its events lead there."""

from __future__ import annotations

import itertools
import pickle
import pickletools
from dataclasses import replace

import pytest

from sizer.allocator.addresses import find_addresses
from sizer.allocator.allocator import replay, replay_events
from sizer.allocator.snapshot import make_snapshot, write_snapshot
from sizer.allocator.timeline import read_timeline
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.gpus import Gpu
from sizer.tape.tape import Tape
from tests.tape.tapes import make_tape, random_tape

GPU = find_gpu("a100-80gb")
MIB = 2**20
# What MemoryViz.js reads (torch/utils/viz/MemoryViz.js in PyTorch 2.15), by the names of pickletools.
VIEWER_READS = {
    *("APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPUT", "BINUNICODE", "DICT", "EMPTY_DICT"),
    *("EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LIST", "LONG1", "LONG_BINGET", "LONG_BINPUT", "MARK", "MEMOIZE", "NEWFALSE"),
    *("NEWTRUE", "NONE", "PROTO", "SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}  # fmt: skip


def tight(tape: Tape, expandable: bool) -> Gpu:
    """A device on which the work just runs, most likely after cached memory was given back."""
    roomy = replay(tape, backend="cuda", expandable_segments=expandable)
    for capacity in range(roomy.peak_allocated_bytes, roomy.peak_reserved_bytes, 2 * MIB):
        if replay_events(tape, "cuda", capacity, expandable).failed_at is None:
            return replace(GPU, total_bytes=capacity + GPU.context_bytes)
    return GPU


def blocks_of(snapshot: dict, state: str) -> list[dict]:
    return [block for segment in snapshot["segments"] for block in segment["blocks"] if block["state"] == state]


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("device", ["roomy", "tight"])
@pytest.mark.parametrize("empties", [False, True])
def test_it_is_the_replay_at_its_peak(seed, expandable, device, empties):
    tape = random_tape(seed, empties=empties)
    gpu = GPU if device == "roomy" else tight(tape, expandable)
    capacity = None if device == "roomy" or gpu is GPU else gpu.total_bytes - gpu.context_bytes
    expected = read_timeline(tape, replay_events(tape, "cuda", capacity, expandable))
    snapshot = make_snapshot(tape, gpu, expandable_segments=expandable)
    alive = blocks_of(snapshot, "active_allocated")
    assert sum(block["size"] for block in alive) == expected.peak_allocated_bytes
    assert sum(segment["total_size"] for segment in snapshot["segments"]) == expected.reserved_at_peak_bytes
    assert sum(segment["allocated_size"] for segment in snapshot["segments"]) == expected.peak_allocated_bytes
    assert all(
        segment["requested_size"]
        == sum(block["requested_size"] for block in segment["blocks"] if block["state"] == "active_allocated")
        for segment in snapshot["segments"]
    )


def test_retries_are_among_them():
    tapes = [(random_tape(seed), expandable) for seed in range(6) for expandable in (False, True)]
    given_back = [
        find_addresses(tape, tight(tape, expandable), expandable_segments=expandable).given_back
        for tape, expandable in tapes
    ]
    assert sum(map(bool, given_back[::2])) >= 2
    assert sum(map(bool, given_back[1::2])) >= 2


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_segments_are_filled_without_gap_or_overlap(seed, expandable):
    tape = random_tape(seed)
    snapshot = make_snapshot(tape, tight(tape, expandable), expandable_segments=expandable)
    for segment in snapshot["segments"]:
        address = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == address
            address += block["size"]
        assert address == segment["address"] + segment["total_size"]
    ranges = sorted((segment["address"], segment["total_size"]) for segment in snapshot["segments"])
    assert all(begin + size <= following for (begin, size), (following, _) in itertools.pairwise(ranges))


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_its_events_lead_to_its_segments_and_blocks(seed, expandable):
    tape = random_tape(seed)
    snapshot = make_snapshot(tape, tight(tape, expandable), expandable_segments=expandable)
    alive: dict[int, int] = {}
    held: dict[int, int] = {}
    for event in snapshot["device_traces"][0]:
        match event["action"]:
            case "alloc":
                assert event["addr"] not in alive
                alive[event["addr"]] = event["size"]
            case "free_completed":
                assert alive.pop(event["addr"]) == event["size"]
            case "segment_alloc" | "segment_map":
                held[event["addr"]] = event["size"]
            case "segment_free" | "segment_unmap":
                assert held.pop(event["addr"]) == event["size"]
            case action:
                assert action == "free_requested"
    assert alive == {block["address"]: block["requested_size"] for block in blocks_of(snapshot, "active_allocated")}
    assert sum(held.values()) == sum(segment["total_size"] for segment in snapshot["segments"])
    assert [event["time_us"] for event in snapshot["device_traces"][0]] == [*range(len(snapshot["device_traces"][0]))]


def test_frames_name_the_operator_and_its_modules():
    tape = make_tape([("a", 3 * MIB), ("b", 512, "gradient")])
    blocks = blocks_of(make_snapshot(tape, GPU), "active_allocated")
    names = [[frame["name"] for frame in block["frames"]] for block in blocks]
    assert names == [["aten.a (activation)", "m.a", "m", "the model"], ["aten.b (gradient)", "m.b", "m", "the model"]]


def test_the_pickle_holds_what_the_viewer_reads():
    tape = random_tape(1)
    data = write_snapshot(tape, GPU)
    assert {opcode.name for opcode, _, _ in pickletools.genops(data)} <= VIEWER_READS
    assert pickle.loads(data) == make_snapshot(tape, GPU)


@pytest.mark.parametrize("key", ["m2-ultra-64gb", "cpu"])
def test_other_allocators_have_none(key):
    with pytest.raises(ValueError, match=r"PyTorch has memory snapshots only for CUDA's allocator"):
        make_snapshot(make_tape([("a", 512)]), find_gpu(key))

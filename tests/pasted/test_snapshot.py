"""A memory snapshot as a curve: those that Sizer itself writes have the levels of the replay."""

from __future__ import annotations

import pickle

import pytest

from sizer.allocator.allocator import replay_events
from sizer.allocator.snapshot import write_snapshot
from sizer.allocator.timeline import read_timeline
from sizer.base.errors import ConfigError
from sizer.catalogue.gpu_keys import find_gpu
from sizer.pasted.pickle_reader import read_plain
from sizer.pasted.snapshot import MOST_POINTS, read_snapshot
from tests.tape.tapes import random_tape

GPU = find_gpu("a100-80gb")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("expandable", [False, True])
def test_a_snapshot_of_ours_has_the_peak_of_the_replay(seed, expandable):
    tape = random_tape(seed)
    expected = read_timeline(tape, replay_events(tape, "cuda", None, expandable))
    found = read_snapshot(read_plain(write_snapshot(tape, GPU, expandable_segments=expandable)))
    assert found.peak_reserved_bytes >= expected.reserved_at_peak_bytes == found.reserved_bytes[-1]
    rests = expected.peak_allocated_bytes - found.peak_allocated_bytes  # of large blocks that were not split
    assert 0 <= rests <= 0.05 * expected.peak_allocated_bytes
    assert min(found.allocated_bytes) == 0, "it begins with nothing"
    assert len(found.positions) == len(found.allocated_bytes) == len(found.reserved_bytes)


def block(size: int, name: str = "train.py", state: str = "active_allocated") -> dict:
    frames = [{"filename": "??", "line": 0, "name": "c10"}, {"filename": f"/home/me/{name}", "line": 7, "name": "step"}]
    return {"address": 0, "size": size, "requested_size": size, "state": state, "frames": frames}


def event(action: str, size: int) -> dict:
    return {"action": action, "addr": 0, "size": size, "stream": 0, "frames": []}


def test_levels_by_hand():
    # 2 MiB are reserved; 1,024 bytes are allocated, then 512 that are freed; the trace begins late: 4,096 bytes were there
    actions = (("alloc", 1024), ("alloc", 500), ("free_requested", 500), ("free_completed", 500), ("oom", 9))
    trace = [event(action, size) for action, size in actions]
    segment = {"device": 0, "total_size": 2**21, "blocks": [block(4096), block(1024, "model.py"), block(2**20, state="inactive")]}
    found = read_snapshot({"device_traces": [[], trace], "segments": [segment | {"device": 1}, segment]})
    assert found.device == 1
    assert found.allocated_bytes == (4096, 5120, 5632, 5632, 5120, 5120)
    assert found.peak_allocated_bytes == 5632 and found.peak_reserved_bytes == 2**21
    assert found.largest == ((4096, "train.py:7 step"), (1024, "model.py:7 step"))
    assert (found.events, found.out_of_memory) == (5, 1)


def test_a_long_curve_keeps_its_peak():
    trace = [event("alloc", 512), event("free_completed", 512)] * MOST_POINTS
    trace += [event("alloc", 2**20), event("free_completed", 2**20)]
    found = read_snapshot({"device_traces": [trace], "segments": []})
    assert len(found.positions) <= MOST_POINTS + 2
    assert max(found.allocated_bytes) == found.peak_allocated_bytes == 2**20


OTHERS = (
    *(None, {}, [], {"device_traces": []}, {"device_traces": [[{}]], "segments": []}),
    {"segments": [1], "device_traces": [[]]},
)


@pytest.mark.parametrize("value", OTHERS)
def test_another_pickle_is_refused(value):
    with pytest.raises(ConfigError, match="this pickle is not a memory snapshot"):
        read_snapshot(read_plain(pickle.dumps(value)))

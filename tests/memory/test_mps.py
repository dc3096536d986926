"""The replay of the MPS heap allocator, against sums done by hand from its source."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from sizer.memory.allocator import replay, replay_events
from sizer.memory.mps import MpsHeaps, buffer_size, heap_size
from sizer.memory.tape import EMPTY_CACHE
from tests.memory.tapes import make_tape, random_tape

MIB = 2**20


@pytest.mark.parametrize(
    ("size", "heap"),
    [
        (256, 8 * MIB),
        (MIB, 8 * MIB),
        (MIB + 256, 32 * MIB),
        (10 * MIB, 1024 * MIB),
        (512 * MIB - 256, 1024 * MIB),
        (512 * MIB, 512 * MIB),
        (513 * MIB, 514 * MIB),
    ],
)
def test_heaps(size, heap):
    assert heap_size(size) == heap


@pytest.mark.parametrize(
    ("size", "buffer"),
    [
        (1, 256),
        (MIB, MIB),
        # above 1 MiB: steps of 2**20 / 32 = 32 KiB
        (MIB + 1, MIB + 32 * 2**10),
        # 5 MiB lies in [4, 8): steps of 4 MiB / 32 = 128 KiB
        (5 * MIB + 1, 5 * MIB + 128 * 2**10),
        # 10 MiB - 1 would round to 10 MiB, which is a heap of another kind: aligned to 256 only
        (10 * MIB - 300, 10 * MIB - 256),
        # 100 MiB lies in [64, 128): steps of 2 MiB
        (99 * MIB, 100 * MIB),
    ],
)
def test_buffers(size, buffer):
    assert buffer_size(size) == buffer


def test_a_freed_buffer_is_used_again_whole():
    # 5 MiB freed, 3 MiB asked: 5 <= 3 + 32, so the 5 MiB buffer counts whole; one heap of 32 MiB
    tape = make_tape([("a", 5 * MIB), "-a", ("b", 3 * MIB)])
    placement = replay_events(tape, "mps")
    assert placement.taken.tolist() == [5 * MIB, 5 * MIB]
    assert placement.reserved.tolist() == [32 * MIB] * 3


def test_a_much_larger_freed_buffer_is_cut_up_instead():
    # 1.5 GiB freed in a heap of its own; 40 MiB asked: 1536 > 40 + 32 and no heap has room, so the buffer goes back to its
    # heap and the 40 MiB come from there: still 1.5 GiB reserved
    tape = make_tape([("a", 1536 * MIB), "-a", ("b", 40 * MIB)])
    placement = replay_events(tape, "mps")
    assert placement.taken.tolist() == [1536 * MIB, 40 * MIB]
    assert placement.reserved[-1] == 1536 * MIB


def test_a_slightly_smaller_freed_buffer_makes_room():
    # 600 MiB freed, 640 asked: nothing is large enough, 600 >= 640 * 7/8 = 560: its heap of 600 MiB goes back first
    tape = make_tape([("a", 600 * MIB), "-a", ("b", 640 * MIB)])
    assert replay_events(tape, "mps").reserved.tolist() == [608 * MIB, 608 * MIB, 640 * MIB]


def test_the_tightest_heap_with_room_is_chosen():
    heaps = MpsHeaps()
    for size in (9, 9, 9):  # one heap of 32 MiB, 5 left of it
        heaps.allocate(size * MIB)
    heaps.allocate(8 * MIB)  # a second heap, 24 left
    heaps.allocate(4 * MIB)  # fits the 5 left
    assert heaps.reserved == 64 * MIB
    heaps.allocate(23 * MIB // 3)  # and these three the 24 left
    heaps.allocate(23 * MIB // 3)
    heaps.allocate(23 * MIB // 3)
    assert heaps.reserved == 64 * MIB


def test_at_the_limit_cached_buffers_go_back():
    # heaps of 600 and 700 MiB; the 600 is freed; 1300 + 640 > 1400, so it goes back: 700 + 640
    tape = make_tape([("a", 600 * MIB), ("b", 704 * MIB), "-a", ("c", 640 * MIB)])
    timeline = replay(tape, backend="mps", capacity_bytes=1400 * MIB)
    assert timeline.out_of_memory is None
    assert timeline.phases[-1].reserved_bytes == (704 + 640) * MIB


def test_beyond_the_limit_is_out_of_memory():
    tape = make_tape([("a", 600 * MIB), ("b", 704 * MIB), ("c", 640 * MIB)])
    failed = replay(tape, backend="mps", capacity_bytes=1400 * MIB).out_of_memory
    assert (failed.op, failed.requested_bytes, failed.allocated_bytes) == ("aten.c", 640 * MIB, (608 + 704) * MIB)


@pytest.mark.parametrize("seed", range(6))
def test_live_buffers_never_overlap_and_stay_in_their_heap(seed):
    tape, heaps, live = random_tape(seed), MpsHeaps(), {}
    for event in tape.order:
        if event < 0:
            if ~event in live:
                heaps.release(*live.pop(~event))
        elif size := tape.sizes[event]:
            live[event] = heaps.allocate(size)
            ranges = sorted((address, address + taken) for address, taken in live.values())
            assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
            assert sum(taken for _, taken in live.values()) <= heaps.reserved


def test_an_emptied_cache_gives_heaps_without_a_buffer_back():
    tape = make_tape([("a", 600 * MIB), ("b", 2 * MIB), "-a", ("empty", 0), "-empty", "-b"])
    tape = replace(tape, op_names=tuple(EMPTY_CACHE if name == "aten.empty" else name for name in tape.op_names))
    # a heap of its own for a, one of 32 MiB for b
    assert [row // MIB for row in replay_events(tape, "mps").reserved] == [608, 640, 640, 32, 32, 32]

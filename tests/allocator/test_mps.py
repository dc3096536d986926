"""The replay of the MPS heap allocator, against sums done by hand from its source."""

from __future__ import annotations

from array import array
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from sizer.allocator.allocator import OnePool, replay, replay_events
from sizer.allocator.heaps import MpsHeaps
from sizer.allocator.loop_replay import place
from sizer.allocator.mps import buffer_sizes, heap_size
from sizer.tape.tape import EMPTY_CACHE, Tape
from tests.allocator.heap_allocator import SlowHeaps
from tests.tape.tapes import make_tape, random_tape

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
        # 70 GiB lies in [64, 128): steps of 2 GiB
        (70 * 2**30 + 1, 72 * 2**30),
    ],
)
def test_buffers(size, buffer):
    assert buffer_sizes([size, 0]).tolist() == [buffer, 0]


def test_a_freed_buffer_is_used_again_whole():
    # 5 MiB freed, 3 MiB asked: 5 <= 3 + 32, so the 5 MiB buffer counts whole; one heap of 32 MiB
    tape = make_tape([("a", 5 * MIB), "-a", ("b", 3 * MIB)])
    placement = replay_events(tape, "mps")
    assert placement.block_bytes.tolist() == [5 * MIB, 5 * MIB]
    assert placement.reserved.tolist() == [32 * MIB] * 3


def test_a_much_larger_freed_buffer_is_cut_up_instead():
    # 1.5 GiB freed in a heap of its own; 40 MiB asked: 1536 > 40 + 32 and no heap has room, so the buffer goes back to its
    # heap and the 40 MiB come from there: still 1.5 GiB reserved
    tape = make_tape([("a", 1536 * MIB), "-a", ("b", 40 * MIB)])
    placement = replay_events(tape, "mps")
    assert placement.block_bytes.tolist() == [1536 * MIB, 40 * MIB]
    assert placement.reserved[-1] == 1536 * MIB


def test_a_slightly_smaller_freed_buffer_makes_room():
    # 600 MiB freed, 640 asked: nothing is large enough, 600 >= 640 * 7/8 = 560: its heap of 600 MiB goes back first
    tape = make_tape([("a", 600 * MIB), "-a", ("b", 640 * MIB)])
    assert replay_events(tape, "mps").reserved.tolist() == [608 * MIB, 608 * MIB, 640 * MIB]


def test_the_tightest_heap_with_room_is_chosen():
    sizes = [9, 9, 9]  # one heap of 32 MiB, 5 left of it
    sizes += [8]  # a second heap, 24 left
    sizes += [4]  # fits the 5 left
    sizes += [23 / 3] * 3  # and these three the 24 left
    tape = make_tape([(str(number), int(size * MIB)) for number, size in enumerate(sizes)])
    assert [row // MIB for row in replay_events(tape, "mps").reserved] == [32] * 3 + [64] * 5


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
    tape, live = random_tape(seed), {}
    placed = replay_events(tape, "mps")
    for event, reserved in zip(tape.order, placed.reserved.tolist(), strict=True):
        if event < 0:
            live.pop(~event, None)
        elif tape.sizes[event]:
            live[event] = placed.addresses[event], placed.block_bytes[event]
            ranges = sorted((address, address + taken) for address, taken in live.values())
            assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
            assert sum(taken for _, taken in live.values()) <= reserved


def larger(tape: Tape, times: int) -> Tape:
    return replace(tape, sizes=array("q", [times * size for size in tape.sizes]))


@pytest.mark.parametrize("times", [1, 16])  # heaps of 1 GiB and of their own
@pytest.mark.parametrize("seed", range(8))
def test_it_does_what_plain_lists_do(seed, times):
    tape = larger(random_tape(seed, events=600, empties=seed % 2 == 0), times)
    most = int(replay_events(tape, "mps").reserved.max())
    for capacity in (None, most, int(0.95 * most), int(0.8 * most), int(0.6 * most)):
        found, expected = replay_events(tape, "mps", capacity), place(tape, OnePool(SlowHeaps(capacity)))
        assert (found.failed_at, found.retries) == (expected.failed_at, expected.retries)
        assert np.array_equal(found.reserved, expected.reserved)
        assert np.array_equal(found.block_bytes, expected.block_bytes)
        asked = expected.block_bytes > 0
        assert np.array_equal(found.addresses[asked], expected.addresses[asked])


def test_at_the_limit_the_other_pool_goes_back_last():
    # a is freed, its heap of 8 MiB is of small buffers; 8 + 608 > 612, and nothing large is cached: all goes back
    tape = make_tape([("a", MIB // 2), "-a", ("b", 608 * MIB), ("c", MIB)])
    placed = replay_events(tape, "mps", 612 * MIB)
    assert [row // MIB for row in placed.reserved] == [8, 8, 608, 616]
    assert (placed.retries, placed.failed_at) == (1, None)
    tight = replay_events(tape, "mps", 608 * MIB)  # c's heap may be beyond the limit, but c may not
    assert ([row // MIB for row in tight.reserved], tight.retries, tight.failed_at) == ([8, 8, 608, 608], 2, 3)


def test_one_request_may_change_what_is_reserved_three_times():
    # freed: 8 MiB of small buffers, heaps of 608 and 32 MiB; 1,024 MiB are asked for where 1,040 are allowed
    sizes = buffer_sizes([MIB // 2, 608 * MIB, 5 * MIB, 1024 * MIB])
    heaps, addresses = MpsHeaps(1040 * MIB), np.zeros(4, np.int64)
    assert heaps.run(np.array([0, 1, 2, ~0, ~1, ~2]), sizes, addresses)
    assert heaps.run(np.array([3]), sizes, addresses)
    # the large ones are released for it, then the small ones go, too
    assert [(at, held // MIB) for at, held in heaps.grown] == [(0, 648), (0, 8), (0, 0), (0, 1024)]
    assert (heaps.retries, heaps.given_back) == (1, [0])


def test_an_emptied_cache_gives_heaps_without_a_buffer_back():
    tape = make_tape([("a", 600 * MIB), ("b", 2 * MIB), "-a", ("empty", 0), "-empty", "-b"])
    tape = replace(tape, op_names=tuple(EMPTY_CACHE if name == "aten.empty" else name for name in tape.op_names))
    # a heap of its own for a, one of 32 MiB for b
    assert [row // MIB for row in replay_events(tape, "mps").reserved] == [608, 640, 640, 32, 32, 32]

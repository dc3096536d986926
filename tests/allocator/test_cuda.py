"""The fast replay of the CUDA caching allocator against sums done by hand and a slow second reading of its rules."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest

from sizer.allocator.allocator import replay, replay_events
from sizer.allocator.cuda import segment_size
from sizer.tape.tape import EMPTY_CACHE, PRIVATE, Tape
from tests.allocator.caching_allocator import SlowCache
from tests.tape.tapes import make_tape, random_tape

MIB = 2**20


@pytest.mark.parametrize(("size", "rounded"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)])
def test_sizes_are_rounded_to_512(size, rounded):
    assert replay_events(make_tape([("a", size)]), "cuda").block_bytes.tolist() == [rounded]


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_segments(size, segment):
    assert segment_size(size) == segment


def test_small_blocks_share_one_segment():
    # 1 byte -> 512, 600 -> 1024: 1536 allocated of one 2 MiB segment
    timeline = replay(make_tape([("a", 1), ("b", 600)]), backend="cuda")
    assert (timeline.peak_allocated_bytes, timeline.peak_reserved_bytes) == (1536, 2 * MIB)
    assert timeline.peak_requested_bytes == 601


def test_empty_tensors_take_nothing():
    timeline = replay(make_tape([("a", 0), "-a", ("b", 0)]), backend="cuda")
    assert (timeline.peak_allocated_bytes, timeline.peak_reserved_bytes) == (0, 0)
    assert (timeline.peak_op, timeline.peak_phase) == ("", "forward")


def test_an_unsplit_large_block_counts_whole():
    # 11 MiB - 512 asks for a segment of 12 MiB; the rest of 1 MiB + 512 is > 1 MiB: split, 11 MiB - 512 taken.
    # 11 MiB exactly leaves 1 MiB, which is not > 1 MiB: not split, 12 MiB taken.
    assert replay_events(make_tape([("a", 11 * MIB - 512)]), "cuda").block_bytes.tolist() == [11 * MIB - 512]
    assert replay_events(make_tape([("a", 11 * MIB)]), "cuda").block_bytes.tolist() == [12 * MIB]


def test_best_fit_takes_the_smallest_block_then_the_oldest():
    # Segments of 40, 12 and 12 MiB, all freed; 12 MiB fits both equals, the first is taken, then the second.
    # The last is split off the 40.
    made = [("a", 40 * MIB), ("b", 12 * MIB), ("c", 12 * MIB), "-a", "-b", "-c"]
    again = [("d", 12 * MIB), ("e", 12 * MIB), ("f", 12 * MIB)]
    placed = replay_events(make_tape(made + again), "cuda")
    a, b, c, *later = placed.addresses
    assert later == [b, c, a]
    assert placed.reserved[-1] == 64 * MIB


def test_up_to_2_11_the_lowest_address_is_taken():
    # Of two segments of up to 20 MiB the second is above the first, of larger ones below it.
    for size, first in ((20 * MIB, 0), (22 * MIB, 1)):
        made = [("a", size), ("b", size), "-a", "-b", ("c", size)]
        placed = replay_events(replace(make_tape(made), by_address=True), "cuda")
        assert placed.addresses[2] == min(placed.addresses[:2]) == placed.addresses[first]
        placed = replay_events(make_tape(made), "cuda")
        assert placed.addresses[2] == placed.addresses[0]


def test_freed_neighbours_merge_within_a_segment_only():
    # a 4 MiB, b 4 MiB, c 4 MiB in one 20 MiB segment (8 MiB left); all freed they are 20 MiB again: d needs no new one.
    tape = make_tape([("a", 4 * MIB), ("b", 4 * MIB), ("c", 4 * MIB), "-a", "-c", "-b", ("d", 20 * MIB)])
    assert replay(tape, backend="cuda").peak_reserved_bytes == 20 * MIB
    # Two freed segments of 10 MiB do not make one of 20.
    tape = make_tape([("a", 10 * MIB), ("b", 10 * MIB), "-a", "-b", ("c", 20 * MIB)])
    assert replay(tape, backend="cuda").peak_reserved_bytes == 40 * MIB


def test_reserved_never_shrinks_without_pressure():
    tape = make_tape([("a", 100 * MIB), "-a", ("b", 512)])
    assert replay_events(tape, "cuda").reserved.tolist() == [100 * MIB, 100 * MIB, 102 * MIB]


def test_at_capacity_free_segments_go_back_and_the_request_is_tried_again():
    # 60 + 2 (small) reserved, the 60 freed; 62 + 80 > 100, so the 60 goes back and the 2 in use stay: 82 <= 100.
    tape = make_tape([("a", 60 * MIB), ("s", 512), "-a", ("b", 80 * MIB)])
    timeline = replay(tape, backend="cuda", capacity_bytes=100 * MIB)
    assert timeline.out_of_memory is None
    assert (timeline.retries, timeline.peak_reserved_bytes) == (1, 82 * MIB)


def test_a_partly_used_segment_does_not_go_back():
    # a and b share a 20 MiB segment; b keeps it: 20 + 90 > 100.
    tape = make_tape([("a", 8 * MIB), ("b", 8 * MIB), "-a", ("c", 90 * MIB)], marks=[(1, "load"), (4, "forward")])
    failed = replay(tape, backend="cuda", capacity_bytes=100 * MIB).out_of_memory
    assert (failed.op, failed.module, failed.phase) == ("aten.c", "m.c", "forward")
    assert (failed.requested_bytes, failed.allocated_bytes, failed.reserved_bytes) == (90 * MIB, 8 * MIB, 20 * MIB)


def test_expandable_segments_grow_in_place():
    # a 30 MiB maps 40 (2 pages of 20), b 30 grows it to 60; freed they are one block of 60 MiB, which c takes.
    # Two default segments of 30 MiB never merge: c needs another 60.
    tape = make_tape([("a", 30 * MIB), ("b", 30 * MIB), "-a", "-b", ("c", 60 * MIB)])
    assert replay_events(tape, "cuda", None, True).reserved.tolist() == [
        40 * MIB,
        60 * MIB,
        60 * MIB,
        60 * MIB,
        60 * MIB,
    ]
    assert replay(tape, backend="cuda").peak_reserved_bytes == 120 * MIB


def test_expandable_segments_are_for_cuda():
    with pytest.raises(ValueError, match="only 'cuda' has it"):
        replay(make_tape([("a", 1)]), backend="mps", expandable_segments=True)


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="backend was 'xpu'; allowed are 'cuda', 'mps' and 'cpu'"):
        replay(make_tape([("a", 1)]), backend="xpu")


@pytest.mark.parametrize("kind", ["by_age", "by_address", "expandable"])
@pytest.mark.parametrize("share", [None, 1.0, 0.9, 0.7], ids=["unbounded", "exact", "tight", "too-tight"])
@pytest.mark.parametrize("empties", [False, True], ids=["kept", "emptied"])
@pytest.mark.parametrize("seed", range(12))
def test_agrees_with_the_slow_reading(seed, empties, share, kind):
    expandable, by_address = kind == "expandable", kind == "by_address"
    tape = replace(random_tape(seed, empties=empties), by_address=by_address)
    roomy = replay_events(tape, "cuda", None, expandable)
    capacity = None if share is None else int(share * max(roomy.reserved.tolist()))
    placement = replay_events(tape, "cuda", capacity, expandable)
    taken, reserved, retries, failed_at = _slowly(
        tape, SlowCache(capacity, expandable=expandable, by_address=by_address)
    )
    assert (placement.failed_at, placement.retries) == (failed_at, retries)
    assert placement.reserved.tolist() == reserved
    assert placement.block_bytes.tolist() == taken


def test_the_random_tapes_reach_what_they_are_for():
    # Of the 12 seeds at 0.7 of the memory some must run out and at 0.9 some must get through by giving memory back.
    placements = {share: [] for share in (0.9, 0.7)}
    for seed in range(12):
        peak = max(replay_events(random_tape(seed), "cuda").reserved.tolist())
        for share, rows in placements.items():
            rows.append(replay_events(random_tape(seed), "cuda", int(share * peak)))
    assert any(row.failed_at is not None for row in placements[0.7])
    assert any(row.failed_at is None and row.retries for row in placements[0.9])


def test_an_emptied_cache_keeps_the_segments_that_hold_a_block():
    # a and c share a segment of 20 MiB, b has one of 14 MiB; without b that one goes, that of c stays
    events = [("a", 8 * MIB), ("b", 14 * MIB), ("c", 2 * MIB), "-a", "-b", ("empty", 0), "-empty", ("d", 12 * MIB)]
    tape = emptied(make_tape(events))
    assert [row // MIB for row in replay_events(tape, "cuda").reserved] == [20, 34, 34, 34, 34, 20, 20, 32]
    # one range: a at 0, b behind it, c in the second page of 20 MiB, which stays
    assert [row // MIB for row in replay_events(tape, "cuda", None, True).reserved] == [20, 40, 40, 40, 40, 20, 20, 20]
    assert {row // MIB for row in replay_events(make_tape(events), "cuda").reserved[1:]} == {34}


@pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable"])
def test_an_emptied_cache_keeps_the_pool_of_cuda_graphs(expandable: bool):
    tape = emptied(make_tape([("a", 20 * MIB), "-a", ("empty", 0), "-empty", ("b", 20 * MIB)]))

    def reserved(streams: bytes) -> list[int]:
        placed = replay_events(replace(tape, streams=streams), "cuda", None, expandable)
        return [row // MIB for row in placed.reserved]

    assert reserved(bytes([1, 0, 0])) == [20, 20, 0, 0, 20]
    assert reserved(bytes([PRIVATE, 0, 0])) == [20, 20, 20, 20, 40]
    assert reserved(bytes([PRIVATE, 0, PRIVATE])) == [20, 20, 20, 20, 20]


def emptied(tape: Tape) -> Tape:
    """The tape whose block "empty" is a call of `torch.cuda.empty_cache()`."""
    return replace(
        tape, op_names=tuple(EMPTY_CACHE if name == "aten.empty" else name for name in tape.op_names)
    ).validate()


@pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable"])
@pytest.mark.parametrize("seed", range(6))
def test_live_blocks_never_overlap(seed, expandable):
    tape = random_tape(seed)
    placed = replay_events(tape, "cuda", None, expandable)
    live: dict[int, tuple[int, int]] = {}
    for event, reserved in zip(tape.order, placed.reserved, strict=True):
        if event < 0:
            live.pop(~event, None)
        elif taken := placed.block_bytes[event]:
            live[event] = placed.addresses[event], taken
            pools = {True: [], False: []}
            for address, size in live.values():
                pools[size <= MIB].append((address, address + size))
            for ranges in pools.values():  # the two expandable ranges have addresses of their own
                ranges.sort()
                assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
            assert sum(size for _, size in live.values()) <= reserved


def _slowly(tape: Tape, cache: SlowCache):
    taken, live, reserved = [0] * len(tape.sizes), {}, []
    for position, event in enumerate(tape.order):
        if event < 0:
            if ~event in live:
                cache.free(live.pop(~event))
        elif tape.sizes[event]:
            block = cache.malloc(tape.sizes[event])
            if block is None:
                return taken, [*reserved, cache.reserved], cache.retries, position
            live[event], taken[event] = block, block.size
        elif event in tape.empties():
            cache.release_cached()
        reserved.append(cache.reserved)
    return taken, reserved, cache.retries, None


WITHOUT_NUMBA = """
import sys
from itertools import product
sys.modules["numba"] = None
from sizer.allocator import numba_functions
from sizer.allocator.allocator import replay_events
from tests.tape.tapes import random_tape

assert not numba_functions.COMPILED
for (backend, expandable), seed in product((("cuda", False), ("cuda", True), ("mps", False)), range(3)):
    roomy = replay_events(random_tape(seed), backend, None, expandable)
    tight = replay_events(random_tape(seed), backend, int(roomy.reserved.max() * 0.8), expandable)
    for found in (roomy, tight):
        print(found.block_bytes.tolist(), found.addresses.tolist(), found.reserved.tolist(), found.retries, found.failed_at)
"""


def test_without_numba_replays_are_the_same():
    found = []
    for program in (WITHOUT_NUMBA, re.sub("sys.modules.*|assert.*", "", WITHOUT_NUMBA)):
        asked = [sys.executable, "-c", program]
        found.append(subprocess.run(asked, capture_output=True, text=True, check=True, timeout=120).stdout)
    assert found[0] == found[1] != ""

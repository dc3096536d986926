"""Ranges of the CUDA allocator's expandable segments, by the rules of sizer.allocator.cuda.

Compiled, as the pools of segments of the default kind are (sizer.allocator.best_fit).

A range has addresses from 0 up: mapped blocks, in use or free, gaps of unmapped pages, and from its top on nothing mapped. It is
two arrays of int64, [rows, room], and numbers that say how many of their columns are used, and where its top is:

* `free`, as a pool of sizer.allocator.best_fit: its free blocks by (bytes, address), and by address;
* `gaps`, the addresses and bytes of the gaps below the top, by address; no two touch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sizer.allocator.best_fit import ENDLESS, ROOM, delete_by_address, insert, merge
from sizer.allocator.cuda import LARGE_SEGMENT, SMALL_SEGMENT, SMALL_SIZE, PrivatePools, round_up
from sizer.allocator.numba_functions import compiled
from sizer.allocator.sorted_rows import by_size, delete_at, delete_by_size, find, insert_at, insert_by_size

_RESERVED, _LIMIT, _HELD, _GROWN = range(4)  # places in the state: bytes mapped, allowed, last recorded, rows of `grown`
_FREE, _GAPS, _TOP, _PAGE = range(4)  # places in the numbers of a range


@compiled("int64(int64[::1], int64[:, ::1], int64)")
def _gap_at(numbers: np.ndarray, gaps: np.ndarray, address: int) -> int:
    """Return the bytes of the gap that begins at an address, ENDLESS at the top; 0 if none begins there."""
    if address == numbers[_TOP]:
        return ENDLESS
    at = find(gaps[0], numbers[_GAPS], address)
    return gaps[1, at] if at < numbers[_GAPS] and gaps[0, at] == address else 0


@compiled("int64(int64[::1], int64[:, ::1], int64)")
def _free_at(numbers: np.ndarray, free: np.ndarray, address: int) -> int:
    """Return the bytes of the free block that begins at an address; 0 if none does."""
    at = find(free[2], numbers[_FREE], address)
    return free[3, at] if at < numbers[_FREE] and free[2, at] == address else 0


@compiled("int64(int64[::1], int64[:, ::1], int64)")
def _start_before(numbers: np.ndarray, free: np.ndarray, address: int) -> int:
    """Return the address where the free block begins that ends at `address`, or `address` itself if there is none."""
    at = find(free[2], numbers[_FREE], address) - 1
    return free[2, at] if at >= 0 and free[2, at] + free[3, at] == address else address


@compiled("int64(int64[::1], int64[:, ::1], int64[:, ::1], int64)")
def _best_fit(numbers: np.ndarray, free: np.ndarray, gaps: np.ndarray, size: int) -> int:
    """Return the index, by size, of a free block for `size` bytes (get_free_block); -1 if there is none.

    A block before unmapped pages counts as large as it can grow.
    """
    chosen, able = -1, 0
    for at in range(by_size(free, numbers[_FREE], size, 0), numbers[_FREE]):
        have, gap = free[0, at], _gap_at(numbers, gaps, free[1, at] + free[0, at])
        grown = ENDLESS if gap == ENDLESS else have + gap
        if chosen >= 0 and grown >= able:
            break
        chosen, able = at, grown
        if able == have:
            break
    return chosen


@compiled("int64(int64[::1], int64[:, ::1], int64[:, ::1], int64)")
def _lowest_room(numbers: np.ndarray, free: np.ndarray, gaps: np.ndarray, size: int) -> int:
    """Return the lowest address from which `size` bytes are free or unmapped (find_expandable_block).

    It is the first gap, or the free block before it.
    """
    for at in range(numbers[_GAPS]):
        start = _start_before(numbers, free, gaps[0, at])
        end = start
        while end - start < size and end != numbers[_TOP]:
            length = _free_at(numbers, free, end)
            if not length:
                length = _gap_at(numbers, gaps, end)
            if not length:
                break
            end += length
        if end == numbers[_TOP] or end - start >= size:
            return start
    return _start_before(numbers, free, numbers[_TOP])


@compiled("boolean(int64[::1], int64[:, ::1], int64[:, ::1], int64[::1], int64, int64)")
def _map(
    numbers: np.ndarray, free: np.ndarray, gaps: np.ndarray, state: np.ndarray, start: int, wanted: int
) -> bool:  # fmt: skip
    """Map the pages that hold `wanted` bytes of the gap at `start`, or all of it (map_block).

    Return False, and map nothing, if there is no room.
    """
    page = numbers[_PAGE]
    size = (min(wanted, _gap_at(numbers, gaps, start)) + page - 1) // page * page
    if size > state[_LIMIT] - state[_RESERVED]:
        return False
    if start == numbers[_TOP]:
        numbers[_TOP] += size
    else:
        at = find(gaps[0], numbers[_GAPS], start)
        gaps[0, at] += size
        gaps[1, at] -= size
        if gaps[1, at] == 0:
            delete_at(gaps[0], numbers[_GAPS], at)
            delete_at(gaps[1], numbers[_GAPS], at)
            numbers[_GAPS] -= 1
    state[_RESERVED] += size
    numbers[_FREE] = merge(free, numbers[_FREE], start, size)
    return True


@compiled("int64(int64[::1], int64[:, ::1], int64[:, ::1], int64[::1], int64)")
def _expand(numbers: np.ndarray, free: np.ndarray, gaps: np.ndarray, state: np.ndarray, size: int) -> int:
    """Return the index, by size, of a free block of at least `size` bytes; -1 if the limit forbids it.

    Maps pages at the lowest address with enough room (try_allocate_expandable_block).
    """
    start = _lowest_room(numbers, free, gaps, size)
    have = _free_at(numbers, free, start)
    while have < size:
        if not _map(numbers, free, gaps, state, start + have, size - have):
            return -1
        have = _free_at(numbers, free, start)
    return by_size(free, numbers[_FREE], have, start)


@compiled("void(int64[::1], int64[:, ::1], int64, int64)")
def _add_gap(numbers: np.ndarray, gaps: np.ndarray, start: int, size: int) -> None:
    """Add unmapped pages, merged with adjacent gaps; a gap that touches the top becomes part of it."""
    count = numbers[_GAPS]
    at = find(gaps[0], count, start)
    if at < count and gaps[0, at] == start + size:
        size += gaps[1, at]
        delete_at(gaps[0], count, at)
        delete_at(gaps[1], count, at)
        count -= 1
    if at > 0 and gaps[0, at - 1] + gaps[1, at - 1] == start:
        at -= 1
        start, size = gaps[0, at], gaps[1, at] + size
        delete_at(gaps[0], count, at)
        delete_at(gaps[1], count, at)
        count -= 1
    if start + size == numbers[_TOP]:
        numbers[_TOP] = start
    else:
        insert_at(gaps[0], count, at, start)
        insert_at(gaps[1], count, at, size)
        count += 1
    numbers[_GAPS] = count


@compiled("void(int64[::1], int64[:, ::1], int64[:, ::1], int64[::1])")
def _unmap_free(numbers: np.ndarray, free: np.ndarray, gaps: np.ndarray, state: np.ndarray) -> None:
    """Unmap every page that is free as a whole (unmap_block)."""
    page, at = numbers[_PAGE], 0
    while at < numbers[_FREE]:
        address, size = free[2, at], free[3, at]
        begin, end = (address + page - 1) // page * page, (address + size) // page * page
        at += 1
        if begin >= end:
            continue
        at -= 1
        delete_by_size(free, numbers[_FREE], by_size(free, numbers[_FREE], size, address))
        delete_by_address(free, numbers[_FREE], at)
        numbers[_FREE] -= 1
        for start, stop in ((address, begin), (end, address + size)):
            if stop > start:
                insert(free, numbers[_FREE], start, stop - start)
                numbers[_FREE] += 1
                at += 1
        state[_RESERVED] -= end - begin
        _add_gap(numbers, gaps, begin, end - begin)


@compiled(
    "int64(int64[::1], int64, int64[::1], int64[::1], int64[:, ::1], int64[:, :, ::1], int64[:, :, ::1], int64[::1], "
    "int64[:, ::1])"
)
def _run(
    events: np.ndarray, begin: int, block_bytes: np.ndarray, addresses: np.ndarray, numbers: np.ndarray, free: np.ndarray,
    gaps: np.ndarray, state: np.ndarray, grown: np.ndarray,
) -> int:  # fmt: skip
    """Return the position of the first event from `begin` on that finds no room; the number of events if all were done.

    Args:
        events, block_bytes, addresses: as in ExpandableCache.run.
        numbers, free, gaps: of the ranges for small and large blocks, with room for another free block for each event.
        grown: [2, ..], positions and the bytes mapped from there on.
    """
    for position in range(begin, len(events)):
        event = events[position]
        block = event if event >= 0 else ~event
        size = block_bytes[block]
        if size == 0:
            continue
        which = 0 if size <= SMALL_SIZE else 1
        own, blocks, unmapped = numbers[which], free[which], gaps[which]
        if event < 0:
            own[_FREE] = merge(blocks, own[_FREE], addresses[block], size)
            continue
        at = _best_fit(own, blocks, unmapped, size)
        if at < 0:
            at = _expand(own, blocks, unmapped, state, size)
        if at < 0:
            return position
        if state[_RESERVED] != state[_HELD]:
            grown[0, state[_GROWN]], grown[1, state[_GROWN]] = position, state[_RESERVED]
            state[_GROWN] += 1
            state[_HELD] = state[_RESERVED]
        have, address = blocks[0, at], blocks[1, at]
        addresses[block] = address
        delete_by_size(blocks, own[_FREE], at)
        at = find(blocks[2], own[_FREE], address)
        if have > size:  # should_split: sizes are multiples of MIN_BLOCK
            insert_by_size(blocks, own[_FREE] - 1, have - size, address + size)
            blocks[2, at], blocks[3, at] = address + size, have - size
        else:
            delete_by_address(blocks, own[_FREE], at)
            own[_FREE] -= 1
    return len(events)


class _Ranges:
    """The ranges of one stream, for small blocks and for large ones."""

    def __init__(self) -> None:
        self.numbers = np.array([[0, 0, 0, page] for page in (SMALL_SEGMENT, LARGE_SEGMENT)], np.int64)
        self.free, self.gaps = np.empty((2, 4, ROOM), np.int64), np.empty((2, 2, ROOM), np.int64)

    def make_room(self, blocks: int) -> None:
        """Make room for this number of further free blocks in either range.

        When pages are unmapped, which may split each block, there is room for all of them and for the gaps between them.
        """
        free, gaps = self.numbers[:, [_FREE, _GAPS]].max(0).tolist()
        self.free = _with_room(self.free, 2 * (free + blocks))
        self.gaps = _with_room(self.gaps, gaps + free + blocks)


def _with_room(rows: np.ndarray, needed: int) -> np.ndarray:
    if (room := rows.shape[2]) >= needed:
        return rows
    larger = np.empty((*rows.shape[:2], max(needed, 2 * room)), np.int64)
    larger[:, :, :room] = rows
    return larger


class ExpandableCache:
    """Two expandable ranges for each stream; `reserved` is the bytes mapped. Else it is as CudaCache."""

    def __init__(self, capacity: int | None = None):
        self.capacity = capacity
        self.retries = 0
        self.started = self.position = 0
        self.grown: list[tuple[int, int]] = [(0, 0)]
        self.given_back: list[int] = []
        self._state = np.array([0, ENDLESS if capacity is None else capacity, 0, 0], np.int64)
        self._ranges: dict[int, _Ranges] = {}  # by stream
        self._private = PrivatePools()
        self.use(0)

    @property
    def reserved(self) -> int:
        """Bytes mapped."""
        return int(self._state[_RESERVED])

    def use(self, stream: int) -> None:
        """Allocate and release on this stream from now on."""
        self._used = self._ranges.setdefault(stream, _Ranges())

    def round_up(self, sizes: Sequence[int]) -> np.ndarray:
        """Return bytes rounded as requests are (round_size); 0 stays 0 and needs no request."""
        return round_up(sizes)

    def run(self, events: np.ndarray, block_bytes: np.ndarray, addresses: np.ndarray) -> bool:
        """Return whether events (see Tape) found room; `block_bytes` has the requested bytes of each block, rounded.

        All three are of int64. If the limit forbids a page, free pages are unmapped, and the request is tried once more.
        """
        held, grown = self.reserved, np.empty((2, len(events) + 1), np.int64)
        self._state[_HELD], self._state[_GROWN], begin, emptied = held, 0, 0, -1
        while True:
            used = self._used
            used.make_room(len(events) - begin)
            begin = _run(events, begin, block_bytes, addresses, used.numbers, used.free, used.gaps, self._state, grown)
            self.position = begin
            if begin in (len(events), emptied):
                self.grown = [(0, held), *map(tuple, grown[:, : self._state[_GROWN]].T.tolist())]
                return begin == len(events)
            self.retries, emptied = self.retries + 1, begin
            self.release_cached()

    def release_cached(self, stream: int = 0) -> None:
        """Unmap every completely free page (release_cached_blocks, releasePool).

        Private pools in use are kept. For a deleted private pool only its pages are unmapped.
        """
        self.given_back.append(self.started + self.position)
        for given_back in self._private.given_back(self._ranges, stream):
            ranges = self._ranges[given_back]
            ranges.make_room(0)
            for which in range(2):
                _unmap_free(ranges.numbers[which], ranges.free[which], ranges.gaps[which], self._state)

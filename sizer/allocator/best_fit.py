"""Free blocks in pools, best fit and merging of neighbours: the inner loop of the CUDA allocator's replay, compiled by Numba.

A pool is an array of int64, [4, room]. The first two rows are the bytes and addresses of its free blocks by (bytes, address),
the last two the addresses and bytes of the same blocks by address. The number of blocks is a separate value. All functions are
compiled when this module is imported.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from sizer.allocator.cuda import LARGE_SEGMENT, MIN_BLOCK, SMALL_SEGMENT, SMALL_SIZE, segment_size
from sizer.allocator.numba_functions import COMPILED, compiled
from sizer.allocator.sorted_rows import (
    by_size,
    change_by_size,
    delete_at,
    delete_by_size,
    find,
    insert_at,
    insert_by_size,
)

MIDDLE = 2**46  # where addresses begin, which are of 47 bits in a process
ENDLESS = np.iinfo(np.int64).max
ROOM = 2**8  # blocks for which a pool has room at first
RESERVED, LIMIT, RISING, ABOVE, BELOW, MADE, ASKED = range(7)  # places in the state of a driver


_segment_size = compiled("int64(int64)")(segment_size)


@compiled("void(int64[:, ::1], int64, int64)")
def delete_by_address(pool: np.ndarray, count: int, at: int) -> None:
    """Take the block at a place by address out of the rows by address."""
    delete_at(pool[2], count, at)
    delete_at(pool[3], count, at)


@compiled("void(int64[:, ::1], int64, int64, int64)")
def insert(pool: np.ndarray, count: int, address: int, size: int) -> None:
    """Add a free block of `size` bytes that touches no other to a pool of `count` blocks, which has room for it."""
    insert_by_size(pool, count, size, address)
    at = find(pool[2], count, address)
    insert_at(pool[2], count, at, address)
    insert_at(pool[3], count, at, size)


@compiled("int64(int64[:, ::1], int64, int64, int64)")
def merge(pool: np.ndarray, count: int, start: int, size: int) -> int:
    """Add a free block to a pool of `count`, merged with adjacent ones (try_merge_blocks). Return the new number of blocks."""
    at = find(pool[2], count, start)
    joins_before = at > 0 and pool[2, at - 1] + pool[3, at - 1] == start
    if at < count and pool[2, at] == start + size:
        after = pool[3, at]
        size += after
        place = by_size(pool, count, after, pool[2, at])
        if not joins_before:
            change_by_size(pool, count, place, size, start)
            pool[2, at], pool[3, at] = start, size
            return count
        delete_by_size(pool, count, place)
        delete_by_address(pool, count, at)
        count -= 1
    if joins_before:
        start, before = pool[2, at - 1], pool[3, at - 1]
        size += before
        change_by_size(pool, count, by_size(pool, count, before, start), size, start)
        pool[3, at - 1] = size
        return count
    insert_by_size(pool, count, size, start)
    insert_at(pool[2], count, at, start)
    insert_at(pool[3], count, at, size)
    return count + 1


@compiled("int64(int64[::1], int64)")
def _give(state: np.ndarray, size: int) -> int:
    """Return the address of a new segment, by the state of a driver.

    A gap separates it from other segments, so that their blocks never merge.
    """
    state[RESERVED] += size
    if size <= state[RISING]:
        state[ABOVE] += size + MIN_BLOCK
        return state[ABOVE] - size - MIN_BLOCK
    state[BELOW] -= size + MIN_BLOCK
    return state[BELOW]


@compiled(
    "int64(int64[::1], int64, int64[::1], int64[::1], int64[:, ::1], int64[:, ::1], int64[::1], int64[::1], int64[:, ::1])"
)
def run(
    events: np.ndarray, begin: int, block_bytes: np.ndarray, addresses: np.ndarray,
    small: np.ndarray, large: np.ndarray, counts: np.ndarray, state: np.ndarray, made: np.ndarray,
) -> int:  # fmt: skip
    """Return the position of the first event from `begin` on that cannot be done here; the number of events if all were done.

    Args:
        events, block_bytes, addresses: as in CudaCache.run.
        small, large: the pools, with `counts` blocks in them.
        state: of the driver: RESERVED bytes; LIMIT, up to which segments are made here; RISING, the largest segment placed
            above earlier ones; ABOVE and BELOW, the next addresses upwards and downwards; MADE, the number of new segments.
            ASKED is set to the bytes of the segment that the limit forbids, 0 if a pool has no room for another block.
        made: [3, events], position, address and bytes of each segment.
    """
    for position in range(begin, len(events)):
        event = events[position]
        block = event if event >= 0 else ~event
        size = block_bytes[block]
        if size == 0:
            continue
        which = 0 if size <= SMALL_SIZE else 1
        pool, count = (small if size <= SMALL_SIZE else large), counts[which]
        if count >= pool.shape[1]:
            state[ASKED] = 0
            return position
        if event < 0:
            counts[which] = merge(pool, count, addresses[block], size)
            continue
        place = by_size(pool, count, size, 0)
        found = place < count  # get_free_block
        if found:
            have, address = pool[0, place], pool[1, place]
            at = find(pool[2], count, address)
        else:
            have = _segment_size(size)
            if state[RESERVED] + have > state[LIMIT]:
                state[ASKED] = have
                return position
            address = _give(state, have)
            number = state[MADE]
            made[0, number], made[1, number], made[2, number] = position, address, have
            state[MADE] += 1
            at = find(pool[2], count, address)
        addresses[block] = address
        rest = have - size
        if rest > SMALL_SIZE or (which == 0 and rest > 0):  # should_split
            if found:
                change_by_size(pool, count, place, rest, address + size)
                pool[2, at], pool[3, at] = address + size, rest
            else:
                insert_by_size(pool, count, rest, address + size)
                insert_at(pool[2], count, at, address + size)
                insert_at(pool[3], count, at, rest)
                count += 1
        else:
            block_bytes[block] = have
            if found:
                delete_by_size(pool, count, place)
                delete_by_address(pool, count, at)
                count -= 1
        counts[which] = count
    return len(events)


def run_on_lists(
    events: np.ndarray, begin: int, block_bytes: np.ndarray, addresses: np.ndarray,
    small: np.ndarray, large: np.ndarray, counts: np.ndarray, state: np.ndarray, made: np.ndarray,
) -> int:  # fmt: skip
    """Do the work of `run` on lists, and return its position: without Numba, items of an array are several times slower."""
    sizes, places, position = block_bytes.tolist(), addresses.tolist(), begin
    pools = [_Lists(pool, int(count)) for pool, count in zip((small, large), counts, strict=True)]
    reserved, limit = state[RESERVED].item(), state[LIMIT].item()
    for position, event in enumerate(events[begin:].tolist(), begin):
        block = event if event >= 0 else ~event
        if not (size := sizes[block]):
            continue
        is_small = size <= SMALL_SIZE
        pool = pools[0 if is_small else 1]
        if len(pool.starts) >= pool.room:
            state[ASKED] = 0
            break
        if event < 0:
            pool.merge(places[block], size)
            continue
        at = bisect_left(pool.by_size, (size, 0))
        if at < len(pool.by_size):  # get_free_block
            have, address = pool.by_size.pop(at)
            at = bisect_left(pool.starts, address)
        else:
            have = segment_size(size)
            if reserved + have > limit:
                state[ASKED] = have
                break
            address = int(_give(state, have))
            reserved += have
            made[:, state[MADE]] = position, address, have
            state[MADE] += 1
            at = bisect_left(pool.starts, address)
            pool.starts.insert(at, address)
            pool.sizes.insert(at, have)
        places[block] = address
        rest = have - size
        if rest > SMALL_SIZE or (is_small and rest > 0):  # should_split
            insort(pool.by_size, (rest, address + size))
            pool.starts[at], pool.sizes[at] = address + size, rest
        else:
            sizes[block] = have
            del pool.starts[at], pool.sizes[at]
    else:
        position = len(events)
    block_bytes[:], addresses[:] = sizes, places
    for which, (lists, array) in enumerate(zip(pools, (small, large), strict=True)):
        counts[which] = lists.write(array)
    return position


class _Lists:
    """The free blocks of a pool: (bytes, address) in order, and addresses in order with their bytes."""

    def __init__(self, pool: np.ndarray, count: int) -> None:
        self.room = pool.shape[1]
        rows = pool[:, :count].tolist()
        self.by_size = list(zip(rows[0], rows[1], strict=True))
        self.starts, self.sizes = rows[2], rows[3]

    def merge(self, start: int, size: int) -> None:
        """Add a free block, merged with adjacent ones (try_merge_blocks)."""
        by_size, starts, sizes = self.by_size, self.starts, self.sizes
        at = bisect_left(starts, start)
        if at < len(starts) and starts[at] == start + size:
            after = sizes[at]
            del by_size[bisect_left(by_size, (after, start + size))], starts[at], sizes[at]
            size += after
        if at > 0 and starts[at - 1] + sizes[at - 1] == start:
            start, before = starts[at - 1], sizes[at - 1]
            del by_size[bisect_left(by_size, (before, start))]
            size += before
            sizes[at - 1] = size
        else:
            starts.insert(at, start)
            sizes.insert(at, size)
        insort(by_size, (size, start))

    def write(self, pool: np.ndarray) -> int:
        """Write the blocks into a pool; how many there are."""
        count = len(self.starts)
        if count:
            pool[:2, :count] = np.array(self.by_size, np.int64).T
            pool[2, :count], pool[3, :count] = self.starts, self.sizes
        return count


_run: Callable[..., int] = run if COMPILED else run_on_lists


class Driver:
    """The device's memory: `reserved` bytes are held, up to `capacity` (None for no limit).

    Each segment is above earlier ones, so that the lowest address is the oldest segment's. With `by_address` it has the place
    that a driver chooses (sizer.allocator.cuda).
    """

    def __init__(self, capacity: int | None, *, by_address: bool) -> None:
        limit, rising = ENDLESS if capacity is None else capacity, LARGE_SEGMENT if by_address else ENDLESS
        self.state = np.array([0, limit, rising, MIDDLE, MIDDLE, 0, 0], np.int64)

    @property
    def reserved(self) -> int:
        """Bytes held."""
        return int(self.state[RESERVED])

    def give(self, size: int) -> int:
        """Return the address of a new segment."""
        return int(_give(self.state, size))

    def take_back(self, size: int) -> None:
        """Take back a segment."""
        self.state[RESERVED] -= size


class Pools:
    """The free blocks of one stream, small ones and large ones."""

    def __init__(self) -> None:
        self._pools = [np.empty((4, ROOM), np.int64) for _ in range(2)]
        self._counts = np.zeros(2, np.int64)

    def run(
        self, events: np.ndarray, begin: int, block_bytes: np.ndarray, addresses: np.ndarray, driver: Driver
    ) -> tuple[int, int, list[list[int]]]:
        """Return the number of events done, the bytes of a refused segment, and position, address and bytes of new segments.

        The events (see CudaCache.run) are done from `begin` on until the driver refuses a segment.
        """
        made, state = np.empty((3, len(events)), np.int64), driver.state
        state[MADE], position = 0, begin
        while True:
            position = _run(events, position, block_bytes, addresses, *self._pools, self._counts, state, made)
            if position == len(events) or state[ASKED]:
                return position, int(state[ASKED]), made[:, : state[MADE]].T.tolist()
            self._pools = [np.concatenate([pool, np.empty_like(pool)], axis=1) for pool in self._pools]

    def insert(self, address: int, size: int) -> None:
        """Add a new segment; it is for small blocks if it has their segments' size."""
        which = int(size != SMALL_SEGMENT)
        insert(self._pools[which], self._counts[which], address, size)
        self._counts[which] += 1

    def take_out(self, segments: Mapping[int, int]) -> Iterator[tuple[int, int]]:
        """Remove the blocks that are complete segments, and yield (address, size) of each. `segments` has sizes by address."""
        for which, (pool, count) in enumerate(zip(self._pools, self._counts.tolist(), strict=True)):
            _, addresses, starts, sizes = pool[:, :count]
            blocks = zip(starts.tolist(), sizes.tolist(), strict=True)
            whole = np.array([segments.get(start) == size for start, size in blocks], bool)
            if not whole.any():
                continue
            yield from pool[2:, :count][:, whole].T.tolist()
            left, left_by_size = ~whole, ~whole[np.searchsorted(starts, addresses)]
            self._counts[which] = left.sum()
            pool[:2, : self._counts[which]] = pool[:2, :count][:, left_by_size]
            pool[2:, : self._counts[which]] = pool[2:, :count][:, left]

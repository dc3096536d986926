"""The CUDA caching allocator with segments of its default kind.

Rules and constants: c10/cuda/CUDACachingAllocator.cpp (malloc, get_free_block, alloc_found_block, should_split,
free_block, try_merge_blocks, release_blocks), read in PyTorch 2.6 and 2.9; c10/core/AllocatorConfig.h, read in
PyTorch 2.15.

Assumptions: default settings (no max_split_size, no garbage collection, no rounding to powers of two); a
new segment gets a higher address than those before it, which decides between free blocks of equal size only.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from sizer.units import format_bytes

MIN_BLOCK = 512  # kMinBlockSize: every size is rounded up to a multiple
SMALL_SIZE = 2**20  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT = 2 * 2**20  # kSmallBuffer
LARGE_SEGMENT = 20 * 2**20  # large_segment_size: for requests of the large pool below MIN_LARGE
MIN_LARGE = 10 * 2**20  # kMinLargeAlloc: from here on a request gets a segment of its own size,
ROUND_LARGE = 2 * 2**20  # kRoundLarge: rounded up to a multiple of this

_SHIFT = 64
_ADDRESS = (1 << _SHIFT) - 1


def rounded(sizes: Sequence[int]) -> np.ndarray:
    """Bytes rounded up to a multiple of MIN_BLOCK."""
    return (np.asarray(sizes, np.int64) + (MIN_BLOCK - 1)) & -MIN_BLOCK


def segment_size(size: int) -> int:
    """Bytes asked of the driver when no cached block holds a rounded request of `size` bytes (get_allocation_size)."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    if size < MIN_LARGE:
        return LARGE_SEGMENT
    return (size + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE


def describe() -> tuple[str, ...]:
    """How this allocator works, in words."""
    return (
        f"the CUDA caching allocator, event by event: sizes rounded up to {format_bytes(MIN_BLOCK)}, best fit in a small (up to "
        f"{format_bytes(SMALL_SIZE)}) and a large pool",
        f"segments of {format_bytes(SMALL_SEGMENT)}, {format_bytes(LARGE_SEGMENT)} or, from {format_bytes(MIN_LARGE)} on, the size "
        f"rounded up to {format_bytes(ROUND_LARGE)}; blocks are split, and merge with free neighbours when released",
        "reserved memory shrinks where torch.cuda.empty_cache() is called, and on the way to an out-of-memory error: free segments "
        "are given back, then it tries again",
    )


class CudaCache:
    """Segments and the free blocks of both pools; `reserved` is the bytes held from the driver.

    A free block is one integer, size << 64 | address: a sorted list of them is in the order of best fit, by size and then address.
    Blocks merge where they touch. A segment belongs to one pool of one stream, and a gap keeps it apart from the next.
    `grown` says of the last run after how many events how much was reserved, `position` is that of the event for which the last
    segment was asked; `started` is where in a tape the run began.
    """

    small_size, small_segment, large_segment = SMALL_SIZE, SMALL_SEGMENT, LARGE_SEGMENT

    def __init__(self, capacity: int | None = None):
        self.capacity = capacity
        self.reserved = 0
        self.retries = 0
        self.started = self.position = 0
        self.grown: list[tuple[int, int]] = [(0, 0)]
        self._pools: dict[int, tuple[list[int], list[int]]] = {}  # by stream, those for small and large blocks
        self._size_at: dict[int, int] = {}  # start of a free block -> its size
        self._start_at: dict[int, int] = {}  # end of a free block -> its start
        self._segments: dict[int, int] = {}  # start -> size
        self._next_address = MIN_BLOCK
        self.use(0)

    def use(self, stream: int) -> None:
        """From here on all that is asked for and released is of this stream."""
        self._small, self._large = self._pools.setdefault(stream, ([], []))

    def rounded(self, sizes: Sequence[int]) -> np.ndarray:
        """Bytes as requests are rounded up (round_size); 0 stays 0, for which nothing is asked."""
        return rounded(sizes)

    def run(self, events: Sequence[int], taken: list[int], addresses: list[int]) -> bool:
        """Whether events (see Tape) found room; by block `taken` are the bytes asked for, rounded, which become those really taken.

        Here the time of all replays goes: one loop that calls nothing of its own but for a new segment.
        """
        small, large, size_at, start_at = self._small, self._large, self._size_at, self._start_at
        self.grown = [(0, self.reserved)]
        for position, event in enumerate(events):
            if event >= 0:
                if not (size := taken[event]):
                    continue
                pool = small if size <= SMALL_SIZE else large
                index = bisect_left(pool, size << _SHIFT)
                if index < len(pool):  # get_free_block
                    key = pool.pop(index)
                    address, have = key & _ADDRESS, key >> _SHIFT
                    del size_at[address], start_at[address + have]
                else:
                    self.position = position
                    segment = self._new_segment(segment_size(size))
                    if segment is None:
                        return False
                    self.grown.append((position, self.reserved))
                    address, have = segment
                addresses[event] = address
                if have == size:
                    continue
                rest = have - size
                if rest > SMALL_SIZE or pool is small:  # should_split
                    free = address + size
                    size_at[free] = rest
                    start_at[free + rest] = free
                    insort(pool, rest << _SHIFT | free)
                else:
                    taken[event] = have
            elif size := taken[~event]:
                pool = small if size <= SMALL_SIZE else large
                start = addresses[~event]
                end = start + size
                before, after = start_at.pop(start, None), size_at.pop(end, None)
                if before is not None:  # try_merge_blocks
                    del pool[bisect_left(pool, size_at[before] << _SHIFT | before)]
                    start = before
                if after is not None:
                    del pool[bisect_left(pool, after << _SHIFT | end)]
                    end += after
                size_at[start] = size = end - start
                start_at[end] = start
                insort(pool, size << _SHIFT | start)
        return True

    def small_pool(self) -> tuple[int, ...]:
        """The free blocks of the small pool."""
        return tuple(self._small)

    def set_small_pool(self, blocks: tuple[int, ...]) -> None:
        """Make these the free blocks of the small pool."""
        for key in self._small:
            address, size = key & _ADDRESS, key >> _SHIFT
            del self._size_at[address], self._start_at[address + size]
        self._small[:] = blocks
        for key in blocks:
            address, size = key & _ADDRESS, key >> _SHIFT
            self._size_at[address], self._start_at[address + size] = size, address

    def would_take(self, size: int) -> int | None:
        """The bytes that a large block of `size` would take of what is cached; None where there is no room."""
        index = bisect_left(self._large, size << _SHIFT)
        if index == len(self._large):
            return None
        have = self._large[index] >> _SHIFT
        return size if have - size > SMALL_SIZE else have

    def _new_segment(self, size: int) -> tuple[int, int] | None:
        """(address, size) of a new segment, if need be after all free ones went back to the driver; None: no room."""
        if self.capacity is not None and self.reserved + size > self.capacity:
            self.release_cached()
            self.retries += 1
            if self.reserved + size > self.capacity:
                return None
        self.reserved += size
        address = self._next_address
        self._next_address += size + MIN_BLOCK
        self._segments[address] = size
        return address, size

    def release_cached(self) -> None:
        """Hand every segment that is free as a whole back to the driver (release_cached_blocks)."""
        for pool in (pool for pools in self._pools.values() for pool in pools):
            whole = {key for key in pool if self._segments.get(key & _ADDRESS) == key >> _SHIFT}
            pool[:] = [key for key in pool if key not in whole]
            for key in whole:
                start, size = key & _ADDRESS, key >> _SHIFT
                del self._size_at[start], self._start_at[start + size], self._segments[start]
                self.reserved -= size

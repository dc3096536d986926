"""The CUDA caching allocator with segments of its default kind.

Rules and constants: c10/cuda/CUDACachingAllocator.cpp (malloc, get_free_block, alloc_found_block, should_split,
free_block, try_merge_blocks, release_blocks), read in PyTorch 2.6 and 2.9; c10/core/AllocatorConfig.h, read in
PyTorch 2.15.

Assumptions: one stream; default settings (no max_split_size, no garbage collection, no rounding to powers of two); a
new segment gets a higher address than those before it, which decides between free blocks of equal size only.
"""

from __future__ import annotations

from sizer.memory.blocks import FreeBlocks
from sizer.units import format_bytes

MIN_BLOCK = 512  # kMinBlockSize: every size is rounded up to a multiple
SMALL_SIZE = 2**20  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT = 2 * 2**20  # kSmallBuffer
LARGE_SEGMENT = 20 * 2**20  # large_segment_size: for requests of the large pool below MIN_LARGE
MIN_LARGE = 10 * 2**20  # kMinLargeAlloc: from here on a request gets a segment of its own size,
ROUND_LARGE = 2 * 2**20  # kRoundLarge: rounded up to a multiple of this


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
        "reserved memory shrinks only on the way to an out-of-memory error: free segments are given back, then it tries again",
    )


class CudaCache:
    """Segments and the two pools of their free blocks; `reserved` is the bytes held from the driver."""

    def __init__(self, capacity: int | None = None):
        self.capacity = capacity
        self.reserved = 0
        self.retries = 0
        self._small = FreeBlocks()
        self._large = FreeBlocks()
        self._segments: dict[int, int] = {}  # start -> size
        self._next_address = MIN_BLOCK

    def allocate(self, size: int) -> tuple[int, int] | None:
        """(address, bytes really taken) of a block for `size` > 0 bytes, or None where no memory is left."""
        size = (size + MIN_BLOCK - 1) & -MIN_BLOCK
        small = size <= SMALL_SIZE
        pool = self._small if small else self._large
        block = pool.take(size) or self._new_segment(segment_size(size))
        if block is None:
            return None
        address, have = block
        rest = have - size
        if rest > SMALL_SIZE or (small and rest):  # should_split
            pool.add(address + size, rest)
            return address, size
        return block

    def release(self, address: int, size: int) -> None:
        """Give a block back to its pool (over 1 MiB: the large one), merged with its free neighbours."""
        (self._small if size <= SMALL_SIZE else self._large).merge(address, size)

    def _new_segment(self, size: int) -> tuple[int, int] | None:
        """(address, size) of a new segment, if need be after all free ones went back to the driver; None: no room."""
        if self.capacity is not None and self.reserved + size > self.capacity:
            self._release_cached()
            self.retries += 1
            if self.reserved + size > self.capacity:
                return None
        self.reserved += size
        address = self._next_address
        self._next_address += size + MIN_BLOCK  # the gap keeps neighbouring segments from merging
        self._segments[address] = size
        return address, size

    def _release_cached(self) -> None:
        """Hand every segment that is free as a whole back to the driver (release_cached_blocks)."""
        for pool in (self._small, self._large):
            whole = [start for start, size in pool.size_at.items() if self._segments.get(start) == size]
            for start in whole:
                self.reserved -= pool.remove(start)
                del self._segments[start]

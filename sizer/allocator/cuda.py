"""Rules of the CUDA caching allocator, which sizer.allocator.cuda_cache and sizer.allocator.expandable_cache follow.

Rules and constants: c10/cuda/CUDACachingAllocator.cpp (malloc, get_free_block, alloc_found_block, should_split, free_block,
try_merge_blocks, release_blocks), read in PyTorch 2.6 and 2.9; c10/core/AllocatorConfig.h, read in PyTorch 2.15.

With PYTORCH_ALLOC_CONF=expandable_segments:True there is one range of addresses per pool and stream. Its pages (2 MiB for small,
20 MiB for large requests) are mapped as they are needed (find_expandable_block, map_block, try_allocate_expandable_block,
get_free_block, unmap_block). Addresses are assumed never to run out: PyTorch reserves 1 1/8 of the device's memory for each range.

Of free blocks of equal size the allocator takes that of the oldest segment, and within a segment that at the lowest address
(BlockComparatorSizeCounterAddress, pull request 183591). Up to PyTorch 2.11 only the lowest address decides (`by_address`), so
the driver's placement of new segments matters: those of more than LARGE_SEGMENT are below earlier ones, others above. No source
documents this. 20 published runs on a Tesla T4 agree with it to the MiB in reserved memory
(tests/measured/published/README.md).

Assumptions: default settings (no max_split_size, no garbage collection, no rounding to powers of two).

*Known limitations*: PyTorch 2.12 orders by the age of the block instead of its segment's (pull request 178362); it is treated
like 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from sizer.base.units import format_bytes
from sizer.tape.tape import PRIVATE

MIN_BLOCK = 512  # kMinBlockSize: every size is rounded up to a multiple
SMALL_SIZE = 2**20  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT = 2 * 2**20  # kSmallBuffer
LARGE_SEGMENT = 20 * 2**20  # large_segment_size: for requests of the large pool below MIN_LARGE
MIN_LARGE = 10 * 2**20  # kMinLargeAlloc: from here on a request gets its own segment,
ROUND_LARGE = 2 * 2**20  # kRoundLarge: rounded up to a multiple of this


def round_up(sizes: Sequence[int]) -> np.ndarray:
    """Return bytes rounded up to a multiple of MIN_BLOCK."""
    return (np.asarray(sizes, np.int64) + (MIN_BLOCK - 1)) & -MIN_BLOCK


def segment_size(size: int) -> int:
    """Return the bytes requested from the driver if no cached block holds a rounded request of `size` bytes.

    Source: get_allocation_size.
    """
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    if size < MIN_LARGE:
        return LARGE_SEGMENT
    return (size + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE


class PrivatePools:
    """Private pools by the numbers of their streams: those in use keep their cached memory (release_cached_blocks, releasePool)."""

    def __init__(self) -> None:
        self._deleted: set[int] = set()

    def given_back(self, streams: Iterable[int], deleted: int) -> list[int]:
        """Return the streams to release the cached memory of: the deleted pool; for 0 all except pools in use."""
        if deleted >= PRIVATE:
            self._deleted.add(deleted)
            return [stream for stream in streams if stream == deleted]
        return [stream for stream in streams if stream < PRIVATE or stream in self._deleted]


def describe() -> tuple[str, ...]:
    """Describe how this allocator works, in words."""
    return (
        f"the CUDA caching allocator, event by event: sizes rounded up to {format_bytes(MIN_BLOCK)}, best fit in a small (up to "
        f"{format_bytes(SMALL_SIZE)}) and a large pool",
        f"segments of {format_bytes(SMALL_SEGMENT)}, {format_bytes(LARGE_SEGMENT)} or, from {format_bytes(MIN_LARGE)} on, the size "
        f"rounded up to {format_bytes(ROUND_LARGE)}; blocks are split, and merge with free neighbours when released",
        "reserved memory shrinks where torch.cuda.empty_cache() is called, and on the way to an out-of-memory error: free segments "
        "are given back, then it tries again",
    )


def describe_expandable() -> tuple[str, ...]:
    """Describe how this allocator works, in words."""
    return (
        f"the CUDA caching allocator with expandable segments, event by event: sizes rounded up to {format_bytes(MIN_BLOCK)}, best "
        f"fit in one range for requests up to {format_bytes(SMALL_SIZE)} and one for larger ones",
        f"pages of {format_bytes(SMALL_SEGMENT)} and {format_bytes(LARGE_SEGMENT)} are mapped as a range grows",
        "reserved memory shrinks where torch.cuda.empty_cache() is called, and on the way to an out-of-memory error: free pages "
        "are unmapped, then it tries again",
    )

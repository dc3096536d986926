"""Rules of the MPS heap allocator, which sizer.allocator.heaps follows.

Heaps come from Metal, buffers are cut from them, and freed buffers are kept unsplit for reuse.

Rules and constants: aten/src/ATen/mps/MPSAllocator.mm and MPSAllocator.h (get_allocation_size, get_free_buffer, alloc_buffer,
get_free_heap, createHeapBlock, release_buffer), read in PyTorch 2.15's header and the main branch of that time.

Assumptions: the GPU has finished with a buffer when it is freed (retainCount is 1); no memory pressure, which starts at 1.4
times the recommended maximum; Metal places a buffer at the best fitting free range of its heap and rounds its size to 256 bytes
(believed, Metal does not document it). Versions older than 2.15 may not round large buffers into 32 steps per power of two.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sizer.base.units import format_bytes

ALIGNMENT = 256  # rounding of heapBufferSizeAndAlignWithLength (believed)
PAGE = 16 * 2**10  # vm_page_size on Apple silicon
SMALL_SIZE = 2**20  # kMaxSmallAlloc
MIN_LARGE = 10 * 2**20  # kMinLargeAlloc
ROUND_LARGE = 2 * 2**20  # kRoundLarge
SMALL_HEAP = 8 * 2**20  # kSmallHeap
LARGE_HEAP = 32 * 2**20  # kLargeHeap
XLARGE_HEAP = 2**30  # kXLargeHeap
BUCKET_SHIFT = 5  # kLargeBucketShift: 32 sizes per power of two
NEAR_FIT = 8  # kNearFitReuseDenom


def describe() -> tuple[str, ...]:
    """Describe how this allocator works, in words."""
    sizes = ", ".join(map(format_bytes, (SMALL_HEAP, LARGE_HEAP, XLARGE_HEAP)))
    return (
        f"PyTorch's MPS allocator: heaps of {sizes} or the size rounded up to {format_bytes(ROUND_LARGE)}",
        "the rest of the system shares the memory",
    )


def heap_size(size: int) -> int:
    """Return the bytes of the heap that is made for a buffer of `size` bytes (createHeapBlock)."""
    if size <= SMALL_SIZE:
        return SMALL_HEAP
    if size < MIN_LARGE:
        return LARGE_HEAP
    if size < XLARGE_HEAP // 2:
        return XLARGE_HEAP
    return (size + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE


def buffer_sizes(sizes: Sequence[int]) -> np.ndarray:
    """Return the bytes of the buffers made for requests of some bytes, 0 for no request (get_allocation_size).

    A large buffer is rounded into 32 steps per power of two, unless that would need a heap of another kind.
    """
    aligned = _round_up(np.asarray(sizes, np.int64), ALIGNMENT)
    exponents = np.frexp(aligned.astype(np.float64))[1] - 1  # exact: below 2**53
    steps = np.maximum(np.left_shift(np.int64(1), np.maximum(exponents, BUCKET_SHIFT) - BUCKET_SHIFT), PAGE)
    bucketed = _round_up(aligned, steps)
    return np.where((aligned > SMALL_SIZE) & (_tiers(bucketed) == _tiers(aligned)), bucketed, aligned)


def _round_up(sizes: np.ndarray, multiple: np.ndarray | int) -> np.ndarray:
    return -(-sizes // multiple) * multiple


def _tiers(sizes: np.ndarray) -> np.ndarray:
    """Return the kinds of heap for buffers of these sizes (getHeapTier)."""
    return np.searchsorted([SMALL_SIZE + 1, MIN_LARGE, XLARGE_HEAP // 2], sizes, side="right")

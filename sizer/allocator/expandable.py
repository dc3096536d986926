"""Rules of the CUDA caching allocator with PYTORCH_ALLOC_CONF=expandable_segments:True.

sizer.allocator.expandable_cache follows them. There is one range of addresses per pool and stream. Its pages (2 MiB for small,
20 MiB for large requests) are mapped as they are needed. Rules: c10/cuda/CUDACachingAllocator.cpp (find_expandable_block,
map_block, try_allocate_expandable_block, get_free_block, unmap_block), read in PyTorch 2.6 and 2.9.

Assumptions: default settings otherwise, and addresses that never run out (PyTorch reserves 1 1/8 of the device's memory for
each range).
"""

from __future__ import annotations

from sizer.allocator.cuda import LARGE_SEGMENT, MIN_BLOCK, SMALL_SEGMENT, SMALL_SIZE
from sizer.base.units import format_bytes


def describe() -> tuple[str, ...]:
    """Describe how this allocator works, in words."""
    return (
        f"the CUDA caching allocator with expandable segments, event by event: sizes rounded up to {format_bytes(MIN_BLOCK)}, best "
        f"fit in one range for requests up to {format_bytes(SMALL_SIZE)} and one for larger ones",
        f"pages of {format_bytes(SMALL_SEGMENT)} and {format_bytes(LARGE_SEGMENT)} are mapped as a range grows",
        "reserved memory shrinks where torch.cuda.empty_cache() is called, and on the way to an out-of-memory error: free pages "
        "are unmapped, then it tries again",
    )

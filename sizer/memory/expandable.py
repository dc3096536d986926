"""The CUDA caching allocator with PYTORCH_ALLOC_CONF=expandable_segments:True.

One range of addresses per pool and stream, of which pages (2 MiB for small, 20 MiB for large requests) are mapped as they are
needed. Rules: c10/cuda/CUDACachingAllocator.cpp (find_expandable_block, map_block, try_allocate_expandable_block,
get_free_block, unmap_block), read in PyTorch 2.6 and 2.9.

Assumptions: default settings otherwise, and addresses that never run out (PyTorch reserves 1 1/8 of the
device's memory for each range).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from sizer.memory.blocks import FreeBlocks
from sizer.memory.cuda import LARGE_SEGMENT, MIN_BLOCK, SMALL_SEGMENT, SMALL_SIZE, rounded
from sizer.memory.replay import run_events
from sizer.units import format_bytes


def describe() -> tuple[str, ...]:
    """How this allocator works, in words."""
    return (
        f"the CUDA caching allocator with expandable segments, event by event: sizes rounded up to {format_bytes(MIN_BLOCK)}, best "
        f"fit in one range for requests up to {format_bytes(SMALL_SIZE)} and one for larger ones",
        f"pages of {format_bytes(SMALL_SEGMENT)} and {format_bytes(LARGE_SEGMENT)} are mapped as a range grows",
        "reserved memory shrinks where torch.cuda.empty_cache() is called, and on the way to an out-of-memory error: free pages "
        "are unmapped, then it tries again",
    )


class ExpandableCache:
    """Two expandable ranges for each stream; `reserved` is the bytes mapped, `grown` and `position` are as in CudaCache."""

    def __init__(self, capacity: int | None = None):
        self.capacity = capacity
        self.reserved = 0
        self.retries = 0
        self.started = self.position = 0
        self.grown: list[tuple[int, int]] = [(0, 0)]
        self._ranges: dict[int, tuple[_Range, _Range]] = {}  # by stream, those for small and large blocks
        self.use(0)

    def use(self, stream: int) -> None:
        """From here on all that is asked for and released is of this stream."""
        if stream not in self._ranges:
            self._ranges[stream] = _Range(self, SMALL_SEGMENT), _Range(self, LARGE_SEGMENT)
        self._small, self._large = self._ranges[stream]

    def allocate(self, size: int) -> tuple[int, int] | None:
        """(address, bytes really taken) of a block for `size` > 0 bytes, or None where no memory is left."""
        size = (size + MIN_BLOCK - 1) & -MIN_BLOCK
        pages = self._small if size <= SMALL_SIZE else self._large
        block = pages.best_fit(size) or pages.expand(size)
        if block is None:
            self.release_cached()
            self.retries += 1
            block = pages.expand(size)
        if block is None:
            return None
        address, have = block
        if have > size:  # should_split: sizes are multiples of MIN_BLOCK
            pages.free.add(address + size, have - size)
        return address, size

    def release(self, address: int, size: int) -> None:
        """Give a block back to its range, merged with its free neighbours."""
        (self._small if size <= SMALL_SIZE else self._large).free.merge(address, size)

    def release_cached(self) -> None:
        """Unmap every page of all ranges that is free as a whole (release_cached_blocks)."""
        for pages in (pages for ranges in self._ranges.values() for pages in ranges):
            pages.unmap_free()

    def rounded(self, sizes: Sequence[int]) -> np.ndarray:
        """Bytes as requests are rounded up (round_size); 0 stays 0, for which nothing is asked."""
        return rounded(sizes)

    def run(self, events: np.ndarray, taken: np.ndarray, addresses: np.ndarray) -> bool:
        """Whether events found room, as CudaCache has it."""
        return run_events(self, events, taken, addresses)

    def has_room(self, size: int) -> bool:
        """Whether the device can map another `size` bytes."""
        return self.capacity is None or self.reserved + size <= self.capacity


class _Range:
    """Addresses from 0 up: mapped blocks (in use, or in `free`), unmapped gaps of whole pages, and no end."""

    def __init__(self, cache: ExpandableCache, page: int):
        self.cache = cache
        self.page = page
        self.free = FreeBlocks()
        self.gaps: dict[int, int] = {}  # start -> size of each unmapped gap below `top`
        self.starts: list[int] = []  # the starts of the gaps, ascending
        self.top = 0  # from here on nothing is mapped

    def best_fit(self, size: int) -> tuple[int, int] | None:
        """A mapped free block by best fit, where a block before unmapped pages counts as large as it can grow."""
        chosen, able = None, 0
        for address, have in self.free.at_least(size):
            if chosen is not None and self._growable(address, have) >= able:
                break
            chosen, able = address, self._growable(address, have)
            if able == have:
                break
        return None if chosen is None else (chosen, self.free.remove(chosen))

    def expand(self, size: int) -> tuple[int, int] | None:
        """A free block of at least `size` bytes, after mapping pages at the lowest address with the room; or None."""
        start = self._lowest_room(size)
        if start not in self.free.size_at and not self._map(start, min(size, self._gap(start) or size)):
            return None
        while (have := self.free.size_at[start]) < size:
            following = start + have
            wanted = size - have
            if not self._map(following, min(wanted, self._gap(following) or wanted)):
                return None
        return start, self.free.remove(start)

    def unmap_free(self) -> None:
        """Unmap every page that is free as a whole (unmap_block)."""
        for address, size in list(self.free.size_at.items()):
            begin = -(-address // self.page) * self.page
            end = (address + size) // self.page * self.page
            if begin >= end:
                continue
            self.free.remove(address)
            if begin > address:
                self.free.add(address, begin - address)
            if address + size > end:
                self.free.add(end, address + size - end)
            self.cache.reserved -= end - begin
            self._add_gap(begin, end - begin)

    def _growable(self, address: int, size: int) -> float:
        following = address + size
        return float("inf") if following == self.top else size + self.gaps.get(following, 0)

    def _gap(self, start: int) -> int | None:
        """Size of the gap at `start`, None for the endless one at the top."""
        return None if start == self.top else self.gaps[start]

    def _lowest_room(self, size: int) -> int:
        """Address of the first gap, or of the free block before it, from which `size` bytes are free or unmapped."""
        for gap in self.starts:
            start = self.free.start_at.get(gap, gap)
            end = start
            while end - start < size and end != self.top:
                length = self.free.size_at.get(end) or self.gaps.get(end)
                if not length:
                    break
                end += length
            if end == self.top or end - start >= size:
                return start
        return self.free.start_at.get(self.top, self.top)

    def _map(self, start: int, size: int) -> bool:
        """Map the pages that hold `size` bytes from the gap at `start` on; False, and nothing mapped, without room."""
        size = -(-size // self.page) * self.page
        if not self.cache.has_room(size):
            return False
        if start == self.top:
            self.top += size
        else:
            gap = self.gaps.pop(start)
            del self.starts[bisect_left(self.starts, start)]
            if gap > size:
                self._add_gap(start + size, gap - size)
        self.cache.reserved += size
        self.free.merge(start, size)
        return True

    def _add_gap(self, start: int, size: int) -> None:
        """Add unmapped pages, joined with those they touch."""
        for before in self.starts:
            if before + self.gaps[before] == start:
                size += self.gaps.pop(before)
                self.starts.remove(before)
                start = before
                break
        end = start + size
        if end in self.gaps:
            size += self.gaps.pop(end)
            self.starts.remove(end)
        if start + size == self.top:
            self.top = start
            return
        self.gaps[start] = size
        insort(self.starts, start)

"""The MPS heap allocator once more, buffer by buffer in plain Python: what sizer.allocator.heaps is held against.

By the same rules (sizer.allocator.mps), with sorted lists instead of arrays and an object for each heap.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from sizer.allocator.mps import (
    ALIGNMENT,
    BUCKET_SHIFT,
    LARGE_HEAP,
    MIN_LARGE,
    NEAR_FIT,
    PAGE,
    SMALL_SIZE,
    XLARGE_HEAP,
    heap_size,
)
from tests.allocator.free_blocks import FreeBlocks


def buffer_size(size: int) -> int:
    """Bytes of the buffer made for a request of `size` bytes (get_allocation_size)."""
    aligned = _round_up(size, ALIGNMENT)
    if aligned <= SMALL_SIZE:
        return aligned
    bucketed = _round_up(aligned, max(1 << (aligned.bit_length() - 1) >> BUCKET_SHIFT, PAGE))
    return bucketed if _tier(bucketed) == _tier(aligned) else aligned


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _tier(size: int) -> int:
    return (size > SMALL_SIZE) + (size >= MIN_LARGE) + (size >= XLARGE_HEAP // 2)


class SlowHeaps:
    """Heaps of both pools; `reserved` is their bytes, the largest part of torch.mps.driver_allocated_memory()."""

    def __init__(self, capacity: int | None = None):
        self.capacity = capacity
        self.reserved = 0
        self.retries = 0
        self._small = _Pool()
        self._large = _Pool()
        self._addresses = 0

    def allocate(self, size: int) -> tuple[int, int] | None:
        """(address, bytes really taken) of a buffer for `size` > 0 bytes, or None where the limit is reached."""
        size = buffer_size(size)
        pool = self._small if size <= SMALL_SIZE else self._large
        if self._has_room(size) and (buffer := self._cached(pool, size)):
            return buffer
        buffer = self._new_buffer(pool, size)
        if buffer is None and self._release_enough(pool, size):
            buffer = self._new_buffer(pool, size)
        if buffer is None:
            self.retries += 1
            self.release_cached()
            buffer = self._new_buffer(pool, size)
        return buffer

    def release(self, address: int, size: int) -> None:
        """Keep a freed buffer, whole, for a later request."""
        insort((self._small if size <= SMALL_SIZE else self._large).free, (size, address))

    def release_cached(self) -> None:
        """Give every freed buffer back, and the heaps that are then empty (release_cached_buffers, emptyCache)."""
        self._release_all(self._small)
        self._release_all(self._large)

    def _cached(self, pool: _Pool, size: int) -> tuple[int, int] | None:
        """A freed buffer to use again, as (address, size) (get_free_buffer)."""
        index = bisect_left(pool.free, (size, 0))
        if index < len(pool.free):
            have, address = pool.free[index]
            if have <= size + LARGE_HEAP:
                del pool.free[index]
                return address, have
            if pool.largest_room() < size:
                self._release_buffer(pool, index, keep_heap=True)
        elif pool is self._large and pool.free and pool.free[-1][0] >= size - size // NEAR_FIT:
            self._release_buffer(pool, len(pool.free) - 1)
        return None

    def _new_buffer(self, pool: _Pool, size: int) -> tuple[int, int] | None:
        """A buffer cut from the tightest heap with room, else from a new heap (alloc_buffer)."""
        if not self._has_room(size):
            return None
        heap = pool.tightest(size)
        if heap is None:
            heap = _Heap(self._addresses, heap_size(size))
            self._addresses += heap.size + PAGE
            self.reserved += heap.size
        else:
            pool.forget(heap)
        address, have = heap.room.take(size)
        if have > size:
            heap.room.add(address + size, have - size)
        heap.buffers += 1
        pool.heap_of[address] = heap
        pool.remember(heap)
        return address, size

    def _release_buffer(self, pool: _Pool, index: int, *, keep_heap: bool = False) -> None:
        """Give a freed buffer back to its heap, and a heap without buffers back to the driver."""
        size, address = pool.free.pop(index)
        heap = pool.heap_of.pop(address)
        pool.forget(heap)
        heap.room.merge(address, size)
        heap.buffers -= 1
        if heap.buffers or keep_heap:
            pool.remember(heap)
        else:
            self.reserved -= heap.size

    def _release_enough(self, pool: _Pool, size: int) -> bool:
        """Release one freed buffer that is large enough, else the largest ones (release_available_cached_buffers)."""
        index = bisect_left(pool.free, (size, 0))
        if index < len(pool.free):
            self._release_buffer(pool, index)
            return True
        released = 0
        while pool.free and released < size:
            released += pool.free[-1][0]
            self._release_buffer(pool, len(pool.free) - 1)
        return released >= size

    def _release_all(self, pool: _Pool) -> None:
        while pool.free:
            self._release_buffer(pool, 0)

    def _has_room(self, size: int) -> bool:
        return self.capacity is None or self.reserved + size <= self.capacity


class _Heap:
    """One Metal heap: its address, its size, its free ranges and how many buffers it holds."""

    __slots__ = ("address", "buffers", "room", "size")

    def __init__(self, address: int, size: int):
        self.address = address
        self.size = size
        self.buffers = 0
        self.room = FreeBlocks()
        self.room.add(address, size)


class _Pool:
    """The heaps of one pool ordered by their largest free range, and its freed buffers as (size, address)."""

    def __init__(self) -> None:
        self.free: list[tuple[int, int]] = []
        self.heap_of: dict[int, _Heap] = {}  # buffer's address -> heap
        self._order: list[tuple[int, int]] = []  # (largest free range, heap's address)
        self._heaps: dict[int, _Heap] = {}  # heap's address -> heap

    def largest_room(self) -> int:
        """Bytes of the largest buffer that an existing heap can hold."""
        return self._order[-1][0] if self._order else 0

    def tightest(self, size: int) -> _Heap | None:
        """The heap whose largest free range is the smallest that holds `size` bytes (get_free_heap)."""
        index = bisect_left(self._order, (size, 0))
        return self._heaps[self._order[index][1]] if index < len(self._order) else None

    def remember(self, heap: _Heap) -> None:
        """Put a heap in, by its room now."""
        self._heaps[heap.address] = heap
        insort(self._order, (heap.room.largest(), heap.address))

    def forget(self, heap: _Heap) -> None:
        """Take a heap out; call it before its room changes."""
        del self._heaps[heap.address]
        del self._order[bisect_left(self._order, (heap.room.largest(), heap.address))]

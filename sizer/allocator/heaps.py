"""Heaps of the MPS allocator and the buffers in them, by the rules of sizer.allocator.mps.

They are compiled, as the CUDA allocator's pools are (sizer.allocator.best_fit). There are two pools, of small and of large
buffers. Each has three arrays of int64, [rows, room], and counts of their columns:

* `freed`, the bytes and addresses of its freed buffers by (bytes, address);
* `ranges`, the addresses and bytes of the free ranges of all its heaps by address; ranges of two heaps never touch;
* `heaps` by address: address, bytes, the number of buffers in it and the bytes of its largest free range.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sizer.allocator.mps import LARGE_HEAP, NEAR_FIT, PAGE, SMALL_SIZE, buffer_sizes, heap_size
from sizer.allocator.numba_functions import compiled
from sizer.allocator.sorted_rows import by_size, delete_at, delete_by_size, find, insert_at, insert_by_size

_ENDLESS = np.iinfo(np.int64).max
_RESERVED, _LIMIT, _NEXT, _GROWN = range(
    4
)  # places in the state: bytes held and allowed, the next heap's address, rows of `grown`
_FREED, _RANGES, _HEAPS = range(3)  # places in the counts of a pool
_ADDRESS, _BYTES, _BUFFERS, _LARGEST = range(4)  # rows of heaps

_heap_size = compiled("int64(int64)")(heap_size)


@compiled("void(int64[::1], int64[:, ::1], int64[:, ::1], int64)")
def _measure(counts: np.ndarray, ranges: np.ndarray, heaps: np.ndarray, at: int) -> None:
    """Look up the largest free range of a heap."""
    place = find(ranges[_ADDRESS], counts[_RANGES], heaps[_ADDRESS, at])
    end, largest = heaps[_ADDRESS, at] + heaps[_BYTES, at], 0
    while place < counts[_RANGES] and ranges[_ADDRESS, place] < end:
        largest = max(largest, ranges[_BYTES, place])
        place += 1
    heaps[_LARGEST, at] = largest


@compiled("int64(int64[::1], int64[:, ::1], int64)")
def _tightest(counts: np.ndarray, heaps: np.ndarray, size: int) -> int:
    """Return the heap with the smallest largest free range that holds `size` bytes (get_free_heap); -1 if none does."""
    best = -1
    for at in range(counts[_HEAPS]):
        if heaps[_LARGEST, at] >= size and (best < 0 or heaps[_LARGEST, at] < heaps[_LARGEST, best]):
            best = at
    return best


@compiled("int64(int64[::1], int64[:, ::1], int64[:, ::1], int64[::1], int64)")
def _new_buffer(counts: np.ndarray, ranges: np.ndarray, heaps: np.ndarray, state: np.ndarray, size: int) -> int:
    """Return the address of a buffer cut from the tightest heap with room, else from a new heap (alloc_buffer); -1: no room."""
    if size > state[_LIMIT] - state[_RESERVED]:
        return -1
    at = _tightest(counts, heaps, size)
    if at < 0:
        at, place, have = counts[_HEAPS], counts[_RANGES], _heap_size(size)
        heaps[_ADDRESS, at], heaps[_BYTES, at], heaps[_BUFFERS, at] = state[_NEXT], have, 0
        ranges[_ADDRESS, place], ranges[_BYTES, place] = state[_NEXT], have
        counts[_HEAPS] += 1
        counts[_RANGES] += 1
        state[_NEXT] += have + PAGE
        state[_RESERVED] += have
    place = find(ranges[_ADDRESS], counts[_RANGES], heaps[_ADDRESS, at])
    end, best = heaps[_ADDRESS, at] + heaps[_BYTES, at], -1
    while place < counts[_RANGES] and ranges[_ADDRESS, place] < end:
        if ranges[_BYTES, place] >= size and (best < 0 or ranges[_BYTES, place] < ranges[_BYTES, best]):
            best = place
        place += 1
    address = ranges[_ADDRESS, best]
    if ranges[_BYTES, best] > size:
        ranges[_ADDRESS, best] += size
        ranges[_BYTES, best] -= size
    else:
        delete_at(ranges[_ADDRESS], counts[_RANGES], best)
        delete_at(ranges[_BYTES], counts[_RANGES], best)
        counts[_RANGES] -= 1
    heaps[_BUFFERS, at] += 1
    _measure(counts, ranges, heaps, at)
    return address


@compiled("void(int64[::1], int64[:, ::1], int64[:, ::1], int64[:, ::1], int64[::1], int64, boolean)")
def _release_buffer(
    counts: np.ndarray, freed: np.ndarray, ranges: np.ndarray, heaps: np.ndarray, state: np.ndarray, index: int, keep_heap: bool
) -> None:  # fmt: skip
    """Give a freed buffer back to its heap, and, unless it is to be kept, a heap without buffers back to the driver."""
    size, address = freed[0, index], freed[1, index]
    delete_by_size(freed, counts[_FREED], index)
    counts[_FREED] -= 1
    at, place = find(heaps[_ADDRESS], counts[_HEAPS], address + 1) - 1, find(ranges[_ADDRESS], counts[_RANGES], address)
    if place < counts[_RANGES] and ranges[_ADDRESS, place] == address + size:
        size += ranges[_BYTES, place]
        delete_at(ranges[_ADDRESS], counts[_RANGES], place)
        delete_at(ranges[_BYTES], counts[_RANGES], place)
        counts[_RANGES] -= 1
    if place > 0 and ranges[_ADDRESS, place - 1] + ranges[_BYTES, place - 1] == address:
        place -= 1
        ranges[_BYTES, place] += size
    else:
        insert_at(ranges[_ADDRESS], counts[_RANGES], place, address)
        insert_at(ranges[_BYTES], counts[_RANGES], place, size)
        counts[_RANGES] += 1
    heaps[_BUFFERS, at] -= 1
    if heaps[_BUFFERS, at] or keep_heap:
        _measure(counts, ranges, heaps, at)
        return
    state[_RESERVED] -= heaps[_BYTES, at]
    delete_at(ranges[_ADDRESS], counts[_RANGES], place)
    delete_at(ranges[_BYTES], counts[_RANGES], place)
    counts[_RANGES] -= 1
    for row in range(4):
        delete_at(heaps[row], counts[_HEAPS], at)
    counts[_HEAPS] -= 1


@compiled("int64(int64[::1], int64[:, ::1], int64[:, ::1], int64[:, ::1], int64[::1], int64)")
def _cached(
    counts: np.ndarray, freed: np.ndarray, ranges: np.ndarray, heaps: np.ndarray, state: np.ndarray, size: int
) -> int:
    """Return the index of a freed buffer to reuse (get_free_buffer); -1 if there is none. It may release some of them."""
    if size > state[_LIMIT] - state[_RESERVED]:
        return -1
    at, count = by_size(freed, counts[_FREED], size, 0), counts[_FREED]
    if at < count:
        if freed[0, at] <= size + LARGE_HEAP:
            return at
        if _tightest(counts, heaps, size) < 0:
            _release_buffer(counts, freed, ranges, heaps, state, at, True)
    elif size > SMALL_SIZE and count and freed[0, count - 1] >= size - size // NEAR_FIT:
        _release_buffer(counts, freed, ranges, heaps, state, count - 1, False)
    return -1


@compiled("boolean(int64[::1], int64[:, ::1], int64[:, ::1], int64[:, ::1], int64[::1], int64)")
def _release_enough(
    counts: np.ndarray, freed: np.ndarray, ranges: np.ndarray, heaps: np.ndarray, state: np.ndarray, size: int
) -> bool:
    """Release one freed buffer that is large enough, else the largest ones (release_available_cached_buffers)."""
    at = by_size(freed, counts[_FREED], size, 0)
    if at < counts[_FREED]:
        _release_buffer(counts, freed, ranges, heaps, state, at, False)
        return True
    released = 0
    while counts[_FREED] and released < size:
        released += freed[0, counts[_FREED] - 1]
        _release_buffer(counts, freed, ranges, heaps, state, counts[_FREED] - 1, False)
    return released >= size


@compiled("void(int64[:, ::1], int64[:, :, ::1], int64[:, :, ::1], int64[:, :, ::1], int64[::1])")
def _release_cached(
    counts: np.ndarray, freed: np.ndarray, ranges: np.ndarray, heaps: np.ndarray, state: np.ndarray
) -> None:
    """Give every freed buffer back, and the heaps that are then empty (release_cached_buffers, emptyCache)."""
    for which in range(2):
        while counts[which, _FREED]:
            last = counts[which, _FREED] - 1
            _release_buffer(counts[which], freed[which], ranges[which], heaps[which], state, last, False)


@compiled(
    "int64(int64[::1], int64, int64[::1], int64[::1], int64[:, ::1], int64[:, :, ::1], int64[:, :, ::1], int64[:, :, ::1], "
    "int64[::1], int64[:, ::1], int64)"
)
def _run(
    events: np.ndarray, begin: int, block_bytes: np.ndarray, addresses: np.ndarray, counts: np.ndarray, freed: np.ndarray,
    ranges: np.ndarray, heaps: np.ndarray, state: np.ndarray, grown: np.ndarray, emptied: int,
) -> int:  # fmt: skip
    """Return the position of the first event from `begin` on that finds no room; the number of events if all were done.

    Args:
        events, block_bytes, addresses: as in MpsHeaps.run.
        grown: [2, ..], positions and the bytes held from there on.
        emptied: position at which no buffer is cached.
    """
    for position in range(begin, len(events)):
        event = events[position]
        block = event if event >= 0 else ~event
        size, held = block_bytes[block], state[_RESERVED]
        if size == 0:
            continue
        which = 0 if size <= SMALL_SIZE else 1
        count, buffers, free, heap = counts[which], freed[which], ranges[which], heaps[which]
        if event < 0:
            insert_by_size(buffers, count[_FREED], size, addresses[block])
            count[_FREED] += 1
            continue
        at = _cached(count, buffers, free, heap, state, size)
        if at >= 0:
            block_bytes[block], addresses[block] = buffers[0, at], buffers[1, at]
            delete_by_size(buffers, count[_FREED], at)
            count[_FREED] -= 1
            continue
        address = _new_buffer(count, free, heap, state, size)
        if address < 0 and position != emptied and _release_enough(count, buffers, free, heap, state, size):
            address = _new_buffer(count, free, heap, state, size)
        if state[_RESERVED] != held:
            grown[0, state[_GROWN]], grown[1, state[_GROWN]] = position, state[_RESERVED]
            state[_GROWN] += 1
        if address < 0:
            return position
        addresses[block] = address
    return len(events)


class MpsHeaps:
    """Heaps of both pools; `reserved` is their bytes, the largest part of torch.mps.driver_allocated_memory().

    All streams are one here; else it is as CudaCache.
    """

    def __init__(self, capacity: int | None = None):
        self.capacity = capacity
        self.retries = 0
        self.started = self.position = 0
        self.grown: list[tuple[int, int]] = [(0, 0)]
        self.given_back: list[int] = []
        self._state = np.array([0, _ENDLESS if capacity is None else capacity, 0, 0], np.int64)
        self._counts = np.zeros((2, 3), np.int64)
        self._arrays = [np.empty((2, rows, 0), np.int64) for rows in (2, 2, 4)]

    @property
    def reserved(self) -> int:
        """Bytes held from the driver."""
        return int(self._state[_RESERVED])

    def use(self, stream: int) -> None:
        """Do nothing: its buffers are not kept apart by streams."""

    def round_up(self, sizes: Sequence[int]) -> np.ndarray:
        """Return the bytes of buffers for requests; 0 stays 0 and needs no request."""
        return buffer_sizes(sizes)

    def run(self, events: np.ndarray, block_bytes: np.ndarray, addresses: np.ndarray) -> bool:
        """Return whether events (see Tape) found room.

        `block_bytes` has the bytes of each requested buffer, and is overwritten with those of the allocated buffer. All three are
        of int64. If there is no room, and releasing the nearest buffers made none, all buffers are released and the request is
        tried once more.
        """
        self._make_room(len(events))
        # up to three of one event: buffers released for it, the release of all, and its own buffer
        held, grown = self.reserved, np.empty((2, 3 * len(events)), np.int64)
        self._state[_GROWN], begin, emptied = 0, 0, -1
        while True:
            begin = _run(events, begin, block_bytes, addresses, self._counts, *self._arrays, self._state, grown, emptied)
            self.position = begin
            if begin in (len(events), emptied):
                self.grown = [(0, held), *map(tuple, grown[:, : self._state[_GROWN]].T.tolist())]
                return begin == len(events)
            self.retries, emptied = self.retries + 1, begin
            self.release_cached()
            grown[:, self._state[_GROWN]] = begin, self.reserved
            self._state[_GROWN] += 1

    def release_cached(self, stream: int = 0) -> None:
        """Return unused buffers to the device (release_cached_buffers)."""
        self.given_back.append(self.started + self.position)
        _release_cached(self._counts, *self._arrays, self._state)

    def _make_room(self, events: int) -> None:
        """Make room for the additions of this number of events.

        Each may add a buffer, freed or in a separate heap; a freed one may leave a range.
        """
        freed, ranges, heaps = self._counts.max(axis=0).tolist()
        for place, needed in enumerate((freed + events, ranges + freed + events, heaps + events)):
            array = self._arrays[place]
            if (room := array.shape[2]) < needed:
                larger = np.empty((2, array.shape[1], max(needed, 2 * room)), np.int64)
                larger[:, :, :room] = array
                self._arrays[place] = larger

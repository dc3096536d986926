"""Addresses of a tape's blocks in a device's allocator, and the segments around them. `replay` only counts bytes.

A segment is one cudaMalloc, or with expandable segments a run of mapped pages. A new segment begins if a block is in no known
one. Segments without a block are released to the driver when the allocator retries.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from sizer.allocator.allocator import allocator_of
from sizer.allocator.cuda import LARGE_SEGMENT, MIN_BLOCK, SMALL_SEGMENT, SMALL_SIZE, PrivatePools, segment_size
from sizer.allocator.loop_replay import place
from sizer.allocator.timeline import running_bytes
from sizer.catalogue.gpus import Gpu
from sizer.tape.tape import Tape


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Addresses and bytes that an allocator assigned to each block of a tape, and the bytes reserved after each event.

    Tensors of 0 bytes take nothing and have no address, which is 0. `given_back` are the positions of the events at which cached
    memory went back to the driver. All is as long as the work went: `failed_at` is the first request that could not be met.
    """

    addresses: list[int]
    block_bytes: list[int]
    reserved: list[int] = field(default_factory=list)
    given_back: list[int] = field(default_factory=list)
    failed_at: int | None = None

    def peak(self, tape: Tape) -> tuple[int, int]:
        """Return the number of events up to the allocated peak (the first of several), and the bytes allocated there."""
        allocated = running_bytes(tape.order[: len(self.reserved)], self.block_bytes)
        most = max(allocated)
        return allocated.index(most), most


def find_addresses(tape: Tape, gpu: Gpu, *, expandable_segments: bool = False) -> Addresses:
    """Return the addresses of a tape's blocks on a device, or on a large enough one if the work does not fit."""
    roomy = _find(tape, gpu, None, expandable_segments)
    capacity = gpu.total_bytes - gpu.context_bytes
    if max(roomy.reserved, default=0) <= capacity:
        return roomy
    tight = _find(tape, gpu, capacity, expandable_segments)
    return roomy if tight.failed_at is not None else tight


def _find(tape: Tape, gpu: Gpu, capacity: int | None, expandable_segments: bool) -> Addresses:
    allocator = allocator_of(gpu.backend, capacity, expandable_segments, by_address=tape.by_address)
    found = place(tape, allocator)
    return Addresses(
        addresses=found.addresses.tolist(),
        block_bytes=found.block_bytes.tolist(),
        reserved=found.reserved.tolist(),
        given_back=allocator.given_back,
        failed_at=found.failed_at,
    )


# Between the ranges of small and of large blocks of each stream, which all begin at 0 in sizer.allocator.cuda.
RANGE = 2**44


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentEvent:
    """A segment that is taken from the driver ("segment_alloc", "segment_map") or given back ("segment_free", "segment_unmap")."""

    action: str
    address: int
    bytes: int


class Segments:
    """The segments around blocks that come and go: by address the bytes of each, and the blocks in them, `live`, with theirs."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.live: dict[int, int] = {}
        self._starts: list[int] = []
        self._streams: dict[int, int] = {}  # by address of a segment
        self._private = PrivatePools()

    def address_of(self, address: int, size: int, stream: int) -> int:
        """Return the address, in one space for all blocks, of a block of a stream that takes `size` bytes."""
        return address

    def stream_at(self, address: int) -> int:
        """Return the stream of the segment at an address."""
        return self._streams[address]

    def is_small(self, address: int) -> bool:
        """Return whether the segment at an address is one of the pool for small requests."""
        return self.sizes[address] == SMALL_SEGMENT

    def allocate(self, address: int, size: int, stream: int) -> Iterator[SegmentEvent]:
        """Take up a block; yields the segment that was taken from the driver for it, if any."""
        if self.segment_of(address) is None:
            self._streams[address] = stream
            self.sizes[address] = segment_size(-(-size // MIN_BLOCK) * MIN_BLOCK)
            insort(self._starts, address)
            yield SegmentEvent(action="segment_alloc", address=address, bytes=self.sizes[address])
        self.live[address] = size

    def release(self, address: int) -> None:
        """Release a block."""
        del self.live[address]

    def release_free(self, pool: int = 0) -> Iterator[SegmentEvent]:
        """Give back every segment without a block that PrivatePools says, where `pool` may be deleted; yields them."""
        used = {self.segment_of(address) for address in self.live}
        streams = self._private.given_back({*self._streams.values()}, pool)
        for start in [start for start in self._starts if start not in used and self._streams[start] in streams]:
            self._starts.remove(start)
            yield SegmentEvent(action="segment_free", address=start, bytes=self.sizes.pop(start))

    def segment_of(self, address: int) -> int | None:
        """Return the address of the segment that contains an address, None if none does."""
        place = bisect_right(self._starts, address) - 1
        if place < 0:
            return None
        start = self._starts[place]
        return start if address < start + self.sizes[start] else None


class ExpandableSegments:
    """As Segments, for address ranges that grow page by page: one for small and one for large blocks of each stream."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self._pages: dict[int, int] = {}  # address -> size of every mapped page
        self._private = PrivatePools()

    @property
    def sizes(self) -> dict[int, int]:
        """By address the bytes of each run of mapped pages."""
        runs: dict[int, int] = {}
        start = end = -1
        for page in sorted(self._pages):
            if page != end:
                start = end = page
            end += self._pages[page]
            runs[start] = end - start
        return runs

    def address_of(self, address: int, size: int, stream: int) -> int:
        """Return the address, in one space for all blocks, of a block of a stream that takes `size` bytes."""
        return (2 * stream + (size > SMALL_SIZE)) * RANGE + address

    def stream_at(self, address: int) -> int:
        """Return the stream of the segment at an address."""
        return address // RANGE // 2

    def is_small(self, address: int) -> bool:
        """Return whether the segment at an address is one of the range for small requests."""
        return address // RANGE % 2 == 0

    def allocate(self, address: int, size: int, stream: int) -> Iterator[SegmentEvent]:
        """Take up a block; yields the pages that were mapped for it."""
        self.live[address] = size
        for page, length in self._pages_of(address, size):
            if page not in self._pages:
                self._pages[page] = length
                yield SegmentEvent(action="segment_map", address=page, bytes=length)

    def release(self, address: int) -> None:
        """Release a block."""
        del self.live[address]

    def release_free(self, pool: int = 0) -> Iterator[SegmentEvent]:
        """Unmap every page without a block that PrivatePools says, where `pool` may be deleted; yields them."""
        used = {page for address, size in self.live.items() for page, _ in self._pages_of(address, size)}
        streams = self._private.given_back({self.stream_at(page) for page in self._pages}, pool)
        for page in [page for page in self._pages if page not in used and self.stream_at(page) in streams]:
            yield SegmentEvent(action="segment_unmap", address=page, bytes=self._pages.pop(page))

    def _pages_of(self, address: int, size: int) -> Iterator[tuple[int, int]]:
        length = SMALL_SEGMENT if self.is_small(address) else LARGE_SEGMENT
        base = address // RANGE * RANGE
        for number in range((address - base) // length, -(-(address - base + size) // length)):
            yield base + number * length, length

"""The CUDA caching allocator with segments of its default kind, by the rules of sizer.allocator.cuda.

It imports Numba (sizer.allocator.best_fit), so this module is imported only when an allocator is made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from sizer.allocator.best_fit import Driver, Pools
from sizer.allocator.cuda import PrivatePools, round_up


class CudaCache:
    """Segments and the free blocks of both pools of each stream; `reserved` is the bytes held from the driver.

    A segment belongs to one pool of one stream, and a gap of addresses separates it from the next. `by_address`: see Tape.
    `grown` lists of the last run the number of events done and the reserved bytes then. `position` is the event with a segment
    that the capacity forbade at first. `started` is the position in a tape at which the run began. `given_back` are the
    positions in the tape of the events that released cached memory.
    """

    def __init__(self, capacity: int | None = None, *, by_address: bool = False):
        self.capacity = capacity
        self.retries = 0
        self.started = self.position = 0
        self.grown: list[tuple[int, int]] = [(0, 0)]
        self.given_back: list[int] = []
        self._driver = Driver(capacity, by_address=by_address)
        self._pools: defaultdict[int, Pools] = defaultdict(Pools)  # by stream
        self._segments: dict[int, int] = {}  # start -> size
        self._private = PrivatePools()
        self.use(0)

    @property
    def reserved(self) -> int:
        """Bytes held from the driver."""
        return self._driver.reserved

    def use(self, stream: int) -> None:
        """Allocate and release on this stream from now on."""
        self._used = self._pools[stream]

    def round_up(self, sizes: Sequence[int]) -> np.ndarray:
        """Return bytes rounded as requests are (round_size); 0 stays 0 and needs no request."""
        return round_up(sizes)

    def run(self, events: np.ndarray, block_bytes: np.ndarray, addresses: np.ndarray) -> bool:
        """Return whether events (see Tape) found room.

        `block_bytes` has the requested bytes of each block, rounded, and is overwritten with the bytes taken. All three are of
        int64. If the capacity forbids no segment, this is compiled code (best_fit).
        """
        self.grown = [(0, self.reserved)]
        position = 0
        while True:
            position, wanted, made = self._used.run(events, position, block_bytes, addresses, self._driver)
            for at, address, size in made:
                self._segments[address] = size
                self.grown.append((at, self.grown[-1][1] + size))
            if position == len(events):
                return True
            self.position = position
            segment = self._new_segment(wanted)
            if segment is None:
                return False
            self._used.insert(*segment)
            self.grown.append((position, self.reserved))

    def _new_segment(self, size: int) -> tuple[int, int] | None:
        """(address, size) of a new segment, if need be after all free ones went back to the driver; None: no room."""
        if self.capacity is not None and self.reserved + size > self.capacity:
            self.release_cached()
            self.retries += 1
            if self.reserved + size > self.capacity:
                return None
        address = self._driver.give(size)
        self._segments[address] = size
        return address, size

    def release_cached(self, stream: int = 0) -> None:
        """Release every completely free segment to the driver (release_cached_blocks, releasePool).

        Private pools in use are kept. For a deleted private pool only its segments are released.
        """
        self.given_back.append(self.started + self.position)
        for given_back in self._private.given_back(self._pools, stream):
            for address, size in self._pools[given_back].take_out(self._segments):
                del self._segments[address]
                self._driver.take_back(size)

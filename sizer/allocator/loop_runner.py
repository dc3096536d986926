"""The loops of a tape (sizer.tape.loops) on an allocator: every step of them, each event where the allocator would put it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from sizer.allocator.loop_sums import Sums
from sizer.allocator.replay import LoopReplay
from sizer.tape.loops import Repetition
from sizer.tape.tape import Tape


class Pools(Protocol):
    """An allocator whose free blocks are kept apart by streams. `run` is as in CudaCache, for the stream last named to `use`."""

    capacity: int | None
    grown: list[tuple[int, int]]
    started: int
    position: int
    given_back: list[int]

    @property
    def reserved(self) -> int:
        """Bytes held from the driver."""

    @property
    def retries(self) -> int:
        """Return how often cached memory was given back."""

    def rounded(self, sizes: Sequence[int]) -> np.ndarray:
        """Bytes as they are asked of the pools, 0 for nothing."""

    def use(self, stream: int) -> None:
        """From here on all that is asked for and released is of this stream."""

    def run(self, events: np.ndarray, taken: np.ndarray, addresses: np.ndarray) -> bool:
        """Return whether the events found room."""

    def release_cached(self, stream: int = 0) -> None:
        """Give back to the device what no block uses (`torch.cuda.empty_cache()`), or a deleted private pool (see Tape) caches."""


class LoopRunner:
    """The loops of one tape on one allocator. `taken` and `addresses` are by block; in a loop they are those of its last step."""

    def __init__(self, pools: Pools, taken: np.ndarray, addresses: np.ndarray) -> None:
        self.pools, self.taken, self.addresses = pools, taken, addresses

    def run(self, tape: Tape, again: Repetition, rounded: Iterable[np.ndarray], before: np.ndarray) -> LoopReplay:
        """Every step of a loop, up to the first request that finds no room.

        `rounded` are the bytes of the step's blocks each time, as they are asked for, `before` the bytes alive by category. The
        `position` of the pools is then that of the refused request in its step.
        """
        pools, taken, addresses = self.pools, self.taken, self.addresses
        sums = Sums(tape, again, before, taken)
        old, later = again.moves.T
        for sizes in rounded:
            taken[old], addresses[old] = taken[later], addresses[later]
            taken[again.blocks] = sizes
            reserved = pools.reserved
            done = pools.run(again.events, taken, addresses)
            if not done:
                sums.refused(taken[again.blocks], pools.position)
                break
            sums.add(taken[again.blocks], reserved, pools.grown[1:])
        return sums.found()

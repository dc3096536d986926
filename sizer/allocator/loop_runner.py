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
    """An allocator with separate free blocks for each stream. `run` is as in CudaCache, for the stream last passed to `use`."""

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
        """Return the bytes that the pools are asked for, 0 for no request."""

    def use(self, stream: int) -> None:
        """Allocate and release on this stream from now on."""

    def run(self, events: np.ndarray, taken: np.ndarray, addresses: np.ndarray) -> bool:
        """Return whether the events found room."""

    def release_cached(self, stream: int = 0) -> None:
        """Return unused memory to the device (`torch.cuda.empty_cache()`), or the cache of a deleted private pool (see Tape)."""


class LoopRunner:
    """The loops of one tape on one allocator. `taken` and `addresses` are by block; in a loop they are those of its last step."""

    def __init__(self, pools: Pools, taken: np.ndarray, addresses: np.ndarray) -> None:
        self.pools, self.taken, self.addresses = pools, taken, addresses

    def run(self, tape: Tape, again: Repetition, rounded: Iterable[np.ndarray], before: np.ndarray) -> LoopReplay:
        """Run every step of a loop, up to the first request that finds no room.

        `rounded` has the requested bytes of the step's blocks for each repetition, `before` the bytes alive by category. The
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

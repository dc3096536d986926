"""Replay of a tape through a device's allocator: the bytes that each block takes, and the reserved bytes around it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sizer.allocator import cuda, mps
from sizer.allocator.loop_replay import Pools, place
from sizer.allocator.replay import Cache, Replay, run_events
from sizer.allocator.timeline import Timeline, read_timeline
from sizer.catalogue.gpus import Backend
from sizer.tape.tape import Tape


def replay(
    tape: Tape, *, backend: Backend, capacity_bytes: int | None = None, expandable_segments: bool = False
) -> Timeline:
    """Return the memory of a tape in bytes, phase by phase, as the allocator of `backend` would count it.

    `capacity_bytes` is the limit of reserved memory (the device's memory less the context); None is no limit. If the work does
    not fit, the timeline's `out_of_memory` names the failing request: that is a value, not an error. `expandable_segments` is
    PyTorch's option of that name, for CUDA only. A tensor of 0 bytes takes nothing. Raises ValueError for an unknown backend.
    Source: see sizer.allocator.cuda and .mps. The CPU's allocator has no cache and does not round, so its reserved
    bytes are the allocated bytes.

    *Known limitations*: one process, default allocator settings; other streams have always reached the events that a block
    waits for.
    """
    return read_timeline(tape, replay_events(tape, backend, capacity_bytes, expandable_segments))


def replay_events(
    tape: Tape, backend: Backend, capacity_bytes: int | None = None, expandable_segments: bool = False
) -> Replay:
    """Return the bytes taken by every block of a tape and reserved after every event; `replay` reads the timeline from it."""
    if expandable_segments and backend != "cuda":
        raise ValueError(f"expandable_segments was asked for on {backend!r}; only 'cuda' has it: leave it False")
    return place(tape, allocator_of(backend, capacity_bytes, expandable_segments, by_address=tape.by_address))


def allocator_of(
    backend: Backend, capacity: int | None, expandable_segments: bool, *, by_address: bool = False
) -> Pools:
    """Return the allocator of a device with a limit of `capacity` reserved bytes, None for no limit; `by_address`: see Tape."""
    if backend == "cuda" and expandable_segments:
        from sizer.allocator.expandable_cache import ExpandableCache  # not before: it brings Numba

        return ExpandableCache(capacity)
    if backend == "cuda":
        from sizer.allocator.cuda_cache import CudaCache  # as above

        return CudaCache(capacity, by_address=by_address)
    if backend == "mps":
        from sizer.allocator.heaps import MpsHeaps  # as above

        return MpsHeaps(capacity)
    if backend == "cpu":
        return OnePool(PlainMemory(capacity))
    raise ValueError(f"backend was {backend!r}; allowed are 'cuda', 'mps' and 'cpu'")


def describe(backend: Backend, *, expandable_segments: bool = False) -> tuple[str, ...]:
    """Describe how the allocator of a backend works, in words with its own constants."""
    if backend == "cuda":
        return cuda.describe_expandable() if expandable_segments else cuda.describe()
    return (
        mps.describe()
        if backend == "mps"
        else ("the plain sum of tensor bytes: the CPU's allocator keeps nothing back",)
    )


class PlainMemory:
    """The CPU's allocator: no rounding and no cache (c10/core/impl/alloc_cpu.cpp), so reserved bytes are bytes in use."""

    def __init__(self, capacity: int | None = None):
        self.capacity = capacity
        self.reserved = 0
        self.retries = 0

    def allocate(self, size: int) -> tuple[int, int] | None:
        """(0, size), or None past the capacity: nothing here depends on addresses."""
        if self.capacity is not None and self.reserved + size > self.capacity:
            return None
        self.reserved += size
        return 0, size

    def release(self, address: int, size: int) -> None:
        """Take back `size` bytes."""
        self.reserved -= size

    def release_cached(self) -> None:
        """Do nothing: nothing is kept back."""


class OnePool:
    """Adapter of an allocator that is called event by event, with the interface of one with pools."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.capacity = cache.capacity
        self.started = self.position = 0
        self.grown: list[tuple[int, int]] = [(0, 0)]
        self.given_back: list[int] = []

    @property
    def reserved(self) -> int:
        """Bytes held from the driver."""
        return self.cache.reserved

    @property
    def retries(self) -> int:
        """Return how often cached memory was given back."""
        return self.cache.retries

    def allocate(self, size: int) -> tuple[int, int] | None:
        """Return the address and size that the cache allocates."""
        return self.cache.allocate(size)

    def release(self, address: int, size: int) -> None:
        """Take back a block."""
        self.cache.release(address, size)

    def release_cached(self, stream: int = 0) -> None:
        """Return unused memory to the device."""
        self.given_back.append(self.started + self.position)
        self.cache.release_cached()

    def round_up(self, sizes: Sequence[int]) -> np.ndarray:
        """Return the bytes unchanged: the cache rounds them itself."""
        return np.asarray(sizes, np.int64)

    def use(self, stream: int) -> None:
        """Do nothing: its blocks are not kept apart by streams."""

    def run(self, events: np.ndarray, block_bytes: np.ndarray, addresses: np.ndarray) -> bool:
        """Return whether events found room, as CudaCache has it."""
        return run_events(self, events, block_bytes, addresses)

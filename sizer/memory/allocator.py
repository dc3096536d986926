"""Replay of a tape through a device's allocator: what each block really takes, and what is reserved around it."""

from __future__ import annotations

from typing import Protocol

from sizer.catalogue.gpus import Backend
from sizer.memory import cuda, expandable, mps
from sizer.memory.tape import Tape
from sizer.memory.timeline import Replay, Timeline, read_timeline


class Cache(Protocol):
    """An allocator that is asked event by event. Requests are of more than 0 bytes; addresses are the allocator's own."""

    reserved: int
    retries: int

    def allocate(self, size: int) -> tuple[int, int] | None:
        """(address, bytes really taken), or None where the device has no memory left."""

    def release(self, address: int, size: int) -> None:
        """Take back the block at `address` that took `size` bytes."""

    def release_cached(self) -> None:
        """Give back to the device what no block uses (`torch.cuda.empty_cache()`)."""


def replay(
    tape: Tape, *, backend: Backend, capacity_bytes: int | None = None, expandable_segments: bool = False
) -> Timeline:
    """The memory of a tape in bytes, phase by phase, as the allocator of `backend` would count it.

    `capacity_bytes` is what the allocator may reserve (the device's memory less the context); None is without bound.
    Where the work does not fit, the timeline's `out_of_memory` says at which request: that is a value, not an error.
    `expandable_segments` is PyTorch's option of that name, for CUDA only. A tensor of 0 bytes takes nothing. Raises
    ValueError for an unknown backend.

    Source: see sizer.memory.cuda, .expandable and .mps. The CPU's allocator keeps no cache and does not round, so there
    reserved is allocated.
    *Known limitations*: one stream, one process, default allocator settings.
    """
    return read_timeline(tape, replay_events(tape, backend, capacity_bytes, expandable_segments))


def replay_events(
    tape: Tape, backend: Backend, capacity_bytes: int | None = None, expandable_segments: bool = False
) -> Replay:
    """Bytes taken by every block of a tape and reserved after every event; `replay` reads the timeline from it."""
    if expandable_segments and backend != "cuda":
        raise ValueError(f"expandable_segments was asked for on {backend!r}; only 'cuda' has it: leave it False")
    if backend == "cuda":
        if expandable_segments:
            return _fill(tape, expandable.ExpandableCache(capacity_bytes))
        return cuda.CudaCache(capacity_bytes).place(tape)
    if backend == "mps":
        return _fill(tape, mps.MpsHeaps(capacity_bytes))
    if backend == "cpu":
        return _fill(tape, PlainMemory(capacity_bytes))
    raise ValueError(f"backend was {backend!r}; allowed are 'cuda', 'mps' and 'cpu'")


def describe(backend: Backend, *, expandable_segments: bool = False) -> tuple[str, ...]:
    """How the allocator of a backend works, in words with its own constants."""
    if backend == "cuda":
        return expandable.describe() if expandable_segments else cuda.describe()
    return (
        mps.describe()
        if backend == "mps"
        else ("the plain sum of tensor bytes: the CPU's allocator keeps nothing back",)
    )


class PlainMemory:
    """The CPU's allocator: no rounding and no cache (c10/core/impl/alloc_cpu.cpp), so reserved is what is in use."""

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


def _fill(tape: Tape, cache: Cache) -> Replay:
    """Run every event of a tape through an allocator; stops at the first request that it cannot meet."""
    sizes, allocate, release, empties = tape.sizes, cache.allocate, cache.release, tape.empties()
    taken = [0] * len(sizes)
    addresses = [0] * len(sizes)
    reserved: list[int] = []
    failed_at = None
    for position, event in enumerate(tape.order):
        if event >= 0:
            if size := sizes[event]:
                block = allocate(size)
                if block is None:
                    failed_at = position
                    break
                addresses[event], taken[event] = block
            elif event in empties:
                cache.release_cached()
        elif size := taken[~event]:
            release(addresses[~event], size)
        reserved.append(cache.reserved)
    if failed_at is not None:
        reserved.append(cache.reserved)
    return Replay(taken=taken, addresses=addresses, reserved=reserved, retries=cache.retries, failed_at=failed_at)

"""Result of replaying a tape with an allocator: the value between the allocators and the timeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sizer.tape.tape import CATEGORIES


class Cache(Protocol):
    """An allocator that is called event by event. Requests are of more than 0 bytes; addresses are the allocator's own."""

    capacity: int | None

    @property
    def reserved(self) -> int:
        """Bytes held from the driver."""

    @property
    def retries(self) -> int:
        """Return how often cached memory was given back."""

    def allocate(self, size: int) -> tuple[int, int] | None:
        """(address, bytes really taken), or None where the device has no memory left."""

    def release(self, address: int, size: int) -> None:
        """Take back the block at `address` that took `size` bytes."""

    def release_cached(self) -> None:
        """Return unused memory to the device (`torch.cuda.empty_cache()`)."""


class RunCache(Cache, Protocol):
    """A cache that keeps the record of its last run by `run_events`."""

    position: int
    grown: list[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopReplay:
    """Result of replaying the steps of a loop, in bytes. Each recorded step has one row and `events` events.

    Args:
        times: The repetition of a row, from 1.
        peak_after: Number of the step's events up to its allocated peak.
        peaks, levels: Allocated bytes at the peak and at the step's end, [times, categories].
        reserved_at_peak, reserved: Reserved bytes at the peak and at the step's end.
        refused: Bytes of the first failed request, and the allocated bytes. It was in the step after the last row.
    """

    events: int
    times: np.ndarray
    peak_after: np.ndarray
    peaks: np.ndarray
    levels: np.ndarray
    reserved_at_peak: np.ndarray
    reserved: np.ndarray
    refused: tuple[int, int] | None = None

    @property
    def done(self) -> int:
        """Return how often the step came again."""
        return int(self.times[-1]) if len(self.times) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Result of replaying a tape, in bytes: `block_bytes` per block, `reserved` after each event.

    These are arrays of int64. `addresses` are per block, the allocator's own; those of blocks that took nothing are undefined.
    `failed_at` is the position of the first failed request, None if all succeeded. The last of `reserved` is then the bytes
    held after the release of every free segment.

    For a tape with loops all values are for the steps in the tape, except for the blocks of a loop's step, which are those of
    its last repetition. `changes` are the bytes by which each event changed the allocated bytes, `loops` the repeated steps. If
    the failed request was in one of these, the last of `loops` records it, and nothing follows it.
    """

    block_bytes: np.ndarray
    addresses: np.ndarray
    reserved: np.ndarray
    retries: int
    failed_at: int | None
    changes: np.ndarray
    loops: tuple[LoopReplay, ...] = ()

    @property
    def most_reserved(self) -> int:
        """The most bytes that were reserved after any event."""
        return max(int(held.max(initial=0)) for held in (self.reserved, *(loop.reserved for loop in self.loops)))


def changes_of(order: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
    """Return the bytes by which each event changes the bytes alive (int64); block i counts `sizes[i]` bytes."""
    events, sizes = np.asarray(order, np.int64), np.asarray(sizes, np.int64)
    return np.where(events >= 0, sizes[events], -sizes[~events])


def sums_by_category(changes: np.ndarray, categories: np.ndarray) -> np.ndarray:
    """Return the sum of bytes by category, in the order of CATEGORIES."""
    # whole numbers below 2**53, which float64 holds
    return np.bincount(categories, weights=changes, minlength=len(CATEGORIES)).astype(np.int64)


def sums_up_to(bounds: np.ndarray, changes: np.ndarray, categories: np.ndarray) -> np.ndarray:
    """Return the sum of bytes by category of the events before each bound: [bounds, categories]. Bounds ascend from 0."""
    parts, kinds = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))[: len(changes)], len(CATEGORIES)
    places = parts * kinds + categories[: len(parts)]
    sums = np.bincount(places, weights=changes[: len(parts)], minlength=(len(bounds) - 1) * kinds)  # as above
    return np.concatenate((np.zeros((1, kinds), np.int64), sums.astype(np.int64).reshape(-1, kinds).cumsum(0)))


def fill_reserved(reserved: np.ndarray, grown: Sequence[tuple[int, int]]) -> None:
    """Fill in the bytes reserved after each event; `grown` has the positions from which they changed, and the new bytes."""
    positions, held = np.asarray(grown, np.int64).T
    reserved[:] = np.repeat(held, np.diff(positions, append=len(reserved)))


def run_events(cache: RunCache, events: np.ndarray, block_bytes: np.ndarray, addresses: np.ndarray) -> bool:
    """Return whether events (see Tape) found room.

    `block_bytes` has the requested bytes of each block, and is overwritten with the bytes taken. All three are of int64. `grown` of
    the cache then has the numbers of events at which the reserved bytes changed, `position` the event that found no room.
    """
    blocks, places = np.unique(np.where(events >= 0, events, ~events), return_inverse=True)
    sizes, starts = block_bytes[blocks].tolist(), addresses[blocks].tolist()
    done = _run_each(cache, zip((events >= 0).tolist(), places.tolist(), strict=True), sizes, starts)
    block_bytes[blocks], addresses[blocks] = sizes, starts
    return done


def _run_each(cache: RunCache, events: Iterable[tuple[bool, int]], sizes: list[int], starts: list[int]) -> bool:
    allocate, release = cache.allocate, cache.release
    held = cache.reserved
    cache.grown = [(0, held)]
    for position, (asks, block) in enumerate(events):
        if not (size := sizes[block]):
            continue
        if asks:
            found = allocate(size)
            if found is None:
                cache.position = position
                return False
            starts[block], sizes[block] = found
        else:
            release(starts[block], size)
        if cache.reserved != held:
            held = cache.reserved
            cache.grown.append((position, held))
    return True

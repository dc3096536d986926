"""Result of replaying a tape with an allocator: the value between the allocators and the timeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sizer.tape.tape import CATEGORIES


class Cache(Protocol):
    """An allocator that is asked event by event. Requests are of more than 0 bytes; addresses are the allocator's own."""

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
        """Give back to the device what no block uses (`torch.cuda.empty_cache()`)."""


class RunCache(Cache, Protocol):
    """A cache that keeps what `run_events` says of its last run."""

    position: int
    grown: list[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopReplay:
    """Result of replaying the steps of a loop, in bytes. Each recorded step has one row and `events` events.

    times: which of the repetitions a row is of, from 1.
    peak_after: after how many events of the step most was allocated. peaks, levels: allocated then, and at the step's end,
    [times, categories]. reserved_at_peak, reserved: reserved then. refused: of the first request that could not be met its
    bytes, and those that were allocated; it came in the step after the last row.
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
    """Result of replaying a tape, in bytes: `taken` per block, `reserved` after each event.

    These are arrays of int64. `addresses` are per block, the allocator's own; those of blocks that took nothing mean nothing.
    `failed_at` is the position of the first request that could not be met, None where all were; the last of
    `reserved` is then what was still held after every free segment went back.
    Of a tape with loops all is as the tape holds its steps, but for the blocks of a loop's step, which are those of the last time;
    `changes` are the bytes by which each event changed what is allocated, `loops` the steps that came again. Where the request
    that could not be met was in one of these, it is the last of `loops` that says so, and nothing follows it.
    """

    taken: np.ndarray
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
    """By how many bytes each event changes what is alive (int64), where block i counts `sizes[i]` bytes."""
    events, sizes = np.asarray(order, np.int64), np.asarray(sizes, np.int64)
    return np.where(events >= 0, sizes[events], -sizes[~events])


def sums_by_category(changes: np.ndarray, categories: np.ndarray) -> np.ndarray:
    """Bytes together by category, in the order of CATEGORIES."""
    # whole numbers below 2**53, which float64 holds
    return np.bincount(categories, weights=changes, minlength=len(CATEGORIES)).astype(np.int64)


def sums_up_to(bounds: np.ndarray, changes: np.ndarray, categories: np.ndarray) -> np.ndarray:
    """Bytes together by category of the events before each of some bounds, which ascend from 0: [bounds, categories]."""
    parts, kinds = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))[: len(changes)], len(CATEGORIES)
    places = parts * kinds + categories[: len(parts)]
    sums = np.bincount(places, weights=changes[: len(parts)], minlength=(len(bounds) - 1) * kinds)  # as above
    return np.concatenate((np.zeros((1, kinds), np.int64), sums.astype(np.int64).reshape(-1, kinds).cumsum(0)))


def fill_reserved(reserved: np.ndarray, grown: Sequence[tuple[int, int]]) -> None:
    """Fill in the bytes reserved after each event, where from the event at a position on so many were, as `grown` says."""
    positions, held = np.asarray(grown, np.int64).T
    reserved[:] = np.repeat(held, np.diff(positions, append=len(reserved)))


def run_events(cache: RunCache, events: np.ndarray, taken: np.ndarray, addresses: np.ndarray) -> bool:
    """Return whether events (see Tape) found room; by block `taken` are the bytes asked for, which become those really taken.

    All three are of int64. `grown` of the cache then says after how many events how much was reserved, `position` which event found
    no room.
    """
    blocks, places = np.unique(np.where(events >= 0, events, ~events), return_inverse=True)
    sizes, starts = taken[blocks].tolist(), addresses[blocks].tolist()
    done = _run_each(cache, zip((events >= 0).tolist(), places.tolist(), strict=True), sizes, starts)
    taken[blocks], addresses[blocks] = sizes, starts
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

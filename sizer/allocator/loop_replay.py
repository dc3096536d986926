"""Replay of a tape with its loops (sizer.tape.loops): by an allocator, step by step, or by the bytes of its tensors alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from sizer.allocator.replay import LoopReplay, Replay, changes_of, fill_reserved, sums_by_category
from sizer.tape.loops import DEPTH, Repetition, repetitions
from sizer.tape.tape import CATEGORIES, Tape, by_stream, stream_of


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

    def round_up(self, sizes: Sequence[int]) -> np.ndarray:
        """Return the bytes that the pools are asked for, 0 for no request."""

    def use(self, stream: int) -> None:
        """Allocate and release on this stream from now on."""

    def run(self, events: np.ndarray, block_bytes: np.ndarray, addresses: np.ndarray) -> bool:
        """Return whether the events found room."""

    def release_cached(self, stream: int = 0) -> None:
        """Return unused memory to the device (`torch.cuda.empty_cache()`), or the cache of a deleted private pool (see Tape)."""


class LoopRunner:
    """The loops of one tape on one allocator. `block_bytes` and `addresses` are by block, in a loop of its last step."""

    def __init__(self, pools: Pools, block_bytes: np.ndarray, addresses: np.ndarray) -> None:
        self.pools, self.block_bytes, self.addresses = pools, block_bytes, addresses

    def run(self, tape: Tape, again: Repetition, step_sizes: Iterable[np.ndarray], before: np.ndarray) -> LoopReplay:
        """Run every step of a loop, up to the first request that finds no room.

        `step_sizes` has the requested bytes of the step's blocks for each repetition, `before` the bytes alive by category. The
        `position` of the pools is then that of the refused request in its step.
        """
        pools, block_bytes, addresses = self.pools, self.block_bytes, self.addresses
        sums = Sums(tape, again, before, block_bytes)
        old, later = again.moves.T
        for sizes in step_sizes:
            block_bytes[old], addresses[old] = block_bytes[later], addresses[later]
            block_bytes[again.blocks] = sizes
            reserved = pools.reserved
            done = pools.run(again.events, block_bytes, addresses)
            if not done:
                sums.refused(block_bytes[again.blocks], pools.position)
                break
            sums.add(block_bytes[again.blocks], reserved, pools.grown[1:])
        return sums.found()


Row = tuple[int, int, np.ndarray, np.ndarray, int, int]


class Sums:
    """Steps and bytes of a loop, by category."""

    def __init__(self, tape: Tape, again: Repetition, before: np.ndarray, block_bytes: np.ndarray) -> None:
        made = len(again.blocks)
        place_of = {block: place for place, block in enumerate(again.blocks.tolist())}
        place_of |= {block: steps * made + place for block, steps, place in again.earlier}
        blocks = np.where(again.events >= 0, again.events, ~again.events)
        self._again = again
        self._places = np.asarray([place_of[block] for block in blocks.tolist()], np.int64)
        self._signs = np.where(again.events >= 0, 1, -1)
        self.categories = np.frombuffer(tape.categories, np.uint8)[blocks]
        self._level = before.astype(np.int64)
        # bytes taken by block, in the last step and earlier ones
        self._history = [np.zeros(made, np.int64) for _ in range(DEPTH)]
        self._history[0][:] = block_bytes[again.blocks]
        successor = dict(again.moves.tolist())
        for block, steps, place in again.earlier:
            self._history[steps - 1][place] = block_bytes[successor[block]]
        self._rows: list[Row] = []
        self._refused: tuple[int, int] | None = None

    def add(self, block_bytes: np.ndarray, reserved: int, grown: list[tuple[int, int]]) -> None:
        """Add a step with blocks of `block_bytes` bytes.

        `reserved` are the reserved bytes before it; `grown` has the positions in it from which they changed.
        """
        changes = self.changes((block_bytes, *self._history))
        self._history = [block_bytes, *self._history[:-1]]
        levels = np.cumsum(changes)
        at = int(levels.argmax()) + 1
        peak = self._level + sums_by_category(changes[:at], self.categories[:at])
        self._level = self._level + sums_by_category(changes, self.categories)
        at_peak = next((held for place, held in reversed(grown) if place < at), reserved)
        self._rows.append((len(self._rows) + 1, at, peak, self._level, at_peak, grown[-1][1] if grown else reserved))

    def refused(self, block_bytes: np.ndarray, place: int) -> None:
        """Note the request, at a place in the step, that found no room."""
        asked = self._again.sizes_at(len(self._rows) + 1)[self._places[place]]
        self._refused = int(asked), int(self._level.sum() + self.changes((block_bytes, *self._history))[:place].sum())

    def found(self) -> LoopReplay:
        """Return the result of the added steps."""
        return loop_replay(len(self._again.events), self._rows, self._refused)

    def changes(self, sizes: Sequence[np.ndarray]) -> np.ndarray:
        """Return the bytes by which each event of a step changes the bytes alive.

        `sizes` are those of its blocks and of earlier steps' blocks.
        """
        return self._signs * np.concatenate(sizes)[self._places]


def loop_replay(events: int, rows: list[Row], refused: tuple[int, int] | None) -> LoopReplay:
    """Return the result of rows.

    A row has: repetition, events up to the peak, bytes by category then and at the end, reserved bytes then and at the end.
    """
    none = np.zeros((0, len(CATEGORIES)), np.int64)
    times, at, peaks, levels, at_peak, reserved = zip(*rows, strict=True) if rows else ((),) * 6
    return LoopReplay(
        events=events,
        times=np.asarray(times, np.int64),
        peak_after=np.asarray(at, np.int64),
        peaks=np.stack(peaks) if peaks else none,
        levels=np.stack(levels) if levels else none,
        reserved_at_peak=np.asarray(at_peak, np.int64),
        reserved=np.asarray(reserved, np.int64),
        refused=refused,
    )


def place(tape: Tape, pools: Pools) -> Replay:
    """Return the placement of a tape's blocks (bytes), up to the first that finds no room."""
    block_bytes, addresses = np.array(pools.round_up(tape.sizes)), np.zeros(len(tape.sizes), np.int64)
    runner = LoopRunner(pools, block_bytes, addresses)
    categories = np.frombuffer(tape.categories, np.uint8)
    order = np.asarray(tape.order, np.int64)
    changes, reserved, loops = np.zeros(len(order), np.int64), np.zeros(len(order) + 1, np.int64), []
    level, summed = np.zeros(len(CATEGORIES), np.int64), 0
    failed_at, begin = None, 0
    for end, again in _stops(tape):
        reached = begin
        for first, last, stream in by_stream(tape, begin, end):
            pools.use(stream)
            pools.started = first
            done = pools.run(order[first:last], block_bytes, addresses)
            reached = last if done else first + pools.position
            fill_reserved(reserved[first:reached], pools.grown)
            if not done:
                break
        changes[begin:reached] = changes_of(order[begin:reached], block_bytes)
        if reached < end:
            failed_at = reached
            break
        begin = end
        if again is None:
            if end < len(order):  # a call of empty_cache()
                pools.started, pools.position = end, 0
                pools.release_cached(stream_of(tape, int(order[end])))
            continue
        events = order[summed:end]
        level = level + sums_by_category(changes[summed:end], categories[np.where(events >= 0, events, ~events)])
        summed = end
        step_sizes = (pools.round_up(again.sizes_at(time)) for time in range(1, again.count + 1))
        loops.append(found := runner.run(tape, again, step_sizes, level))
        if found.refused is not None:
            failed_at = end - len(again.events) + pools.position
            break
        level = found.levels[-1].copy()
    if failed_at is not None:
        reserved[reached] = pools.reserved
        if not loops or loops[-1].refused is None:
            left = order[failed_at:]
            block_bytes[left[left >= 0]] = 0
    return Replay(
        block_bytes=block_bytes,
        addresses=addresses,
        reserved=reserved[: reached + (failed_at is not None)],
        retries=pools.retries,
        failed_at=failed_at,
        changes=changes,
        loops=tuple(loops),
    )


def _stops(tape: Tape) -> list[tuple[int, Repetition | None]]:
    """Return the interruptions of a tape's order: the end of a repeated step or of the tape, or emptied caches."""
    stops: list[tuple[int, Repetition | None]] = [(loop.end, again) for loop, again in repetitions(tape)]
    if empties := tape.empties():
        stops += [(position, None) for position, event in enumerate(tape.order) if event in empties]
        stops.sort(key=lambda stop: stop[0])
    return [*stops, (len(tape.order), None)]


def unplaced(tape: Tape, *, until: Replay | None = None) -> Replay:
    """Return a replay of a tape by the requested bytes of its tensors alone; up to the refused request of another replay."""
    failed_at = None if until is None else until.failed_at
    last = len(tape.order) if failed_at is None else failed_at
    loops, block_bytes = [], np.array(tape.sizes, np.int64)
    order, changes = np.asarray(tape.order, np.int64), np.zeros(len(tape.order), np.int64)
    level, begin = np.zeros(len(CATEGORIES), np.int64), 0
    categories = np.frombuffer(tape.categories, np.uint8)[np.where(order >= 0, order, ~order)]
    for number, (loop, again) in enumerate(repetitions(tape)):
        if until is not None and number >= len(until.loops):
            break
        changes[begin : loop.end] = changes_of(order[begin : loop.end], block_bytes)
        level = level + sums_by_category(changes[begin : loop.end], categories[begin : loop.end])
        times = again.count if until is None else until.loops[number].done
        loops.append(_unplaced_steps(tape, again, times, level))
        level, begin = loops[-1].levels[-1] if times else level, loop.end
        for time in range(max(1, times + 1 - DEPTH), times + 1):
            block_bytes[again.moves[:, 0]] = block_bytes[again.moves[:, 1]]
            block_bytes[again.blocks] = again.sizes_at(time)
        last = max(last, begin)
    changes[begin:last] = changes_of(order[begin:last], block_bytes)
    return Replay(
        block_bytes=block_bytes,
        addresses=np.zeros(len(block_bytes), np.int64),
        reserved=np.zeros(len(order), np.int64),
        retries=0,
        failed_at=failed_at if last < len(order) else None,
        changes=changes,
        loops=tuple(loops),
    )


def _unplaced_steps(tape: Tape, again: Repetition, times: int, before: np.ndarray) -> LoopReplay:
    """Return the first steps of a loop by their tensors' bytes: the changes of a step grow by the same bytes each time.

    If the bytes left by a step do not shrink, the peak is in the first step or in the last: the other steps have no row.
    """
    growth = again.growth
    sums = Sums(tape, again, before, np.asarray(tape.sizes, np.int64))
    first, more = (
        sums.changes((again.sizes, *(again.sizes - steps * growth for steps in range(1, DEPTH + 1)))),
        sums.changes((growth,) * (DEPTH + 1)),
    )
    left, more_left = (sums_by_category(one, sums.categories) for one in (first, more))
    chosen = [1, times] if times > 1 and more_left.sum() >= 0 else range(1, times + 1)
    rows = []
    for time in chosen:
        changes = first + time * more
        start = before + (time - 1) * left + (time - 1) * time // 2 * more_left
        at = int(np.cumsum(changes).argmax()) + 1
        peak = start + sums_by_category(changes[:at], sums.categories[:at])
        rows.append((time, at, peak, start + left + time * more_left, 0, 0))
    return loop_replay(len(again.events), rows, None)

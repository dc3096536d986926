"""Replay of a tape with its loops: by an allocator, or by the bytes of its tensors alone."""

from __future__ import annotations

import numpy as np

from sizer.allocator.loop_runner import LoopRunner, Pools
from sizer.allocator.loop_sums import Sums, loop_replay
from sizer.allocator.replay import LoopReplay, Replay, changes_of, fill_reserved, sums_by_category
from sizer.tape.loops import DEPTH, Repetition, repetitions
from sizer.tape.streams import by_stream, stream_of
from sizer.tape.tape import CATEGORIES, Tape


def place(tape: Tape, pools: Pools) -> Replay:
    """Return the placement of a tape's blocks (bytes), up to the first that finds no room."""
    taken, addresses = np.array(pools.rounded(tape.sizes)), np.zeros(len(tape.sizes), np.int64)
    runner = LoopRunner(pools, taken, addresses)
    categories = np.frombuffer(tape.categories, np.uint8)
    order = np.asarray(tape.order, np.int64)
    changes, reserved, loops = np.zeros(len(order), np.int64), np.zeros(len(order) + 1, np.int64), []
    level = np.zeros(len(CATEGORIES), np.int64)
    failed_at, begin = None, 0
    for end, again in _stops(tape):
        reached = begin
        for first, last, stream in by_stream(tape, begin, end):
            pools.use(stream)
            pools.started = first
            done = pools.run(order[first:last], taken, addresses)
            reached = last if done else first + pools.position
            fill_reserved(reserved[first:reached], pools.grown)
            if not done:
                break
        changes[begin:reached] = changes_of(order[begin:reached], taken)
        if reached < end:
            failed_at = reached
            break
        events = order[begin:end]
        level += sums_by_category(changes[begin:end], categories[np.where(events >= 0, events, ~events)])
        begin = end
        if again is None:
            if end < len(order):  # a call of empty_cache()
                pools.started, pools.position = end, 0
                pools.release_cached(stream_of(tape, int(order[end])))
            continue
        rounded = (pools.rounded(again.sizes_at(time)) for time in range(1, again.count + 1))
        loops.append(found := runner.run(tape, again, rounded, level))
        if found.refused is not None:
            failed_at = end - len(again.events) + pools.position
            break
        level = found.levels[-1].copy()
    if failed_at is not None:
        reserved[reached] = pools.reserved
        if not loops or loops[-1].refused is None:
            left = order[failed_at:]
            taken[left[left >= 0]] = 0
    return Replay(
        taken=taken,
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
    loops, taken = [], np.array(tape.sizes, np.int64)
    order, changes = np.asarray(tape.order, np.int64), np.zeros(len(tape.order), np.int64)
    level, begin = np.zeros(len(CATEGORIES), np.int64), 0
    categories = np.frombuffer(tape.categories, np.uint8)[np.where(order >= 0, order, ~order)]
    for number, (loop, again) in enumerate(repetitions(tape)):
        if until is not None and number >= len(until.loops):
            break
        changes[begin : loop.end] = changes_of(order[begin : loop.end], taken)
        level = level + sums_by_category(changes[begin : loop.end], categories[begin : loop.end])
        times = again.count if until is None else until.loops[number].done
        loops.append(_unplaced_steps(tape, again, times, level))
        level, begin = loops[-1].levels[-1] if times else level, loop.end
        for time in range(max(1, times + 1 - DEPTH), times + 1):
            taken[again.moves[:, 0]] = taken[again.moves[:, 1]]
            taken[again.blocks] = again.sizes_at(time)
        last = max(last, begin)
    changes[begin:last] = changes_of(order[begin:last], taken)
    return Replay(
        taken=taken,
        addresses=np.zeros(len(taken), np.int64),
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

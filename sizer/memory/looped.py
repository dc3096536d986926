"""Replay of a tape with its loops: by an allocator, or by the bytes of its tensors alone."""

from __future__ import annotations

import numpy as np

from sizer.memory.loop_runner import LoopRunner, Pools
from sizer.memory.loop_sums import Sums, loop_replay
from sizer.memory.loops import DEPTH, Repetition, repetitions
from sizer.memory.replay import LoopReplay, Replay, changes_of, reserved_after, sums_by_category
from sizer.memory.streams import by_stream
from sizer.memory.tape import CATEGORIES, Tape


def place(tape: Tape, pools: Pools) -> Replay:
    """What becomes of the blocks (bytes) of a tape, up to the first that finds no room."""
    taken, addresses = pools.rounded(tape.sizes).tolist(), [0] * len(tape.sizes)
    runner = LoopRunner(pools, taken, addresses)
    categories = np.frombuffer(tape.categories, np.uint8)
    order = np.asarray(tape.order, np.int64)
    changes, reserved, loops = np.zeros(len(order), np.int64), [], []
    level = np.zeros(len(CATEGORIES), np.int64)
    failed_at, begin = None, 0
    for end, again in _stops(tape):
        reached = _run(tape, (begin, end), pools, taken, addresses, reserved)
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
                pools.release_cached()
            continue
        rounded = (pools.rounded(again.sizes_at(time)) for time in range(1, again.count + 1))
        loops.append(found := runner.run(tape, again, rounded, level))
        if found.refused is not None:
            failed_at = end - len(again.events) + runner.failed_at
            break
        level = found.levels[-1].copy()
    if failed_at is not None:
        reserved.append(pools.reserved)
        if not loops or loops[-1].refused is None:
            for block in order[failed_at:][order[failed_at:] >= 0].tolist():
                taken[block] = 0
    return Replay(
        taken=taken,
        addresses=addresses,
        reserved=reserved,
        retries=pools.retries,
        failed_at=failed_at,
        changes=changes,
        loops=tuple(loops),
    )


def _run(
    tape: Tape, bounds: tuple[int, int], pools: Pools, taken: list[int], addresses: list[int], reserved: list[int]
) -> int:
    """Up to which of a tape's events in these bounds an allocator found room; `reserved` goes on with the bytes after each."""
    reached = bounds[0]
    for begin, end, stream in by_stream(tape, *bounds):
        pools.use(stream)
        pools.started = begin
        done = pools.run(tape.order[begin:end], taken, addresses)
        reached = end if done else begin + pools.position
        reserved += reserved_after(pools.grown, reached - begin)
        if not done:
            break
    return reached


def _stops(tape: Tape) -> list[tuple[int, Repetition | None]]:
    """Where the events of a tape's order do not simply go on: a step that comes again ends, caches are emptied, or all is done."""
    stops = [(loop.end, again) for loop, again in repetitions(tape)]
    if empties := tape.empties():
        stops += [(position, None) for position, event in enumerate(tape.order) if event in empties]
        stops.sort(key=lambda stop: stop[0])
    return [*stops, (len(tape.order), None)]


def unplaced(tape: Tape, *, until: Replay | None = None) -> Replay:
    """A tape by its tensors' bytes alone, as they are asked for; up to the request that another replay was refused."""
    failed_at = None if until is None else until.failed_at
    last = len(tape.order) if failed_at is None else failed_at
    loops, taken = [], list(tape.sizes)
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
            for block, later in again.moves:
                taken[block] = taken[later]
            for block, size in zip(again.blocks.tolist(), again.sizes_at(time).tolist(), strict=True):
                taken[block] = size
        last = max(last, begin)
    changes[begin:last] = changes_of(order[begin:last], taken)
    return Replay(
        taken=taken,
        addresses=[],
        reserved=[0] * len(order),
        retries=0,
        failed_at=failed_at if last < len(order) else None,
        changes=changes,
        loops=tuple(loops),
    )


def _unplaced_steps(tape: Tape, again: Repetition, times: int, before: np.ndarray) -> LoopReplay:
    """What the first steps of a loop come to by their tensors' bytes: the changes of a step grow by the same bytes each time.

    Where what a step leaves does not shrink, most is alive in the first step or in the last: the others have no row.
    """
    growth = again.growth
    sums = Sums(tape, again, before, tape.sizes)
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

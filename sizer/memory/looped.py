"""Replay of the loops of a tape (sizer.memory.loops): every step of them, each event where the allocator would put it.

The CUDA allocator keeps small and large blocks in pools of their own. Small blocks that do not grow are asked for and released in
the same order in every step, and where the small pool is as it was once before, it comes out as it did then: such a stretch of
events is run once and looked up from then on. What is large is run event by event; but for a block that is released before the
large pool is asked again, which changes nothing if the pool holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from sizer.memory.loops import DEPTH, Repetition, repetitions
from sizer.memory.replay import LoopReplay, Replay, changes_of, reserved_after, sums_by_category
from sizer.memory.tape import CATEGORIES, Tape

MOST_REMEMBERED = 2**15  # stretches


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
        pools.started = begin
        done = pools.run(tape.order[begin:end], taken, addresses)
        reached = end if done else begin + pools.position
        reserved += reserved_after(pools.grown, reached - begin)
        changes[begin:reached] = changes_of(order[begin:reached], taken)
        if not done:
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
            for event in tape.order[failed_at:]:
                if event >= 0:
                    taken[event] = 0
    return Replay(
        taken=taken,
        addresses=addresses,
        reserved=reserved,
        retries=pools.retries,
        failed_at=failed_at,
        changes=changes,
        loops=tuple(loops),
    )


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
    sums = _Sums(tape, again, before, tape.sizes)
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
    return _rows(len(again.events), rows, None)


def _rows(
    events: int, rows: list[tuple[int, int, np.ndarray, np.ndarray, int, int]], refused: tuple[int, int] | None
) -> LoopReplay:
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


class Pools(Protocol):
    """An allocator with a pool of small blocks and one of large ones.

    `run` is as in CudaCache. A pool of small blocks is the tuple that `small_pool` gives, and can be set to be one again.
    """

    capacity: int | None
    reserved: int
    retries: int
    grown: list[tuple[int, int]]
    started: int
    position: int
    small_size: int
    small_segment: int
    large_segment: int  # no request is given more than this beyond its size

    def rounded(self, sizes: Sequence[int]) -> np.ndarray:
        """Bytes as they are asked of the pools, 0 for nothing."""

    def run(self, events: Sequence[int], taken: list[int], addresses: list[int]) -> bool:
        """Whether the events found room."""

    def small_pool(self) -> tuple[int, ...]:
        """The free blocks of the small pool."""

    def set_small_pool(self, blocks: tuple[int, ...]) -> None:
        """Make these the free blocks of the small pool."""

    def would_take(self, size: int) -> int | None:
        """The bytes that a large block of `size` would take of what is cached; None where there is no room."""

    def release_cached(self) -> None:
        """Give back to the device what no block uses (`torch.cuda.empty_cache()`)."""


@dataclass(slots=True, kw_only=True)
class _Stretch:
    """Events that follow each other in a step; `places` are their places in it.

    In a stretch of small blocks `inputs` are blocks of before that it releases, `outputs` those that it leaves, `growing` those
    that grow, `passing` large ones that are released at once; `small` are its events without those. `key` tells stretches of the
    same work, None where all are large.
    """

    events: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    small: list[int] = field(default_factory=list)
    small_places: list[int] = field(default_factory=list)
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    growing: tuple[int, ...] = ()
    passing: tuple[int, ...] = ()
    key: int | None = None


class LoopRunner:
    """The loops of one tape on one allocator. `taken` and `addresses` are by block; in a loop they are those of its last step."""

    def __init__(self, pools: Pools, taken: list[int], addresses: list[int]) -> None:
        self.pools, self.taken, self.addresses = pools, taken, addresses
        self._numbers: dict[object, int] = {}  # of works, and of small pools
        self._blocks: list[object] = []  # the small pools by number
        self._known: dict[tuple, tuple[int, tuple[int, ...]]] = {}
        self._state, self._set = -1, -1  # the small pool as it should be, and the one that the allocator has
        self.failed_at: int | None = None  # the place in the step of the request that found no room
        self._grown: list[tuple[int, int]] = []  # in this step, after how many events how much was reserved

    def run(self, tape: Tape, again: Repetition, rounded: Iterable[np.ndarray], before: np.ndarray) -> LoopReplay:
        """Every step of a loop, up to the first request that finds no room.

        `rounded` are the bytes of the step's blocks each time, as they are asked for, `before` the bytes alive by category.
        """
        self._state = self._set = self._number(self.pools.small_pool())
        sums = _Sums(tape, again, before, self.taken)
        blocks = again.blocks.tolist()
        history = [self.pools.rounded(again.sizes_at(-steps)) for steps in range(DEPTH + 1)]
        kinds = [self._kinds(sizes) for sizes in history]
        planned_for: list[bytes] = []
        for sizes in rounded:
            for old, block in again.moves:
                self.addresses[old], self.taken[old] = self.addresses[block], self.taken[block]
            changed = np.flatnonzero(sizes != history[0]).tolist()
            history = [sizes, *history[:-1]]
            kinds = [self._kinds(sizes), *kinds[:-1]]
            if kinds != planned_for:
                planned_for, large = kinds, np.flatnonzero(sizes > self.pools.small_size).tolist()
                stretches = self._stretches(again, [one.tolist() for one in history])
            for place in (*changed, *large):
                self.taken[blocks[place]] = int(sizes[place])
            reserved, self._grown = self.pools.reserved, []
            done = self._step(stretches)
            really = sizes.copy()
            really[large] = [self.taken[blocks[place]] for place in large]
            if not done:
                sums.refused(really, self.failed_at)
                break
            sums.add(really, reserved, self._grown)
        self._settle()
        return sums.found()

    def _kinds(self, sizes: np.ndarray) -> bytes:
        """By block whether it is none, small or large."""
        return ((sizes > 0).astype(np.uint8) + (sizes > self.pools.small_size)).tobytes()

    def _step(self, stretches: list[_Stretch]) -> bool:
        for stretch in stretches:
            if stretch.key is not None and self._in_passing(stretch):
                self._small(stretch)
                continue
            retries = self.pools.retries
            if stretch.key is not None or self._may_be_refused(stretch):
                self._settle()
            if not self._run(stretch.events, stretch.places):
                return False
            if stretch.key is not None or self.pools.retries > retries:
                self._state = self._set = self._number(self.pools.small_pool())
        return True

    def _may_be_refused(self, stretch: _Stretch) -> bool:
        """Whether new segments for all requests of a stretch would be too much: cached memory may then be given back."""
        pools = self.pools
        if pools.capacity is None:
            return False
        asked = [self.taken[event] for event in stretch.events if event >= 0]
        return pools.reserved + sum(asked) + len(asked) * pools.large_segment > pools.capacity

    def _in_passing(self, stretch: _Stretch) -> bool:
        """Whether a stretch concerns the small pool alone: large blocks pass, and no request could be refused."""
        pools, taken = self.pools, self.taken
        if pools.capacity is not None and pools.reserved + pools.small_segment > pools.capacity:
            return False
        found: dict[int, int | None] = {}
        for block in stretch.passing:
            size = taken[block]
            if size not in found:
                found[size] = pools.would_take(size)
            if found[size] is None:
                return False
        for block in stretch.passing:
            taken[block] = found[taken[block]]
        return True

    def _small(self, stretch: _Stretch) -> None:
        """Do a stretch of small blocks, or what it came to when it was last done in the same pool."""
        taken, addresses = self.taken, self.addresses
        inputs = tuple([number for block in stretch.inputs for number in (addresses[block], taken[block])])
        key = (stretch.key, self._state, inputs, tuple([taken[block] for block in stretch.growing]))
        known = self._known.get(key)
        if known is None:
            self._settle()
            self._run(stretch.small, stretch.small_places)
            self._state = self._set = self._number(self.pools.small_pool())
            if len(self.pools.grown) == 1:
                if len(self._known) >= MOST_REMEMBERED:
                    self._known.clear()
                self._known[key] = self._state, tuple([addresses[block] for block in stretch.outputs])
            return
        self._state, found = known
        for block, address in zip(stretch.outputs, found, strict=True):
            addresses[block] = address

    def _run(self, events: list[int], places: list[int]) -> bool:
        pools = self.pools
        retries = pools.retries
        done = pools.run(events, self.taken, self.addresses)
        self._grown += [(places[position], reserved) for position, reserved in pools.grown[1:]]
        if len(pools.grown) > 1 or pools.retries > retries:
            self._known.clear()
        if not done:
            self.failed_at = places[pools.position]
        return done

    def _settle(self) -> None:
        """Give the allocator the small pool as it should be."""
        if self._set != self._state:
            self.pools.set_small_pool(self._blocks[self._state])
            self._set = self._state

    def _number(self, value: object) -> int:
        number = self._numbers.setdefault(value, len(self._blocks))
        if number == len(self._blocks):
            self._blocks.append(value)
        return number

    def _stretches(self, again: Repetition, history: list[list[int]]) -> list[_Stretch]:
        """The step in stretches, where blocks take the bytes of `history`, in this step and those before it."""
        steps_and_places = {block: (0, place) for place, block in enumerate(again.blocks.tolist())}
        steps_and_places |= {block: (steps, place) for block, steps, place in again.earlier}
        events = again.events.tolist()

        def size_of(block: int) -> int:
            steps, place = steps_and_places[block]
            return history[steps][place]

        passing = _passing(events, lambda block: size_of(block) > self.pools.small_size)
        stretches: list[_Stretch] = []
        for place, event in enumerate(events):
            block = event if event >= 0 else ~event
            if not size_of(block):
                continue
            small = block in passing or size_of(block) <= self.pools.small_size
            if not stretches or (stretches[-1].key is not None) != small:
                stretches.append(_Stretch(key=0 if small else None))
            stretches[-1].events.append(event)
            stretches[-1].places.append(place)
        growing = {block for block, by in zip(again.blocks.tolist(), again.growth.tolist(), strict=True) if by}
        for stretch in stretches:
            if stretch.key is not None:
                self._describe(stretch, passing, growing, size_of)
        return stretches

    def _describe(self, stretch: _Stretch, passing: set[int], growing: set[int], size_of: Callable[[int], int]) -> None:
        """Fill in what a stretch of small blocks takes, leaves and is."""
        numbers: dict[int, int] = {}
        released: set[int] = set()
        inputs: dict[int, int] = {}
        work: list[object] = []
        for place, event in zip(stretch.places, stretch.events, strict=True):
            block = event if event >= 0 else ~event
            if block in passing:
                continue
            stretch.small.append(event)
            stretch.small_places.append(place)
            if event >= 0:
                numbers[block] = len(numbers)
                work.append("grows" if block in growing else size_of(block))
            else:
                released.add(block)
                work.append(~numbers[block] if block in numbers else ("in", inputs.setdefault(block, len(inputs))))
        stretch.inputs = tuple(inputs)
        stretch.outputs = tuple(block for block in numbers if block not in released)
        stretch.growing = tuple(block for block in numbers if block in growing)
        stretch.passing = tuple({~event for event in stretch.events if event < 0} & passing)
        stretch.key = self._number(("work", tuple(work)))


def _passing(events: list[int], is_large: Callable[[int], bool]) -> set[int]:
    """The large blocks that are released before the large pool is asked or given anything else."""
    found, last = set(), None
    for event in events:
        block = event if event >= 0 else ~event
        if is_large(block):
            if event < 0 and last == block:
                found.add(block)
            last = event
    return found


class _Sums:
    """What the steps of a loop come to, by category."""

    def __init__(self, tape: Tape, again: Repetition, before: np.ndarray, taken: list[int]) -> None:
        made = len(again.blocks)
        place_of = {block: place for place, block in enumerate(again.blocks.tolist())}
        place_of |= {block: steps * made + place for block, steps, place in again.earlier}
        blocks = np.where(again.events >= 0, again.events, ~again.events)
        self._again = again
        self._places = np.asarray([place_of[block] for block in blocks.tolist()], np.int64)
        self._signs = np.where(again.events >= 0, 1, -1)
        self.categories = np.frombuffer(tape.categories, np.uint8)[blocks]
        self._level = before.astype(np.int64)
        # by block what it took, in the last step and those before
        self._history = [np.zeros(made, np.int64) for _ in range(DEPTH)]
        self._history[0][:] = [taken[block] for block in again.blocks.tolist()]
        successor = dict(again.moves)
        for block, steps, place in again.earlier:
            self._history[steps - 1][place] = taken[successor[block]]
        self._rows: list[tuple[int, int, np.ndarray, np.ndarray, int, int]] = []
        self._refused: tuple[int, int] | None = None

    def add(self, taken: np.ndarray, reserved: int, grown: list[tuple[int, int]]) -> None:
        """Add a step whose blocks took `taken` bytes; `reserved` were so before it, and from places in it on as `grown` says."""
        changes = self.changes((taken, *self._history))
        self._history = [taken, *self._history[:-1]]
        levels = np.cumsum(changes)
        at = int(levels.argmax()) + 1
        peak = self._level + sums_by_category(changes[:at], self.categories[:at])
        self._level = self._level + sums_by_category(changes, self.categories)
        at_peak = next((held for place, held in reversed(grown) if place < at), reserved)
        self._rows.append((len(self._rows) + 1, at, peak, self._level, at_peak, grown[-1][1] if grown else reserved))

    def refused(self, taken: np.ndarray, place: int) -> None:
        """Note the request, at a place in the step, that found no room."""
        asked = self._again.sizes_at(len(self._rows) + 1)[self._places[place]]
        self._refused = int(asked), int(self._level.sum() + self.changes((taken, *self._history))[:place].sum())

    def found(self) -> LoopReplay:
        """What was added."""
        return _rows(len(self._again.events), self._rows, self._refused)

    def changes(self, sizes: Sequence[np.ndarray]) -> np.ndarray:
        """By how many bytes each event of a step changes what is alive, with the sizes of its blocks and of those before it."""
        return self._signs * np.concatenate(sizes)[self._places]

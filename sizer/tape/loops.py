"""Steps of a tape that come again and again, as the steps of a generation do: kept once, with how often and how they grow.

A window is a span of steps that comes again as a whole, as that between two times that a cache is quantized anew.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import TypeVar

import numpy as np

from sizer.tape.size_queries import by_block, gather
from sizer.tape.tape import CATEGORIES, Loop, Tape, stream_of


class NotRepeatedError(ValueError):
    """Steps of a tape do not follow from each other: their events differ, or their sizes do not grow by the same bytes."""


DEPTH = 2  # steps for which a block may live on: an input of a step stays until the next step has its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """A repeated step in a loop of a tape.

    Args:
        events: int64, the events of the repeated step.
        blocks: int64, the blocks that it allocates, in order.
        sizes: int64, their bytes in the step of the tape.
        growth: int64, the bytes by which they grow each time.
        earlier: (block, steps, place) for each block that the step releases and did not allocate: the block with that place
            among those of the step so many steps earlier.
        moves: int64, [moves, 2], rows (block, later block). In each repetition the later block's value moves to the earlier
            name. Do all moves at once, or in their order.
    """

    count: int
    events: np.ndarray
    blocks: np.ndarray
    sizes: np.ndarray
    growth: np.ndarray
    earlier: tuple[tuple[int, int, int], ...]
    moves: np.ndarray

    def sizes_at(self, time: int) -> np.ndarray:
        """Return the bytes of the blocks in the `time`-th repetition of the step, from 1; at 0 and below those in the tape."""
        return self.sizes + time * self.growth


def repetitions(tape: Tape) -> Iterator[tuple[Loop, Repetition]]:
    """Yield every loop of a tape with its repeated step. Raises NotRepeatedError if a loop does not repeat."""
    for loop in tape.loops:
        yield loop, find_repetition(tape, loop)


def find_repetition(tape: Tape, loop: Loop) -> Repetition:
    """Return the repeated step of a loop, read from it and earlier steps. Raises NotRepeatedError if these differ."""
    length = loop.end - loop.begin
    before, step = (
        _Step(tape, [end - steps * length for steps in reversed(range(DEPTH + 2))]) for end in (loop.begin, loop.end)
    )
    if not step.is_again(before):
        raise NotRepeatedError(f"the step at event {loop.begin} does not repeat the step before it")
    earlier = step.earlier()
    if (unknown := next((block for block, _, place in earlier if place < 0), None)) is not None:
        raise NotRepeatedError(f"{tape.describe(unknown)} is released in a step, and was not made in those before")
    named = [step.blocks, *reversed(step.blocks_before)]  # by the number of steps before
    moves = {
        (int(named[back][place]), int(named[back - 1][place])): back
        for _, steps, place in earlier
        for back in range(steps, 0, -1)
    }
    sizes = np.asarray(tape.sizes, np.int64)
    # a library's answers are on no line: they stay as they are
    asked = np.fromiter(chain.from_iterable(query.blocks for query in tape.size_queries), np.int64)
    grows = ~np.isin(step.blocks, asked)
    return Repetition(
        count=loop.count,
        events=np.asarray(tape.order[loop.begin : loop.end], np.int64),
        blocks=step.blocks,
        sizes=sizes[step.blocks],
        growth=(sizes[step.blocks] - sizes[before.blocks]) * grows,
        earlier=earlier,
        moves=np.array(sorted(moves, key=lambda move: -moves[move]), np.int64).reshape(-1, 2),
    )


class _Step:
    """A step of a tape, described independently of its position.

    `bounds` of its order are the begins of the DEPTH steps before it, its own begin, and its end. Each event is the allocation
    or release of a block, given by its place among the blocks of a step, this one or an earlier one, and by the number of steps
    between. The place is -1 if none of these steps allocated it.
    """

    def __init__(self, tape: Tape, bounds: Sequence[int]) -> None:
        order = np.asarray(tape.order, np.int64)
        *before, own = (order[begin:end] for begin, end in pairwise(max(0, bound) for bound in bounds))
        self.blocks_before = [events[events >= 0] for events in before]
        self.blocks = own[own >= 0]
        self._tape = tape
        self._releases = own < 0
        self._named = np.where(self._releases, ~own, own)
        made = [*self.blocks_before, self.blocks]
        names = np.concatenate(made)
        steps_before = np.repeat(np.arange(len(made))[::-1], [len(blocks) for blocks in made])
        places = np.concatenate([np.arange(len(blocks)) for blocks in made])
        by_name = np.argsort(names)
        first = np.searchsorted(names, self._named, sorter=by_name)
        known = first < np.searchsorted(names, self._named, side="right", sorter=by_name)
        self._steps = np.zeros(len(own), np.int64)
        self._steps[known] = steps_before[by_name[first[known]]]
        self._places = np.full(len(own), -1)
        self._places[known] = places[by_name[first[known]]]

    def earlier(self) -> tuple[tuple[int, int, int], ...]:
        """Return (block, steps, place) for each block that the step releases and has not made."""
        apart = self._releases & ((self._steps > 0) | (self._places < 0))
        columns = (self._named[apart], self._steps[apart], self._places[apart])
        return tuple(zip(*(column.tolist() for column in columns), strict=True))

    def is_again(self, other: _Step) -> bool:
        """Return whether another step of the tape has the same events, from the same sources."""
        if len(self._named) != len(other._named) or len(self.blocks) != len(other.blocks):
            return False
        pairs = (
            (self._releases, other._releases),
            (self._steps, other._steps),
            (self._places_from_ends(), other._places_from_ends()),
            *(
                (column[self.blocks], column[other.blocks])
                for values in (self._tape.ops, self._tape.modules, self._tape.categories, self._tape.streams)
                if len(column := _column(values))
            ),
        )
        return all(np.array_equal(mine, theirs) for mine, theirs in pairs)

    def _places_from_ends(self) -> np.ndarray:
        """Return places, in earlier steps counted from these steps' ends: the first step has no whole one before it."""
        made = np.array([0, *(len(blocks) for blocks in reversed(self.blocks_before))])
        return self._places - made[self._steps]


def _column(values: array[int] | bytes) -> np.ndarray:
    return np.frombuffer(values, np.uint8) if isinstance(values, bytes) else np.asarray(values)


def check_affine(tape: Tape, loop: Loop) -> None:
    """Raise NotRepeatedError unless a loop's step and the two before it lie on one line, event for event and byte for byte."""
    length = loop.end - loop.begin
    earlier = replace(loop, begin=loop.begin - length, end=loop.begin)
    last, first = find_repetition(tape, loop), find_repetition(tape, earlier)
    if (last.growth != first.growth).any():
        block = int(last.blocks[np.flatnonzero(last.growth != first.growth)[0]])
        raise NotRepeatedError(f"{tape.describe(block)} does not grow by the same bytes from step to step")


def check_follows(tape: Tape, bounds: tuple[int, int]) -> None:
    """Raise NotRepeatedError unless the step at these bounds continues the loop that ends at its begin."""
    begin, end = bounds
    loop = next((loop for loop in tape.loops if loop.end == begin), None)
    if loop is None:
        return
    again = find_repetition(tape, loop)
    found = find_repetition(tape, Loop(begin=begin, end=end, count=0))
    if found.sizes.tolist() != again.sizes_at(loop.count + 1).tolist():
        raise NotRepeatedError(f"the step at event {begin}, traced separately, does not continue the steps before it")


def append_steps(
    tape: Tape, other: Tape, ends: Sequence[int], *, follows: Sequence[int], kept: Mapping[int, int] | None = None
) -> tuple[Tape, list[int]]:
    """Return the tape with steps of another tape of the same work appended, and the end of each in its order.

    `ends` of the other tape's order are the ends of its steps: first those that match the tape's own last steps, then those to
    append. `follows` of the tape's order are the ends of its own last steps. A step may release a block that one of these steps
    allocated, or one of `kept`, the tape's blocks by the other's for blocks that both have held for longer.

    Raises NotRepeatedError for any other block.
    """
    if follows[-1] != len(tape.order):
        raise ValueError("steps can only be appended after the last ones")
    names = dict(kept or {})
    begin = len(follows) - 1
    for (mine_from, mine_to), (from_, to) in zip(pairwise(follows), pairwise(ends), strict=False):
        mine, theirs = (
            [event for event in order if event >= 0] for order in (tape.order[mine_from:mine_to], other.order[from_:to])
        )
        names |= {block: name for block, name in zip(theirs, mine, strict=False) if block not in names}
    order, appended = tape.order[:], []
    blocks: list[int] = []
    for from_, to in pairwise(ends[begin:]):
        for event in other.order[from_:to]:
            if event >= 0:
                names[event] = len(tape.sizes) + len(blocks)
                blocks.append(event)
                order.append(names[event])
            elif ~event in names:
                order.append(~names[~event])
            else:
                raise NotRepeatedError("a step releases a block that no earlier step made")
        appended.append(len(order))
    return _with_blocks(tape, other, blocks, order), appended


def _with_blocks(tape: Tape, other: Tape, blocks: Sequence[int], order: array[int]) -> Tape:
    """Return the tape with some of another's blocks behind its own, and with another order."""
    sizes, ops, modules = tape.sizes[:], tape.ops[:], tape.modules[:]
    sizes.extend([other.sizes[block] for block in blocks])
    op_names, module_names = dict.fromkeys(tape.op_names), dict.fromkeys(tape.module_names)
    op_names.update(dict.fromkeys(other.op_names[other.ops[block]] for block in blocks))
    module_names.update(dict.fromkeys(other.module_names[other.modules[block]] for block in blocks))
    place_of_op = {name: place for place, name in enumerate(op_names)}
    place_of_module = {name: place for place, name in enumerate(module_names)}
    ops.extend([place_of_op[other.op_names[other.ops[block]]] for block in blocks])
    modules.extend([place_of_module[other.module_names[other.modules[block]]] for block in blocks])
    queries = by_block(other.size_queries)
    own = {place: queries[block] for place, block in enumerate(blocks, len(tape.sizes)) if block in queries}
    at = len(tape.order)
    return replace(
        tape,
        order=order,
        sizes=sizes,
        categories=tape.categories + bytes(other.categories[block] for block in blocks),
        streams=_joined_streams(tape, other, blocks),
        ops=ops,
        modules=modules,
        op_names=tuple(op_names),
        module_names=tuple(module_names),
        marks=tuple((len(order) if place == at else place, phase) for place, phase in tape.marks),
        size_queries=gather(by_block(tape.size_queries) | own),
        stand_ins=tuple(dict.fromkeys(tape.stand_ins + other.stand_ins)),
    )


def _joined_streams(tape: Tape, other: Tape, blocks: Sequence[int]) -> bytes:
    """Return the streams of a tape's blocks and of some of another's; empty if all are of the default stream."""
    if not (tape.streams or other.streams):
        return b""
    return (tape.streams or bytes(len(tape.sizes))) + bytes(stream_of(other, block) for block in blocks)


def written(tape: Tape) -> Tape:
    """Return the tape with every step of its loops written out, as a trace of them all would have it.

    Blocks are numbered in the order of their allocation, as a log numbers them.
    """
    for loop in reversed(tape.loops):
        tape = _write(tape, loop, find_repetition(tape, loop))
    return tape


def _write(tape: Tape, loop: Loop, again: Repetition) -> Tape:
    """Return the tape with its last loop written out."""
    made, length = len(again.blocks), loop.end - loop.begin
    first, more = int(again.blocks[0]), loop.count * made
    relative = {block: place for place, block in enumerate(again.blocks.tolist())}
    relative |= {block: place - steps * made for block, steps, place in again.earlier}
    relative = np.asarray([relative[event if event >= 0 else ~event] for event in again.events.tolist()], np.int64)
    times = np.arange(1, loop.count + 1, dtype=np.int64)[:, None]
    numbers = relative[None, :] + (first + times * made)
    events = np.where(again.events >= 0, numbers, ~numbers).ravel()
    tail = np.asarray(tape.order[loop.end :], np.int64)
    named = np.where(tail >= 0, tail, ~tail)
    now = np.where(named >= first, named + more, named)
    for block, later in again.moves.tolist():
        if later >= first:  # of the last step but one
            now[named == block] = later + more - made
    tail = np.where(tail >= 0, now, ~now)
    place = first + made

    def column(values: array[int]) -> array[int]:
        again_there = values[first:place] * loop.count
        return values[:place] + again_there + values[place:]

    sizes = tape.sizes[:place]
    sizes.frombytes((again.sizes + times * again.growth).astype(np.int64).tobytes())
    sizes.extend(tape.sizes[place:])
    order = tape.order[: loop.end]
    order.frombytes(events.tobytes())
    order.frombytes(tail.astype(np.int64).tobytes())
    moved = {block: tuple([block + time * made for time in range(loop.count + 1)]) for block in range(first, place)}
    queries = by_block(tape.size_queries)
    resolved: set[int] = set()
    for block in tape.resolved:
        resolved.update(moved.get(block, (block + more * (block >= place),)))
    return replace(
        tape,
        order=order,
        sizes=sizes,
        categories=tape.categories[:place] + tape.categories[first:place] * loop.count + tape.categories[place:],
        streams=tape.streams[:place] + tape.streams[first:place] * loop.count + tape.streams[place:],
        ops=column(tape.ops),
        modules=column(tape.modules),
        marks=tuple((at + loop.count * length * (at >= loop.end), phase) for at, phase in tape.marks),
        size_queries=gather(
            {
                other: query
                for block, query in sorted(queries.items())
                for other in moved.get(block, (block + more * (block >= place),))
            }
        ),
        resolved=frozenset(resolved),
        loops=tape.loops[:-1],
    )


def repeated_events(tape: Tape) -> int:
    """Return how many events the loops of a tape add to it."""
    return sum(loop.count * (loop.end - loop.begin) for loop in tape.loops)


ALIKE = 3  # windows that show a line: two growths, which must be the same

Values = TypeVar("Values", "array[int]", bytes)  # by block


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """The events from `begin` to `end` of a tape's order, which make the blocks from `first` to `last`, and the loops there."""

    begin: int
    end: int
    first: int
    last: int
    loops: tuple[Loop, ...]
    events: np.ndarray
    sizes: np.ndarray

    def events_after(self, blocks: int) -> np.ndarray:
        """Return the events with each block's number greater by `blocks`."""
        return np.where(self.events >= 0, self.events + blocks, self.events - blocks)


def kept_blocks(tape: Tape, other: Tape, *, of: str, before: tuple[int, int], at: tuple[int, int]) -> dict[int, int]:
    """Return the tape's blocks by another tape's: blocks of a category made before an event and held at another.

    Blocks of each module are matched in the order in which they were made. Raises NotRepeatedError if their bytes or sources
    differ.
    """
    mine, theirs = _held(tape, of, before[0], at[0]), _held(other, of, before[1], at[1])
    if [*mine.values()] != [*theirs.values()]:
        raise NotRepeatedError(f"blocks of the {of} at event {at[0]} differ from those of a shorter generation")
    return dict(zip(theirs, mine, strict=True))


def _held(tape: Tape, category: str, before: int, at: int) -> dict[int, tuple[str, str, int]]:
    """Return module, operator and bytes of a category's blocks that are made before an event and alive at another, by module."""
    number = CATEGORIES.index(category)
    released = {~event for event in tape.order[:at] if event < 0}
    held = {
        block: (tape.module_names[tape.modules[block]], tape.op_names[tape.ops[block]], tape.sizes[block])
        for block in tape.order[:before]
        if block >= 0 and tape.categories[block] == number and block not in released
    }
    return dict(sorted(held.items(), key=lambda item: item[1][0]))


def append_windows(tape: Tape, begins: Sequence[int], count: int, *, rest: int = 0, rest_count: int = 0) -> Tape:
    """Return the tape with its last window appended `count` times.

    The last ALIKE windows begin in its order at `begins`. The last one ends with the order and, if it has a loop, with that.
    After them come the first `rest` events once more and, if these are all events, the loop `rest_count` times. Raises
    NotRepeatedError unless the windows are equal in all but their sizes, and these grow by the same bytes.
    """
    ends = [*begins[1:], len(tape.order)]
    windows = [_window(tape, begin, end) for begin, end in zip(begins, ends, strict=True)]
    growth = _growth(tape, windows)
    last = windows[-1]
    made, length = last.last - last.first, last.end - last.begin
    part = int((last.events[:rest] >= 0).sum())

    def more(values: Values) -> Values:
        return values + values[last.first : last.last] * count + values[last.first : last.first + part]

    order, sizes = tape.order[:], tape.sizes[:]
    for time in range(1, count + 1):
        order.frombytes(last.events_after(time * made).astype(np.int64).tobytes())
        sizes.frombytes((last.sizes + time * growth).astype(np.int64).tobytes())
    order.frombytes(last.events_after((count + 1) * made)[:rest].astype(np.int64).tobytes())
    sizes.frombytes((last.sizes + (count + 1) * growth)[:part].astype(np.int64).tobytes())
    loops = [_moved(loop, time * length) for time in range(1, count + 1) for loop in last.loops]
    if rest_count:
        loops += [replace(_moved(loop, (count + 1) * length), count=rest_count) for loop in last.loops]
    queries = by_block(tape.size_queries)
    asked = {
        block + time * made: queries[block]
        for time in range(1, count + 2)
        for block in range(last.first, last.last if time <= count else last.first + part)
        if block in queries
    }
    return replace(
        tape,
        order=order,
        sizes=sizes,
        categories=more(tape.categories),
        streams=more(tape.streams),
        ops=more(tape.ops),
        modules=more(tape.modules),
        marks=tuple((len(order) if place == last.end else place, phase) for place, phase in tape.marks),
        size_queries=gather(queries | asked),
        loops=(*tape.loops, *loops),
    )


def _moved(loop: Loop, by: int) -> Loop:
    return replace(loop, begin=loop.begin + by, end=loop.end + by)


def _window(tape: Tape, begin: int, end: int) -> _Window:
    events = np.asarray(tape.order[begin:end], np.int64)
    blocks = events[events >= 0]
    first, last = int(blocks[0]), int(blocks[-1]) + 1
    return _Window(
        begin=begin,
        end=end,
        first=first,
        last=last,
        loops=tuple(loop for loop in tape.loops if begin < loop.end <= end),
        events=events,
        sizes=np.asarray(tape.sizes[first:last], np.int64),
    )


def _growth(tape: Tape, windows: Sequence[_Window]) -> np.ndarray:
    """Return the bytes by which the blocks of a window grow from one window to the next."""
    shapes = [(one.events_after(-one.first).tolist(), [loop.count for loop in one.loops]) for one in windows]
    columns = (tape.ops, tape.modules, tape.categories)
    sources = [(*(column[one.first : one.last] for column in columns), (one.events >= 0).tolist()) for one in windows]
    # the first window may release blocks that no window before it made
    if any(shape != shapes[-1] for shape in shapes[1:]) or any(source != sources[-1] for source in sources):
        raise NotRepeatedError(f"the window at event {windows[-1].begin} does not repeat the window before it")
    *earlier, growth = (after.sizes - before.sizes for before, after in pairwise(windows))
    asked = by_block(tape.size_queries)  # a library's answers are on no line: they stay as they are
    grows = np.asarray([block not in asked for block in range(windows[-1].first, windows[-1].last)], bool)
    if (wrong := np.flatnonzero((growth != earlier[-1]) & grows)).size:
        block = windows[-1].first + int(wrong[0])
        raise NotRepeatedError(f"{tape.describe(block)} does not grow by the same bytes from window to window")
    return growth * grows

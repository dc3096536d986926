"""Steps of a tape that come again and again, as the steps of a generation do: kept once, with how often and how they grow."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np

from sizer.tape.size_queries import by_block, gather
from sizer.tape.streams import stream_of
from sizer.tape.tape import Loop, Tape


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

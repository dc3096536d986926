"""Tapes of a model with fewer layers, from the tape of a deeper one.

Two tapes of a model, traced with fewer and with more layers in all of its lists, show which events the additional layers make.
The deeper tape without the events of one list is the tape of a model with fewer layers in this list only. The same layers make
the same events in a similar tape, such as one at another batch size, although other events may differ outside the layers.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import product

import numpy as np

from sizer.tape.affine import beginning
from sizer.tape.size_queries import by_block, gather
from sizer.tape.stretches import NO_LAYER, LayersDifferError, Rows
from sizer.tape.tape import Tape
from sizer.tape.unfold import Stacks, align, name_modules, paths_of

NOWHERE = -1  # replaces the position of an event that the other tape lacks
WINDOW = 512  # events compared to find the place from which two tapes agree again
NO_STACK = -1  # replaces the number of a list, for events of no layer


class Shallower:
    """The events that additional layers make in a tape, by list of layers.

    `second` is the tape of a model that has a period more in each of its `stacks` than that of `first`. The tapes in `apart`
    have one period more in all but one of them: the first, the second, and so on, except the last. Raises LayersDifferError if
    the further events do not repeat others, or if their list cannot be determined.
    """

    def __init__(
        self, first: Tape, second: Tape, apart: Sequence[Tape], stacks: Sequence[Stacks], *, earlier: int = 0
    ) -> None:
        self._second, self._stacks = second, stacks
        aligned = align(first, second, stacks, earlier=earlier)
        one, two = aligned.first, aligned.second
        ours, theirs = aligned.common_events()
        if not np.array_equal(one.exact[ours], two.exact[theirs]) or first.collectives != second.collectives:
            raise LayersDifferError("sizes that grow with the layers")
        if first.host_bytes != second.host_bytes:
            raise LayersDifferError("host memory that grows with the layers")
        of_list = dict.fromkeys([(stretch.begin, stretch.end) for stretch in aligned.stretches], len(stacks) - 1)
        for number, tape in enumerate(apart):
            for stretch in align(tape, second, [stacks[number]], earlier=earlier).stretches:
                if of_list.get((stretch.begin, stretch.end)) != len(stacks) - 1:
                    raise LayersDifferError("events that come with the layers of several lists")
                of_list[stretch.begin, stretch.end] = number
        lists = {path: number for number, stack in enumerate(stacks) for path in stack.paths}
        named = (lists.get(name.partition(".*")[0], NO_STACK) for name in two.names)
        stack_of_block = np.where(two.layers == NO_LAYER, NO_STACK, np.fromiter(named, np.int64, len(two.names)))
        self._added = np.full(len(two.blocks), NO_STACK)  # by event the list of its additional layer
        for (begin, end), number in of_list.items():
            self._added[begin:end] = number
            around = slice(*_repetitions(two.exact, begin, end))
            unnamed = two.blocks[around][two.allocates[around]]
            stack_of_block[unnamed[stack_of_block[unnamed] == NO_STACK]] = number  # an optimizer's, in no module
        self._stack_of = stack_of_block[two.blocks]  # by event
        self._regions = [(2 * stretch.begin - stretch.end, stretch.end) for stretch in aligned.stretches]
        # by event the position of its block's allocation; and, for events of the shallower tape, the position there
        self._own = _allocations(two)
        self._shallower = self._own.copy()
        self._shallower[theirs] = theirs[_allocations(one)]
        self._layers = two.layers[two.blocks]
        self._layers[theirs] = one.layers[one.blocks]
        ours, places = theirs[np.flatnonzero(one.allocates)], np.flatnonzero(two.allocates)
        self._outputs = [  # equally many with more layers, or those of each layer
            (places[[*after]], ours[[*before]] if len(before) == len(after) else places[[*after]])
            for before, after in zip(first.outputs, second.outputs, strict=True)
        ]

    def tapes(self, other: Tape | None = None) -> tuple[Tape, ...]:
        """Return the input of `sizer.tape.unfold.unfold`: tapes with and without a period in each combination of the lists.

        `other` is the tape of another step of the model of `second`, or its beginning; None for `second` itself. Raises
        LayersDifferError if its layers do other work, or work that cannot be separated from its surroundings.
        """
        tape = self._second if other is None else other
        places = self._places(tape)
        numbers = range(len(self._stacks))
        return tuple(
            tape if all(there) else self._without(tape, places, [number for number in numbers if not there[number]])
            for there in product((False, True), repeat=len(numbers))
        )

    def _places(self, other: Tape) -> np.ndarray:
        """Return by event of `second` its position in another tape, NOWHERE for missing events."""
        if other is self._second:
            return np.arange(len(other.order))
        second = beginning(self._second, other)
        phases = [[name for _, name in tape.marks] for tape in (second, other)]
        if second.stand_ins != other.stand_ins or phases[0] != phases[1] or other.host_bytes != second.host_bytes:
            raise LayersDifferError("other assumptions, phases or host memory")
        ids: dict[tuple, int] = {}
        one, two = (Rows(tape, (), ids).alike for tape in (second, other))
        places = np.full(len(self._own), NOWHERE)
        for begin, other_begin, events in _matches(one, two):
            places[begin : begin + events] = range(other_begin, other_begin + events)
        for begin, end in self._regions:
            if begin < len(one) and (end > len(one) or (np.diff(places[begin:end]) != 1).any()):
                raise LayersDifferError("layers do other work")
        return places

    def _moved(self, own: np.ndarray, shallower: np.ndarray, stacks: Collection[int]) -> np.ndarray:
        """Return the allocation positions without the layers of some lists, from `own` with the layers of all lists."""
        stack_of, differs = self._stack_of[own], own != shallower
        if len(stacks) < len(self._stacks) and (stack_of[differs] == NO_STACK).any():
            raise LayersDifferError("a block outside the layers is another one with more layers")
        return np.where(differs & (np.isin(stack_of, [*stacks]) | (stack_of == NO_STACK)), shallower, own)

    def _without(self, tape: Tape, places: np.ndarray, stacks: Collection[int]) -> Tape:
        """Return a tape without the additional layers of some lists."""
        rows = Rows(tape, paths_of(self._stacks), {})
        known = np.full(len(tape.order), NOWHERE)  # by event its event of `second`
        known[places[places != NOWHERE]] = np.flatnonzero(places != NOWHERE)
        is_known = known != NOWHERE
        kept = ~is_known | ~np.isin(self._added, [*stacks])[known]
        if (~is_known & (rows.layers[rows.blocks] != NO_LAYER)).any():
            raise LayersDifferError("layers do other work")
        allocated = _allocations(rows)
        moved = self._moved(self._own, self._shallower, stacks)
        others = np.flatnonzero(is_known & (moved != self._own)[known])
        if (places[self._own[known[others]]] != allocated[others]).any():
            raise LayersDifferError("layers release other blocks")
        allocated[others] = places[moved[known[others]]]
        if (allocated[kept] == NOWHERE).any() or not kept[allocated[kept]].all():
            raise LayersDifferError("a block would be released that is not there")
        number = np.cumsum(kept & rows.allocates) - 1  # by event that allocates, its block's number in the remaining tape
        blocks = number[allocated]
        left = rows.blocks[kept & rows.allocates]
        new = dict(zip(left.tolist(), range(len(left)), strict=True))
        before = [0, *np.cumsum(kept).tolist()]
        outputs, halves = [], set[int]()
        for of_pass, (own, shallower) in zip(tape.outputs, self._outputs, strict=False):
            given = [int(tape.order[place]) for place in places[own]]
            if sorted(given) != sorted(of_pass):
                raise LayersDifferError("other outputs")
            at = places[self._moved(own, shallower, stacks)]
            found = {int(number[place]): block for place, block in zip(at, given, strict=True) if kept[place]}
            halves.update(now for now, then in found.items() if then in tape.half_outputs)
            outputs.append(tuple(sorted(found)))
        at = known[kept & rows.allocates]
        numbered = (at != NOWHERE) & np.isin(self._stack_of, [*stacks])[at]
        numbers = np.where(numbered, self._layers[at], rows.layers[left])
        modules, module_names = name_modules([rows.names[block] for block in left.tolist()], numbers.tolist())
        return replace(
            tape,
            order=array("q", np.where(rows.allocates, blocks, ~blocks)[kept].tobytes()),
            sizes=array("q", rows.sizes[left].tobytes()),
            categories=np.frombuffer(tape.categories, np.uint8)[left].tobytes(),
            ops=array("l", np.asarray(tape.ops)[left].tobytes()),
            modules=modules,
            module_names=module_names,
            marks=tuple((before[position], name) for position, name in tape.marks),
            size_queries=gather({new[block]: asked for block, asked in by_block(tape.size_queries).items() if block in new}),
            second_forward=None if tape.second_forward is None else before[tape.second_forward],
            streams=np.frombuffer(tape.streams, np.uint8)[left].tobytes() if tape.streams else b"",
            awaited=frozenset(new[block] for block in tape.awaited if block in new),
            outputs=tuple(outputs),
            graphs=tuple(tuple(new[block] for block in of_pass if block in new) for of_pass in tape.graphs),
            half_outputs=frozenset(halves),
        )


def _matches(one: np.ndarray, two: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of equal events of two tapes: their positions in both, and the length.

    After a difference, WINDOW events of each are compared. Comparing all takes time that grows with the square of their number.
    """
    i = j = 0
    while i < len(one) and j < len(two):
        shorter = min(len(one) - i, len(two) - j)
        other = np.flatnonzero(one[i : i + shorter] != two[j : j + shorter])
        same = int(other[0]) if len(other) else shorter
        yield i, j, same
        i, j = i + same, j + same
        some = one[i : i + WINDOW].tolist(), two[j : j + WINDOW].tolist()
        matches = SequenceMatcher(None, *some, autojunk=False).get_matching_blocks()
        longest = max(matches, key=lambda match: match.size)
        if not longest.size:
            return
        yield from ((i + match.a, j + match.b, match.size) for match in matches if match.a <= longest.a)
        i, j = i + longest.a + longest.size, j + longest.b + longest.size


def _allocations(rows: Rows) -> np.ndarray:
    """Return by event the position of its block's allocation."""
    return np.flatnonzero(rows.allocates)[rows.blocks]


def _repetitions(column: np.ndarray, begin: int, end: int) -> tuple[int, int]:
    """Return the begin and the end of the consecutive repetitions of a stretch of a column."""
    first, last, length, stretch = begin, end, end - begin, column[begin:end]
    while first >= length and np.array_equal(column[first - length : first], stretch):
        first -= length
    while np.array_equal(column[last : last + length], stretch):
        last += length
    return first, last

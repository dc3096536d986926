"""The tape of a deep model from tapes of the same model with fewer layers, where these are alike.

Two tapes whose models differ by one layer (by one period, where layers of several kinds take turns) are the same but for what the
deeper one has in addition: a stretch of the forward pass, one of the backward pass, some rows of the optimizer's states. Each such
stretch repeats the one before it. With more layers it comes as many times again, and the blocks that it releases go on from one
repetition to the next as they did between the two that were traced. A third tape shows whether that is so.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np

from sizer.memory.affine import NotAffineError, beginning, check_same_work
from sizer.memory.communication import Collective
from sizer.memory.size_queries import SizeQuery, by_block, gather
from sizer.memory.streams import stream_of
from sizer.memory.tape import Tape

_NO_LAYER = -1


class NotRepeatedError(ValueError):
    """What a tape has in addition to that of a model with fewer layers does not repeat itself; the message names where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfolded:
    """A tape with more layers than were traced.

    sources: by block the one of the deeper of the two traced tapes that it repeats.
    sizes_alone: whether a block has the size of its source, and nothing beside sizes differs between batch sizes.
    """

    tape: Tape
    second: Tape
    sources: np.ndarray
    sizes_alone: bool

    def check(self, beginning_of_whole: Tape) -> None:
        """None where the tape begins as that of the whole model does. Raises NotRepeatedError."""
        begun = beginning(self.tape, beginning_of_whole)
        _check_same_work(begun, beginning_of_whole)
        if begun.sizes != beginning_of_whole.sizes or begun.size_queries != beginning_of_whole.size_queries:
            raise NotRepeatedError("other sizes in the whole model")

    def of(self, other: Tape) -> Tape:
        """The tape with as many layers at another batch size, from the deeper model's tape there, or from its beginning.

        Raises NotRepeatedError where that is other work than the tape that this one was made from.
        """
        if not self.sizes_alone or other.stand_ins != self.second.stand_ins:
            raise NotRepeatedError("more than sizes differs at another batch size")
        _check_same_work(beginning(self.second, other), other)
        tape = beginning(self.tape, other)
        sources = self.sources[: len(tape.sizes)]
        sizes = np.asarray(other.sizes, np.int64)[sources]
        return replace(
            tape, batch=other.batch, sizes=array("q", sizes.tobytes()), size_queries=_queries(other, sources)
        )


def unfold(
    first: Tape,
    second: Tape,
    periods: int,
    *,
    stacks: Collection[str],
    alike_from: int = 0,
    earlier: int = 0,
    third: Tape | None = None,
) -> Unfolded:
    """The tape of a model that has so many `periods` of layers more than that of `first`; that of `second` has one more.

    `stacks` are the dotted paths of the lists of layers ("model.layers"), whose layers are alike from the number `alike_from` on.
    Of events that come again and again it is the last that are taken to come again, or that many `earlier`, where nothing shows
    which. `third`, a tape with two periods more, is compared
    with what is made for it. Raises NotRepeatedError where that differs, and where the second tape does not repeat the first.
    """
    if first.loops or second.loops or first.stand_ins != second.stand_ins:
        raise NotRepeatedError("tapes with loops, or of other assumptions")
    ids: dict[tuple, int] = {}
    rows = _Rows(first, stacks, ids), _Rows(second, stacks, ids)
    stretches = tuple(stretch.steadied(rows[1], alike_from, earlier) for stretch in _stretches(*rows))
    if third is not None and not _same(_unfold(*rows, stretches, 2).tape, third):
        raise NotRepeatedError("a second layer more does not repeat the first one")
    return _unfold(*rows, stretches, periods)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """Events that the deeper tape has in addition, between two events of the shallower one: from `begin` to `end` of its order."""

    at: int
    begin: int
    end: int

    def steadied(self, rows: _Rows, alike_from: int, otherwise: int) -> _Stretch:
        """The same events the fewest repetitions earlier that make the blocks go on as they did from one before to the next, so
        many earlier where none does: the last layer is often not as the others, nor are the first."""
        layers = rows.layers[rows.blocks]
        length = self.end - self.begin
        repetitions = 1
        while (begin := self.begin - repetitions * length) >= 0 and np.array_equal(
            rows.exact[begin : begin + length], rows.exact[self.begin : self.end]
        ):
            repetitions += 1
        for earlier in range(repetitions - 2):
            three, two, one = (self._earlier(earlier + n).of(rows.blocks) for n in range(3))
            numbers = self._earlier(earlier).of(layers)
            others = (numbers != _NO_LAYER) & (numbers < alike_from)
            if np.array_equal(two - one, three - two) and not others.any():
                return self._earlier(earlier)
        return self._earlier(min(otherwise, repetitions - 2)) if repetitions > 2 else self

    def of(self, column: np.ndarray) -> np.ndarray:
        """These events in a column of the deeper tape."""
        return column[self.begin : self.end]

    def _earlier(self, repetitions: int) -> _Stretch:
        moved = repetitions * (self.end - self.begin)
        return _Stretch(at=self.at - moved, begin=self.begin - moved, end=self.end - moved)


class _Rows:
    """A tape's events as columns of numbers.

    `blocks` are the blocks that they allocate or release, `alike` is equal where two events do the same in a layer each, `exact`
    where they do it with as many bytes, and the same size query. Of the blocks, `names` are the modules but for the number of the
    layer, and `layers` are these numbers.
    """

    def __init__(self, tape: Tape, stacks: Collection[str], ids: dict[tuple, int]) -> None:
        self.tape = tape
        numbered = re.compile(rf"({'|'.join(map(re.escape, stacks))})\.(\d+)(?=\.|$)")
        found = [numbered.match(name) for name in tape.module_names]
        names = [
            f"{match[1]}.*{name[match.end() :]}" if match else name
            for match, name in zip(found, tape.module_names, strict=True)
        ]
        layer_of = np.array([int(match[2]) if match else _NO_LAYER for match in found], np.int64)
        modules = np.asarray(tape.modules, np.int64)
        self.names, self.layers = [names[module] for module in tape.modules], layer_of[modules]
        self.sizes = np.asarray(tape.sizes, np.int64)
        kinds = [
            (
                tape.op_names[tape.ops[block]],
                name,
                tape.categories[block],
                stream_of(tape, block),
                block in tape.awaited,
            )
            for block, name in enumerate(self.names)
        ]
        alike = [ids.setdefault(kind, len(ids)) for kind in kinds]
        asked = by_block(tape.size_queries)
        sizes = (
            (kind, size, asked.get(block)) for block, (kind, size) in enumerate(zip(alike, tape.sizes, strict=True))
        )
        exact = [ids.setdefault(row, len(ids)) for row in sizes]
        events = np.asarray(tape.order, np.int64)
        self.allocates = events >= 0
        self.blocks = np.where(self.allocates, events, ~events)
        self.alike, self.exact = (
            2 * np.array(ids_of_blocks, np.int64)[self.blocks] + self.allocates for ids_of_blocks in (alike, exact)
        )


def _stretches(first: _Rows, second: _Rows) -> Iterator[_Stretch]:
    """What the second tape has in addition. Raises NotRepeatedError where it is not what stands before it once more."""
    a, b = first.exact, second.exact
    i = j = 0
    while i < len(a) or j < len(b):
        shorter = min(len(a) - i, len(b) - j)
        other = np.flatnonzero(a[i : i + shorter] != b[j : j + shorter])
        same = int(other[0]) if len(other) else shorter
        i, j = i + same, j + same
        if i == len(a) and j == len(b):
            return
        if (end := _end_of_stretch(first, second, i, j)) is not None:
            yield _Stretch(at=i, begin=j, end=end)
            j = end
        elif i < len(a) and j < len(b) and first.alike[i] == second.alike[j]:
            i, j = i + 1, j + 1  # of another size: one that grows with the number of layers
        else:
            event = int(second.blocks[j]) if j < len(b) else len(second.tape.sizes) - 1
            raise NotRepeatedError(f"{second.tape.describe(event)} repeats nothing")


def _end_of_stretch(first: _Rows, second: _Rows, i: int, j: int) -> int | None:
    """Where the second tape goes on as the first one does after a stretch that repeats as many events before it."""
    b = second.exact
    if i == len(first.exact):
        return len(b) if _repeats(b, j, len(b)) else None
    for ours, theirs in ((first.exact, b), (first.alike, second.alike)):
        ends = j + 1 + np.flatnonzero(theirs[j + 1 : 2 * j + 1] == ours[i])
        if (end := next((end for end in ends.tolist() if _repeats(b, j, end)), None)) is not None:
            return end
    return None


def _repeats(rows: np.ndarray, begin: int, end: int) -> bool:
    before = 2 * begin - end
    return end > begin and before >= 0 and np.array_equal(rows[begin:end], rows[before:begin])


def _unfold(first: _Rows, second: _Rows, stretches: tuple[_Stretch, ...], periods: int) -> Unfolded:
    """The tape with each stretch so many times. Raises NotRepeatedError where it would be no tape."""
    stretches = (*stretches, _Stretch(at=len(first.blocks), begin=len(second.blocks), end=len(second.blocks)))
    positions = _positions(stretches, periods)
    blocks = _extrapolate(first.blocks, second.blocks, stretches, periods)
    allocates = second.allocates[positions]
    _check_order(blocks, allocates)
    sources = second.blocks[positions[allocates]]
    sizes, layers = (
        _extrapolate(of_first[first.blocks], of_second[second.blocks], stretches, periods)[allocates]
        for of_first, of_second in ((first.sizes, second.sizes), (first.layers, second.layers))
    )
    one, two = first.tape, second.tape
    modules, module_names = _modules([second.names[block] for block in sources.tolist()], layers.tolist())
    tape = replace(
        two,
        order=array("q", np.where(allocates, blocks, ~blocks).tobytes()),
        sizes=array("q", sizes.tobytes()),
        categories=np.frombuffer(two.categories, np.uint8)[sources].tobytes(),
        ops=array("l", np.asarray(two.ops)[sources].tobytes()),
        modules=modules,
        module_names=module_names,
        marks=_marks(one, two, periods),
        size_queries=_queries(two, sources),
        second_forward=_grown(one.second_forward, two.second_forward, periods),
        streams=np.frombuffer(two.streams, np.uint8)[sources].tobytes() if two.streams else b"",
        awaited=frozenset(np.flatnonzero(np.isin(sources, list(two.awaited))).tolist()) if two.awaited else frozenset(),
        collectives=_collectives(one, two, periods),
        host_bytes=_grown(one.host_bytes, two.host_bytes, periods),
    )
    same_sizes = np.array_equal(sizes, second.sizes[sources])
    return Unfolded(tape=tape, second=two, sources=sources, sizes_alone=same_sizes and not two.collectives)


def _extrapolate(a: np.ndarray, b: np.ndarray, stretches: tuple[_Stretch, ...], periods: int) -> np.ndarray:
    """A number by event of the unfolded tape, from those of the two tapes' events.

    Where both tapes have an event, it grows with each period as it does from the first to the second; from one repetition of a
    stretch to the next as it did between the two that were traced.
    """
    parts, last, i, j = [], np.empty_like(b), 0, 0
    for stretch in stretches:
        grown = a[i : stretch.at] + (b[j : stretch.begin] - a[i : stretch.at]) * periods
        last[j : stretch.begin] = grown
        before = slice(2 * stretch.begin - stretch.end, stretch.begin)
        steps = b[stretch.begin : stretch.end] - b[before]
        repetitions = last[before] + steps * np.arange(1, periods + 1)[:, None]
        last[stretch.begin : stretch.end] = repetitions[-1]
        parts += [grown, repetitions.ravel()]
        i, j = stretch.at, stretch.end
    return np.concatenate(parts)


def _positions(stretches: tuple[_Stretch, ...], periods: int) -> np.ndarray:
    """By event of the unfolded tape that of the deeper tape which it repeats."""
    parts, j = [], 0
    for stretch in stretches:
        parts += [np.arange(j, stretch.begin), np.tile(np.arange(stretch.begin, stretch.end), periods)]
        j = stretch.end
    return np.concatenate(parts)


def _check_order(blocks: np.ndarray, allocates: np.ndarray) -> None:
    """Raise NotRepeatedError where a block is not allocated in its turn, or not released at most once and after that."""
    allocated, released = np.flatnonzero(allocates), np.flatnonzero(~allocates)
    if not np.array_equal(blocks[allocated], np.arange(len(allocated))):
        raise NotRepeatedError("blocks would not be numbered as they are allocated")
    of = blocks[released]
    possible = len(of) == 0 or (of.min() >= 0 and of.max() < len(allocated) and len(np.unique(of)) == len(of))
    if not possible or (allocated[of] > released).any():
        raise NotRepeatedError("a block would be released that is not there")


def _modules(names: list[str], layers: list[int]) -> tuple[array[int], tuple[str, ...]]:
    """The module of each block and the modules' paths, from these without the number of the layer, and that."""
    known: dict[str, int] = {"": 0}
    numbers: dict[tuple[str, int], int] = {}
    column = array("l")
    for pair in zip(names, layers, strict=True):
        if (number := numbers.get(pair)) is None:
            path = pair[0] if pair[1] == _NO_LAYER else pair[0].replace(".*", f".{pair[1]}", 1)
            number = numbers[pair] = known.setdefault(path, len(known))
        column.append(number)
    return column, tuple(known)


def _marks(one: Tape, two: Tape, periods: int) -> tuple[tuple[int, str], ...]:
    if [name for _, name in one.marks] != [name for _, name in two.marks]:
        raise NotRepeatedError("other phases")
    return tuple(
        (_grown(before, after, periods), name) for (before, name), (after, _) in zip(one.marks, two.marks, strict=True)
    )


def _grown(before: int | None, after: int | None, periods: int) -> int | None:
    return None if before is None or after is None else before + (after - before) * periods


def _queries(tape: Tape, sources: np.ndarray) -> tuple[SizeQuery, ...]:
    """The size queries of blocks that repeat those of a tape."""
    asked = by_block(tape.size_queries)
    return (
        gather({block: asked[source] for block, source in enumerate(sources.tolist()) if source in asked})
        if asked
        else ()
    )


def _collectives(one: Tape, two: Tape, periods: int) -> tuple[Collective, ...]:
    before = {(row.phase, row.kind, row.group, row.again): row for row in one.collectives}
    after = {(row.phase, row.kind, row.group, row.again): row for row in two.collectives}
    if before.keys() != after.keys():
        raise NotRepeatedError("other collectives")
    return tuple(
        replace(
            row,
            calls=_grown(before[key].calls, row.calls, periods),
            bytes=_grown(before[key].bytes, row.bytes, periods),
        )
        for key, row in after.items()
    )


def _check_same_work(one: Tape, other: Tape) -> None:
    try:
        check_same_work(one, other)
    except NotAffineError as error:
        raise NotRepeatedError(str(error)) from error


def _same(one: Tape, other: Tape) -> bool:
    """Whether two tapes say the same; size queries may be in another order."""
    return by_block(one.size_queries) == by_block(other.size_queries) and replace(one, size_queries=()) == replace(
        other, size_queries=()
    )

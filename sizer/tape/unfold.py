"""The tape of a deep model from tapes of the same model with fewer layers, if their layers are equal.

Two tapes of models that differ by one layer (by one period, if layers of several kinds alternate) are equal except for the
additional events of the deeper one: a stretch of the forward pass, one of the backward pass, and some rows of the optimizer's
states. Each such stretch repeats the stretch before it. With more layers it is repeated as many times, and its released blocks
continue from one repetition to the next as they did between the two traced ones. A third tape verifies this. If lists of layers
differ in length, as those of a vision tower and of a language model, the tape is unfolded along each list in turn.

Blocks that are released together, without an event between, may be in another order than in a trace of the whole model: CPython
delays nested deallocation beyond 50 levels. The state of every allocator after them is the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from sizer.tape.affine import NotAffineError, beginning, check_same_work
from sizer.tape.communication import Collective
from sizer.tape.size_queries import SizeQuery, by_block, gather
from sizer.tape.stretches import NO_LAYER, LayersDifferError, Rows, Stretch, find_stretches
from sizer.tape.tape import Tape

Place = TypeVar("Place", int, int | None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """Lists of layers that are `periods` periods longer in one model than in another.

    `paths` are dotted ("model.layers"). Their layers are equal from the number `alike_from` on.
    """

    paths: tuple[str, ...]
    periods: int
    alike_from: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfolded:
    """A tape with more layers than were traced.

    Args:
        sources: By block the block of the deeper traced tape that it repeats.
        sizes_alone: True if each block has the size of its source, and only sizes differ between batch sizes.
    """

    tape: Tape
    second: Tape
    sources: np.ndarray
    sizes_alone: bool

    def check(self, traced: Tape) -> None:
        """Raise LayersDifferError unless a trace of as many layers, or its beginning, is equal."""
        begun = beginning(self.tape, traced)
        _check_same_work(begun, traced)
        if begun.sizes != traced.sizes or by_block(begun.size_queries) != by_block(traced.size_queries):
            raise LayersDifferError("other sizes with as many layers")

    def of(self, other: Tape) -> Tape:
        """Return the tape with as many layers at another batch size, from the deeper model's tape there, or from its beginning.

        Raises LayersDifferError if that is different work than the tape behind this one.
        """
        if not self.sizes_alone or other.stand_ins != self.second.stand_ins:
            raise LayersDifferError("more than sizes differ at another batch size")
        _check_same_work(beginning(self.second, other), other)
        tape = beginning(self.tape, other)
        sources = self.sources[: len(tape.sizes)]
        sizes = np.asarray(other.sizes, np.int64)[sources]
        return replace(
            tape, batch=other.batch, sizes=array("q", sizes.tobytes()), size_queries=_queries(other, sources)
        )


def unfold(tapes: Sequence[Tape], stacks: Sequence[Stacks], *, earlier: int = 0, third: Tape | None = None) -> Unfolded:
    """Return the tape of a model with `periods` more periods in its `stacks` than in the first tape.

    `tapes` are of the shallowest model, and of those with one period more in each combination of the stacks. Tapes without one
    in the first of the stacks come before those with it. Of repeated events the last are assumed to be repeated, or events
    `earlier` before, if nothing shows which. `third`, a tape with two periods more in all stacks or its beginning, is compared
    with its prediction. Raises LayersDifferError if that differs, or if a tape does not repeat the one with a period less.
    """
    if third is not None:
        twice = [replace(one, periods=2) for one in stacks]
        unfold(tapes, twice, earlier=earlier).check(third)
    stack, *others = stacks
    if not others:
        first, second = tapes
        return _along(first, second, stack, earlier)
    half = len(tapes) // 2
    before, after = (unfold(some, others, earlier=earlier) for some in (tapes[:half], tapes[half:]))
    found = _along(before.tape, after.tape, stack, earlier)
    sizes_alone = after.sizes_alone and found.sizes_alone
    return replace(found, second=after.second, sources=after.sources[found.sources], sizes_alone=sizes_alone)


def _along(first: Tape, second: Tape, stack: Stacks, earlier: int) -> Unfolded:
    return align(first, second, [stack], earlier=earlier).unfold(stack.periods)


def align(first: Tape, second: Tape, stacks: Sequence[Stacks] = (), *, earlier: int = 0) -> Aligned:
    """Find the stretches by which the second tape is longer than the first. Their batch sizes may differ.

    `stacks` are the lists of layers that are longer in the second tape's model. `earlier` is as in `unfold`. Raises
    LayersDifferError for other stretches than repeated ones.
    """
    if first.loops or second.loops or second.settled or first.stand_ins != second.stand_ins:
        raise LayersDifferError("tapes with loops, with a host that waits for streams, or with other assumptions")
    ids: dict[tuple, int] = {}
    across_batches = first.batch != second.batch
    paths = paths_of(stacks)
    one, two = (Rows(tape, paths, ids, across_batches=across_batches) for tape in (first, second))
    alike_from = {path: stack.alike_from for stack in stacks for path in stack.paths}
    begins = {name: alike_from.get(name.partition(".*")[0], 0) for name in set(two.names)}
    begin = np.array([begins[name] for name in two.names], np.int64)
    unlike = (two.layers != NO_LAYER) & (two.layers < begin)
    stretches = tuple(stretch.steadied(two, unlike, earlier) for stretch in find_stretches(one, two))
    return Aligned(first=one, second=two, stretches=stretches)


def paths_of(stacks: Sequence[Stacks]) -> list[str]:
    """Return the dotted paths of lists of layers."""
    return [path for stack in stacks for path in stack.paths]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aligned:
    """Two tapes, and the stretches by which the second is longer."""

    first: Rows
    second: Rows
    stretches: tuple[Stretch, ...]

    def common_events(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions of the events that both tapes have, in the order of each."""
        ours = np.arange(len(self.first.blocks))
        theirs = ours.copy()
        for stretch in self.stretches:
            theirs[stretch.position :] += stretch.end - stretch.begin
        return ours, theirs

    def unfold(self, periods: int) -> Unfolded:
        """Return the tape with each stretch repeated `periods` times. Raises LayersDifferError if it would be no valid tape."""
        return _unfold(self.first, self.second, self.stretches, periods)


def _unfold(first: Rows, second: Rows, stretches: tuple[Stretch, ...], periods: int) -> Unfolded:
    stretches = (*stretches, Stretch(position=len(first.blocks), begin=len(second.blocks), end=len(second.blocks)))
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
    modules, module_names = name_modules([second.names[block] for block in sources.tolist()], layers.tolist())
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
        awaited=frozenset(_unfolded(sources, two.awaited)),
        outputs=tuple(
            _grown_blocks(sources, before, after, periods)
            for before, after in zip(one.outputs, two.outputs, strict=True)
        ),
        graphs=tuple(tuple(_unfolded(sources, blocks)) for blocks in two.graphs),
        half_outputs=frozenset(_grown_blocks(sources, sorted(one.half_outputs), sorted(two.half_outputs), periods)),
        collectives=_collectives(one, two, periods),
        host_bytes=_grown(one.host_bytes, two.host_bytes, periods),
    )
    same_sizes = np.array_equal(sizes, second.sizes[sources])
    return Unfolded(tape=tape, second=two, sources=sources, sizes_alone=same_sizes and not two.collectives)


def _unfolded(sources: np.ndarray, blocks: Collection[int]) -> list[int]:
    """Return the blocks of the unfolded tape that repeat some blocks of the traced one."""
    return np.flatnonzero(np.isin(sources, list(blocks))).tolist() if blocks else []


def _grown_blocks(sources: np.ndarray, before: Sequence[int], after: Sequence[int], periods: int) -> tuple[int, ...]:
    """Return the blocks of the unfolded tape that correspond to some blocks of the two traced ones.

    Blocks that are equally many in both, such as the states after the last layer, stay as many. Otherwise each layer has its
    own.
    """
    if len(before) != len(after):
        return tuple(_unfolded(sources, after))
    return tuple(_grown(one, other, periods) for one, other in zip(before, after, strict=True))


def _extrapolate(a: np.ndarray, b: np.ndarray, stretches: tuple[Stretch, ...], periods: int) -> np.ndarray:
    """Return a number by event of the unfolded tape, from those of the two tapes' events.

    For an event of both tapes, it grows with each period as from the first to the second tape. In a repeated stretch it grows
    from one repetition to the next as between the two traced ones.
    """
    parts, last, i, j = [], np.empty_like(b), 0, 0
    for stretch in stretches:
        grown = a[i : stretch.position] + (b[j : stretch.begin] - a[i : stretch.position]) * periods
        last[j : stretch.begin] = grown
        before = slice(2 * stretch.begin - stretch.end, stretch.begin)
        steps = b[stretch.begin : stretch.end] - b[before]
        repetitions = last[before] + steps * np.arange(1, periods + 1)[:, None]
        last[stretch.begin : stretch.end] = repetitions[-1]
        parts += [grown, repetitions.ravel()]
        i, j = stretch.position, stretch.end
    return np.concatenate(parts)


def _positions(stretches: tuple[Stretch, ...], periods: int) -> np.ndarray:
    """Return by event of the unfolded tape the position of its event in the deeper tape."""
    parts, j = [], 0
    for stretch in stretches:
        parts += [np.arange(j, stretch.begin), np.tile(np.arange(stretch.begin, stretch.end), periods)]
        j = stretch.end
    return np.concatenate(parts)


def _check_order(blocks: np.ndarray, allocates: np.ndarray) -> None:
    """Raise LayersDifferError unless each block is allocated in order, and released at most once and later."""
    allocated, released = np.flatnonzero(allocates), np.flatnonzero(~allocates)
    if not np.array_equal(blocks[allocated], np.arange(len(allocated))):
        raise LayersDifferError("blocks would not be numbered as they are allocated")
    of = blocks[released]
    possible = len(of) == 0 or (of.min() >= 0 and of.max() < len(allocated) and len(np.unique(of)) == len(of))
    if not possible or (allocated[of] > released).any():
        raise LayersDifferError("a block would be released that is not there")


def name_modules(names: list[str], layers: list[int]) -> tuple[array[int], tuple[str, ...]]:
    """Return the module of each block and the modules' paths, from paths without the number of the layer, and that number."""
    known: dict[str, int] = {"": 0}
    numbers: dict[tuple[str, int], int] = {}
    column = array("l")
    for pair in zip(names, layers, strict=True):
        if (number := numbers.get(pair)) is None:
            path = pair[0] if pair[1] == NO_LAYER else pair[0].replace(".*", f".{pair[1]}", 1)
            number = numbers[pair] = known.setdefault(path, len(known))
        column.append(number)
    return column, tuple(known)


def _marks(one: Tape, two: Tape, periods: int) -> tuple[tuple[int, str], ...]:
    if [name for _, name in one.marks] != [name for _, name in two.marks]:
        raise LayersDifferError("other phases")
    return tuple(
        (_grown(before, after, periods), name) for (before, name), (after, _) in zip(one.marks, two.marks, strict=True)
    )


def _grown(before: Place, after: Place, periods: int) -> Place:
    return None if before is None or after is None else before + (after - before) * periods


def _queries(tape: Tape, sources: np.ndarray) -> tuple[SizeQuery, ...]:
    """Return the size queries of blocks that repeat those of a tape."""
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
        raise LayersDifferError("other collectives")
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
        raise LayersDifferError(str(error)) from error


def same_tapes(one: Tape, other: Tape) -> bool:
    """Return whether two tapes say the same; size queries may be in another order."""
    return by_block(one.size_queries) == by_block(other.size_queries) and replace(one, size_queries=()) == replace(
        other, size_queries=()
    )

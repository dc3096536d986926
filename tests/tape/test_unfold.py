"""Tapes of deep models from those of shallower ones, on tapes written by hand."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import pytest

from sizer.tape.communication import Collective
from sizer.tape.size_queries import SizeQuery, by_block
from sizer.tape.stretches import LayersDifferError
from sizer.tape.tape import Tape
from sizer.tape.unfold import Stacks, unfold


def tape_of(layers: int, *, batch: int = 1, last: int = 0) -> Tape:
    """A model of so many layers: each keeps an activation, which its backward pass releases when it has made a gradient; gradients
    are released in the order of the layers. The `last` layer has a block more in its backward pass, of so many bytes."""
    order, sizes, modules, queries = array("q"), array("q"), array("l"), []
    names = ["", "embedding", *(f"layers.{layer}" for layer in range(layers))]

    def allocate(size: int, module: int) -> int:
        sizes.append(size)
        modules.append(module)
        order.append(len(sizes) - 1)
        return len(sizes) - 1

    embedded = allocate(100 * batch, 1)
    kept = [allocate(10 * batch, 2 + layer) for layer in range(layers)]
    queries = tuple(
        SizeQuery(kind="asked", words=("a",), numbers=(batch, block), blocks=(block,)) for block in (embedded,)
    )
    forward = len(order)
    gradients = []
    for layer in reversed(range(layers)):
        if last and layer == layers - 1:
            order.append(~allocate(last, 2 + layer))
        gradients.append(allocate(7, 2 + layer))
        order.append(~kept[layer])
    order.append(~embedded)
    backward = len(order)
    every = allocate(8 * layers, 0)  # a value for each layer
    order.extend(~gradient for gradient in reversed(gradients))
    order.append(~every)
    rows = (("backward", 20 * layers), ("optimizer", 3))
    told = (Collective(phase=p, kind="all-reduce", group="world", again=False, calls=1, bytes=b) for p, b in rows)
    return Tape(
        batch=batch,
        order=order,
        sizes=sizes,
        categories=bytes(len(sizes)),
        ops=array("l", [0] * len(sizes)),
        modules=modules,
        op_names=("aten.op",),
        module_names=tuple(names),
        marks=((forward, "forward"), (backward, "backward"), (len(order), "optimizer")),
        size_queries=queries,
        collectives=tuple(told),
    ).validate()


def deeper(periods: int) -> list[Stacks]:
    return [Stacks(paths=("layers",), periods=periods)]


@pytest.mark.parametrize("last", [0, 5])
@pytest.mark.parametrize("layers", [4, 9, 40])
def test_a_tape_goes_on_with_more_layers(layers: int, last: int):
    tapes = [tape_of(count, last=last) for count in (3, 4, 5)]
    unfolded = unfold(tapes[:2], deeper(layers - 3), third=tapes[2])
    assert unfolded.tape == tape_of(layers, last=last)


def two_lists(one: int, other: int, *, batch: int = 1, grows: bool = True) -> Tape:
    """A model of two parts, each with layers, of which the second comes after the first in each phase.

    With `grows` the optimizer of each part has a value for each layer.
    """
    first, second = (tape_of(layers, batch=batch, last=5) for layers in (one, other))
    names = [list(first.module_names), [f"tower.{name}" for name in second.module_names]]
    order, marks, begun = array("q"), [], [0, 0]
    sizes, modules = array("q"), array("l")
    known = {"": 0}  # modules in the order in which they allocate
    numbers: dict[tuple[int, int], int] = {}
    for at, (_, phase) in enumerate(first.marks):
        for part, tape in enumerate((first, second)):
            for event in tape.order[begun[part] : tape.marks[at][0]]:
                block = event if event >= 0 else ~event
                if event >= 0:
                    numbers[part, block] = len(numbers)
                    sizes.append(tape.sizes[block] if grows or tape.modules[block] else 8)
                    modules.append(known.setdefault(names[part][tape.modules[block]], len(known)))
                order.append(numbers[part, block] if event >= 0 else ~numbers[part, block])
            begun[part] = tape.marks[at][0]
        marks.append((len(order), phase))
    return replace(
        first,
        order=order,
        sizes=sizes,
        modules=modules,
        module_names=tuple(known),
        categories=bytes(len(sizes)),
        ops=array("l", [0] * len(sizes)),
        marks=tuple(marks),
        size_queries=(),
        collectives=(),
    ).validate()


def two_deeper(*counts: int) -> list[Stacks]:
    paths = ("layers", "tower.layers")
    return [Stacks(paths=(path,), periods=count - 3) for path, count in zip(paths, counts, strict=True)]


@pytest.mark.parametrize("counts", [(4, 9), (12, 5)])
def test_lists_of_layers_of_different_lengths(counts: tuple[int, int]):
    tapes = [two_lists(one, other) for one in (3, 4) for other in (3, 4)]
    unfolded = unfold(tapes, two_deeper(*counts), third=two_lists(5, 5))
    whole = two_lists(*counts)
    assert unfolded.tape == whole
    sources = [tapes[3].sizes[source] for source in unfolded.sources]
    assert unfolded.sizes_alone is (sources == whole.sizes.tolist())


def test_a_block_repeats_one_of_the_deeper_tape():
    second = tape_of(4)
    unfolded = unfold([tape_of(3), second], deeper(7))
    assert not unfolded.sizes_alone  # one grows with the layers, and collectives do
    same = [tape_of(10).sizes[block] == second.sizes[source] for block, source in enumerate(unfolded.sources)]
    assert np.flatnonzero(np.logical_not(same)).tolist() == [21]


def test_other_batch_sizes_have_the_sizes_of_the_deeper_tape():
    def without(tape: Tape) -> Tape:
        sizes = array("q", [0 if tape.modules[block] == 0 else size for block, size in enumerate(tape.sizes)])
        return replace(tape, collectives=(), sizes=sizes)

    unfolded = unfold([without(tape_of(layers)) for layers in (3, 4)], deeper(7))
    assert unfolded.sizes_alone
    assert unfolded.of(without(tape_of(4, batch=6))) == without(tape_of(10, batch=6))
    with pytest.raises(LayersDifferError, match="event 6 is"):
        unfolded.of(without(tape_of(4, batch=6, last=1)))


def test_queries_are_those_of_the_blocks_that_are_repeated():
    def asked(layers: int) -> Tape:
        queries = tuple(SizeQuery(kind="k", words=(), numbers=(1,), blocks=(block,)) for block in range(1, layers + 1))
        return replace(tape_of(layers), size_queries=queries)

    unfolded = unfold([asked(3), asked(4)], deeper(7), third=asked(5))
    assert by_block(unfolded.tape.size_queries) == by_block(asked(10).size_queries)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tape: replace(tape, stand_ins=("assumed",)), "other assumptions"),
        (lambda tape: replace(tape, categories=bytes(len(tape.sizes) - 1) + b"\1"), "repeats nothing"),
        (lambda tape: replace(tape, marks=tape.marks[:-1]), "other phases"),
        (lambda tape: replace(tape, collectives=tape.collectives[:1]), "other collectives"),
    ],
    ids=["assumptions", "events", "phases", "collectives"],
)
def test_a_deeper_tape_that_repeats_nothing_is_refused(change, words: str):
    with pytest.raises(LayersDifferError, match=words):
        unfold([tape_of(3), change(tape_of(4))], deeper(7))


def test_a_third_depth_shows_what_two_do_not():
    sizes = tape_of(5).sizes[:]
    sizes[3] += 1
    with pytest.raises(LayersDifferError, match="other sizes with as many layers"):
        unfold([tape_of(3), tape_of(4)], deeper(7), third=replace(tape_of(5), sizes=sizes))

"""Tapes of models with fewer layers from those of deeper ones, on tapes written by hand."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest

from sizer.tape.shallower import Shallower
from sizer.tape.stretches import LayersDifferError
from sizer.tape.tape import Tape
from sizer.tape.unfold import unfold
from tests.tape.test_unfold import two_deeper, two_lists


def lists(one: int, other: int, *, batch: int = 1) -> Tape:
    return two_lists(one, other, batch=batch, grows=False)


def shallower(*counts: int) -> Shallower:
    return Shallower(lists(3, 3), lists(4, 4), [lists(3, 4)], two_deeper(*counts))


def with_events(tape: Tape, position: int, module: str) -> Tape:
    """Return the tape with a block more, which is allocated and released at a position of its order."""
    new = sum(event >= 0 for event in tape.order[:position])
    events = [event + 1 if event >= new else event - 1 if ~event >= new else event for event in tape.order]

    def column(values: Sequence[int], kind: str, value: int) -> array[int]:
        return array(kind, [*values[:new], value, *values[new:]])

    return replace(
        tape,
        order=array("q", [*events[:position], new, ~new, *events[position:]]),
        sizes=column(tape.sizes, "q", 77),
        modules=column(tape.modules, "l", tape.module_names.index(module)),
        ops=column(tape.ops, "l", 0),
        categories=bytes(len(tape.sizes) + 1),
        marks=tuple((at + 2 if at > position else at, name) for at, name in tape.marks),
    ).validate()


def test_one_list_is_shorter_than_in_the_deeper_tape():
    assert shallower(9, 6).tapes() == (lists(3, 3), lists(3, 4), lists(4, 3), lists(4, 4))


def test_the_same_layers_are_left_out_of_a_like_tape():
    tapes = shallower(9, 6).tapes(lists(4, 4, batch=6))
    assert tapes[:3] == (lists(3, 3, batch=6), lists(3, 4, batch=6), lists(4, 3, batch=6))
    assert unfold(tapes, two_deeper(9, 6)).tape == lists(9, 6, batch=6)


def test_events_may_come_and_go_around_the_layers():
    like = with_events(lists(4, 4, batch=2), 1, "embedding")  # after the first part's embedding
    unfolded = unfold(shallower(9, 6).tapes(like), two_deeper(9, 6))
    assert unfolded.tape == with_events(lists(9, 6, batch=2), 1, "embedding")


@pytest.mark.parametrize("module", ["layers.1", "layers.2"])
def test_layers_that_do_more_are_refused(module: str):
    tape = lists(4, 4)
    position = 1 + tape.order.index(tape.modules.index(tape.module_names.index(module)))
    with pytest.raises(LayersDifferError, match="layers do other work"):
        shallower(9, 6).tapes(with_events(tape, position, module))


@pytest.mark.parametrize(
    ("tapes", "words"),
    [
        ((two_lists(3, 3), two_lists(4, 4), [two_lists(3, 4)]), "sizes that grow"),
        ((lists(3, 3), replace(lists(4, 4), host_bytes=8), [lists(3, 4)]), "host memory"),
        ((lists(3, 3), with_events(lists(4, 4), 1, "embedding"), [lists(3, 4)]), "repeats nothing"),
    ],
    ids=["sizes", "host memory", "other events"],
)
def test_what_is_of_no_list_is_refused(tapes: tuple[Tape, Tape, list[Tape]], words: str):
    with pytest.raises(LayersDifferError, match=words):
        Shallower(*tapes, two_deeper(9, 6))

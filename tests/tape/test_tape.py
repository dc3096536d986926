"""Tapes and the affine tape through two of them."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from sizer.tape.affine import NotAffineError, fit_affine
from sizer.tape.tape import CATEGORIES
from tests.tape.tapes import make_tape


def tape_at(batch: int, *, extra: int = 0, marks=((2, "load"), (5, "forward"))):
    """Weights of 4000 bytes, inputs of 12 a sample, activations of 64 + 8 a sample."""
    events = [
        ("weight", 4000, "parameter"),
        ("input", 12 * batch, "input"),
        ("relu", 64 + 8 * batch + extra),
        "-input",
        ("sum", 4),
    ]
    return make_tape(events, batch=batch, marks=marks)


def test_two_tapes_make_every_other():
    affine = fit_affine(tape_at(2), tape_at(3))
    assert list(affine.constant) == [4000, 0, 64, 4]
    assert list(affine.per_item) == [0, 12, 8, 0]
    # batch 16: 12*16 = 192, 64 + 8*16 = 192
    assert list(affine.evaluate(16).sizes) == [4000, 192, 192, 4]
    assert affine.evaluate(16) == tape_at(16)
    assert affine.check(tape_at(16)) is None


def test_the_order_of_the_two_does_not_matter():
    assert fit_affine(tape_at(7), tape_at(2)).evaluate(100) == tape_at(100)


def test_a_size_that_does_not_grow_by_whole_bytes_is_refused():
    # from 64 + 16 = 80 at batch 2 to 64 + 40 + 1 = 105 at batch 5: 25 bytes for 3 items
    with pytest.raises(NotAffineError, match=r"aten\.relu in m\.relu .*took 80 bytes at batch 2 and 105 at batch 5"):
        fit_affine(tape_at(2), tape_at(5, extra=1))


def test_a_third_tape_that_differs_is_named():
    affine = fit_affine(tape_at(2), tape_at(3))
    with pytest.raises(NotAffineError, match=r"aten\.relu .*took 193 bytes at batch 16; .*2 and 3 it should take 192"):
        affine.check(tape_at(16, extra=1))


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([("weight", 4000, "parameter"), ("gelu", 1)], r"event 1 is an allocation by aten\.input .* aten\.gelu"),
        ([("weight", 4000, "buffer")], r"event 0 is an allocation by aten\.weight"),
        ([("weight", 4000, "parameter")], r"event 1 is an allocation by aten\.input .* and the end at batch 3"),
        ([("weight", 4000, "parameter"), "-weight"], r"and the release of aten\.weight"),
    ],
)
def test_another_order_is_refused_at_its_first_event(events, message):
    with pytest.raises(NotAffineError, match=message):
        fit_affine(tape_at(2), make_tape(events, batch=3))


def test_other_phases_are_refused():
    with pytest.raises(NotAffineError, match=r"phases \(\(2, 'load'\), \(5, 'forward'\)\) at batch 2 and phases"):
        fit_affine(tape_at(2), tape_at(3, marks=((1, "load"), (5, "forward"))))


def test_names_are_compared_not_their_numbers():
    second = tape_at(3)
    flipped = replace(second, op_names=second.op_names[::-1], ops=array("l", reversed(range(len(second.sizes)))))
    assert fit_affine(tape_at(2), flipped).evaluate(9).sizes == tape_at(9).sizes


def test_stand_ins_of_both_are_kept_once():
    first, second = tape_at(2), tape_at(3)
    affine = fit_affine(replace(first, stand_ins=("a", "b")), replace(second, stand_ins=("b", "c")))
    assert affine.tape.stand_ins == ("a", "b", "c")


def test_the_same_batch_twice_is_no_line():
    with pytest.raises(ValueError, match="both tapes are of batch 2"):
        fit_affine(tape_at(2), tape_at(2))


def test_sizes_below_zero_are_refused():
    # 10 bytes at batch 2, 20 at batch 3: -10 + 10*batch is 0 at batch 1; 5 and 15 make -15 + 10*batch = -5 there.
    def made(small: int, large: int):
        return fit_affine(make_tape([("a", small)], batch=2), make_tape([("a", large)], batch=3))

    assert list(made(10, 20).evaluate(1).sizes) == [0]
    with pytest.raises(NotAffineError, match=r"would need -5 bytes at batch 1 \(-15 \+ 10\*batch\)"):
        made(5, 15).evaluate(1)


@pytest.mark.parametrize(("batch", "message"), [(0, "at least 1"), (2**62, "give a smaller batch")])
def test_batches_out_of_range_are_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        fit_affine(tape_at(2), tape_at(3)).evaluate(batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": array("q", [0, 1, 2, ~1, 3, 3])}, "block 3 is allocated twice"),
        ({"order": array("q", [0, 1, 2, ~1, ~1, 3])}, "block 1 is released while not alive"),
        ({"order": array("q", [0, 1, 2, ~1])}, "block 3 is never allocated"),
        ({"order": array("q", [0, 1, 2, 9])}, "names block 9; the tape has 4"),
        ({"sizes": array("q", [1, 2, 3, -4])}, "sizes has values -4 to 3"),
        ({"categories": b"\x00\x00\x00\x7f"}, f"categories has values 0 to 127; allowed are 0 to {len(CATEGORIES) - 1}"),
        ({"categories": b"\x00"}, "categories has 1 rows and sizes has 4"),
        ({"marks": ((3, "load"), (2, "forward"))}, "must ascend within 0 to 5"),
        ({"marks": ((3, "load"), (9, "forward"))}, "must ascend within 0 to 5"),
        ({"marks": ((3, "load"), (4, "load"))}, "name a phase twice"),
        ({"marks": ((3, "sleep"),)}, "phase 'sleep' is unknown"),
    ],
)
def test_a_broken_tape_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(tape_at(2), **change).validate()

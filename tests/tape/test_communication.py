"""What ranks tell each other: bytes by collective."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sizer.tape.affine import NotAffineError, fit_affine
from sizer.tape.archive import Traced, pack, unpack
from sizer.tape.communication import Collective, Volume, bytes_per_item, volumes_of_step
from sizer.tape.family import TapeFamily
from sizer.tape.tape import Tape
from tests.tape.tapes import make_tape


def row(phase: str, size: int, kind: str = "all-reduce", *, again: bool = False, calls: int = 1) -> Collective:
    return Collective(phase=phase, kind=kind, group="world", again=again, calls=calls, bytes=size)


def test_a_step_is_the_second_one() -> None:
    rows = (row("load", 7), row("forward", 5), row("backward", 5), row("step2", 9), row("step2", 20, "broadcast"))
    expected = [("broadcast", 1, 20), ("all-reduce", 1, 9)]
    assert [(one.kind, one.calls, one.bytes) for one in volumes_of_step(rows)] == expected
    assert [(one.kind, one.calls, one.bytes) for one in volumes_of_step(rows[:3])] == [("all-reduce", 2, 10)]


def test_a_pass_that_comes_again_counts_so_often() -> None:
    # 10 bytes in each pass but the last, 14 in the last: 10 * 3 + 14
    rows = (row("step2", 10, again=True, calls=2), row("step2", 14, calls=3))
    assert volumes_of_step(rows, passes=4) == (Volume(kind="all-reduce", group="world", calls=9, bytes=44),)
    assert volumes_of_step((row("step2", 10, again=True),), passes=2)[0].bytes == 10


def test_the_second_step_grows_as_the_first() -> None:
    first = (row("forward", 10), row("backward", 30), row("optimizer", 8), row("step2", 48))
    second = (row("forward", 14), row("backward", 36))
    assert bytes_per_item(first, second, ["load", "forward", "backward"], 2) == (2, 3, 0, 5)
    whole = (*second, row("optimizer", 8), row("step2", 58))
    assert bytes_per_item(first, whole, ["load", "forward", "backward", "optimizer", "step2"], 2) == (2, 3, 0, 5)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ((row("forward", 11),), r"^all-reduce over world in forward is Collective"),
        ((row("forward", 12, calls=2),), r"^all-reduce over world in forward is Collective"),
        ((), r"^all-reduce over world in forward is None at another batch size"),
        (
            (row("forward", 12), row("forward", 2, "broadcast")),
            r"^Collective\(.*'broadcast'.* is only at another batch size",
        ),
    ],
)
def test_other_collectives_at_another_batch_are_on_no_line(second: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bytes_per_item((row("forward", 10),), second, ["forward"], 2)


def told(batch: int, size: int) -> Tape:
    tape = make_tape([("a", 8 * batch), "-a"], batch=batch)
    return replace(tape, collectives=(row("forward", size),))


def test_a_line_gives_the_bytes_at_every_batch() -> None:
    line = fit_affine(told(2, 10), told(3, 12))
    assert line.evaluate(7).collectives == (row("forward", 20),)
    line.check(told(5, 16))
    with pytest.raises(
        NotAffineError, match=r"^collectives are .*bytes=17.* at batch 5; they should be .*bytes=16"
    ):
        line.check(told(5, 17))
    with pytest.raises(NotAffineError, match=r"^all-reduce over world in forward is None at another batch size"):
        fit_affine(told(2, 10), replace(told(3, 12), collectives=()))


def test_they_are_kept_with_the_tapes() -> None:
    family = TapeFamily(lines=((1, fit_affine(told(2, 10), told(3, 12))),), exact=(told(1, 9),))
    assert unpack(pack(Traced(family=family))) == Traced(family=family)

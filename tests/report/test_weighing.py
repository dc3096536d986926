"""What takes the memory when most of it is taken."""

from __future__ import annotations

from dataclasses import replace

from sizer.decision.ranks import LOSS, UNSHARDED, weigh_peak
from sizer.tape.tape import RESIZE
from tests.tape.tapes import make_tape

# 100 + 60 + 50 + 30 are alive together, then 100 + 60 + 50 + 10 at the end
EVENTS = (
    ("w", 100, "parameter"), ("gathered", 60, "temporary"), ("kept", 50, "activation"), ("softmax", 30, "temporary"),
    "-softmax", ("late", 10, "temporary"),
)  # fmt: skip


def test_the_bytes_at_the_peak_by_kind_the_most_first() -> None:
    assert weigh_peak(make_tape(EVENTS)) == {"parameter": 100, "temporary": 90, "activation": 50}
    assert list(weigh_peak(make_tape(EVENTS))) == ["parameter", "temporary", "activation"]


def test_gathered_parameters_and_losses_are_told_apart() -> None:
    names = ("Module.to", RESIZE, "aten.mm.default", "aten._log_softmax.default", "aten.mm.default")
    tape = replace(make_tape(EVENTS), op_names=names)
    assert weigh_peak(tape) == {"parameter": 100, UNSHARDED: 60, "activation": 50, LOSS: 30}


def test_what_stays_is_never_called_a_loss_or_gathered() -> None:
    tape = replace(make_tape([("w", 8, "parameter"), ("g", 8, "gradient")]), op_names=(RESIZE, "aten._log_softmax"))
    assert weigh_peak(tape) == {"parameter": 8, "gradient": 8}


def test_nothing_weighs_nothing() -> None:
    assert weigh_peak(make_tape([])) == {}

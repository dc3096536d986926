"""The parts of the range of a process, each by hand on small tapes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sizer.catalogue.gpus import GPUS
from sizer.device.record.recording import CaseRecord, read_measured
from sizer.report.bounds import (
    BETWEEN_VERSIONS,
    CONTEXT,
    ENGINES,
    MODELS,
    ZERO_GRAD,
    Margin,
    engines_limit,
    engines_margin,
)
from sizer.report.fit import fit, fits_in
from sizer.report.largest_batch import largest_batch
from sizer.tape.affine import fit_affine
from sizer.tape.family import TapeFamily
from sizer.tape.loop_choices import keep_gradients
from sizer.tape.size_queries import SizeQuery
from sizer.tape.tape import Tape
from tests.tape.tapes import make_tape

MIB = 2**20
GPU = replace(GPUS["a100-80gb"], context_low_bytes=10 * MIB, context_bytes=20 * MIB, context_high_bytes=40 * MIB)
RECORDED = Path(__file__).parents[1] / "null_driver" / "recorded"
# Names of recorded cases with convolutions begin so.
CONVOLVING = (
    "resnet", "vgg", "mobilenet", "efficientnet", "convnext",
    "regnet", "densenet", "inception", "deeplab", "fcn",
)  # fmt: skip


def convolved(results: int, *, batch: int = 1, resolved: bool = True) -> Tape:
    """A weight of 100 MiB and a convolution's result, around them a workspace of 64 MiB a sample."""
    events = [
        ("weight", 100 * MIB, "parameter"),
        ("out", results * MIB * batch),
        ("space", 64 * MIB * batch, "workspace"),
        "-space",
        "-out",
    ]
    tape = make_tape(events, batch=batch, marks=[(1, "load"), (5, "forward")])
    names = ("aten.empty", "aten.convolution.default", "aten.convolution.default")
    return replace(tape, op_names=names, resolved=frozenset({2} if resolved else ()))


def test_engines_move_reserved_memory_by_a_share_of_it() -> None:
    # reserved 100 + 50 + 64 = 214 MiB
    found = fit(convolved(50), GPU)
    share = 214 * MIB * BETWEEN_VERSIONS // 100
    assert found.margins == (
        Margin(name=CONTEXT, less_bytes=10 * MIB, more_bytes=20 * MIB),
        Margin(name=ENGINES, less_bytes=share, more_bytes=share),
    )
    assert found.process_low_bytes == 224 * MIB - share and found.process_high_bytes == 254 * MIB + share


def test_engines_move_no_more_than_convolutions_have_results() -> None:
    assert engines_margin(engines_limit(convolved(3)), 10**12) == 3 * MIB
    assert engines_margin(engines_limit(convolved(3, resolved=False)), 10**12) == 0


def test_the_verdict_turns_where_the_range_ends() -> None:
    found = fit(convolved(50), GPU)
    fits = {
        total: fit(convolved(50), replace(GPU, total_bytes=total)).fits
        for total in (found.process_high_bytes, found.process_high_bytes - 4 * MIB, found.process_low_bytes - 4 * MIB)
    }
    assert list(fits.values()) == [True, "uncertain", False]


def test_the_largest_batch_allows_for_engines() -> None:
    first, second = (
        replace(
            convolved(50, batch=batch, resolved=False),
            size_queries=(SizeQuery(kind="cuDNN convolution", words=(), numbers=(batch,), blocks=(2,)),),
        )
        for batch in (2, 3)
    )
    found = largest_batch(
        TapeFamily(lines=((1, fit_affine(first, second)),)),
        replace(GPU, total_bytes=10_000 * MIB),
        dtype="",
        oracle=lambda asked: [64 * MIB * numbers[0] for _, _, numbers in asked],
    )
    # 9,960 MiB beside the largest context, of which engines may take 7 parts in 107: 9,308 hold 100 + 80 * (50 + 64), not 81
    assert found.batch == 80
    # 9,990 MiB beside the smallest one, and as many more as 7 parts in 93: 10,741 hold 100 + 93 * 114
    assert found.possible_batch == 93


def test_two_versions_of_cudnn_differ_by_no_more_in_nine_cases_of_ten() -> None:
    moved = []
    for older in sorted(RECORDED.glob("*-2.11")):
        newer = {case.name: case for case in read_measured(older.with_name(older.name.replace("-2.11", "-2.15")))}
        moved += [_moved(case, newer[case.name]) for case in read_measured(older) if case.name.startswith(CONVOLVING)]
    assert len(moved) > 40
    within = sum(abs(one) <= BETWEEN_VERSIONS for one in moved) / len(moved)
    assert 0.9 <= within < 1


def _moved(older: CaseRecord, newer: CaseRecord) -> float:
    before, after = (
        max(phase.peak_reserved_bytes for phase in one.measured.measurement.phases) for one in (older, newer)
    )
    return 100 * (before - after) / after


def test_a_model_is_anything_from_nothing_to_twice_itself() -> None:
    tape = make_tape([("weight", 100 * MIB, "parameter"), ("_cudnn_rnn", 64 * MIB, "workspace"), "-_cudnn_rnn"])
    (found,) = (margin for margin in fit(tape, GPU).margins if margin.name == MODELS)
    assert (found.less_bytes, found.more_bytes) == (64 * MIB, 64 * MIB)


def test_gradients_may_live_through_the_next_forward_pass() -> None:
    step = [("relu", 30 * MIB), "-relu", ("grad", 30 * MIB, "gradient")]
    again = ["-grad", ("relu2", 30 * MIB), "-relu2", ("grad2", 30 * MIB, "gradient"), "-grad2"]
    marks = [(1, "load"), (2, "forward"), (4, "backward"), (4, "optimizer"), (9, "step2")]
    tape = make_tape([("weight", 10 * MIB, "parameter"), *step, *again], marks=marks)
    assert keep_gradients(tape) is tape  # where the second forward pass ends is not known
    tape = replace(tape, second_forward=7)
    assert list(keep_gradients(tape).order) == [0, 1, -2, 2, 3, -4, -3, 4, -5]
    (found,) = (margin for margin in fit(tape, GPU).margins if margin.name == ZERO_GRAD)
    # the gradient takes the segment that the activation left; where it is still alive, the next activation takes another one
    assert (found.less_bytes, found.more_bytes) == (0, 30 * MIB)


def test_a_cell_and_the_search_for_the_largest_batch_have_one_verdict() -> None:
    # Reserved 100 + 12 + 12 + 1,000 MiB, of which engines may take 7 %: 79. A gradient that lives through the second forward pass
    # leaves no place for its result: 2,100 and what is cached, of which 7 % are 147.
    events = [
        ("weight", 100 * MIB, "parameter"), ("out", 12 * MIB), ("space", 12 * MIB, "workspace"), "-space", "-out",
        ("grad", 1000 * MIB, "gradient"), "-grad", ("out2", 1000 * MIB), "-out2",
    ]  # fmt: skip
    marks = [(1, "load"), (5, "forward"), (6, "backward"), (6, "optimizer"), (9, "step2")]
    tape = make_tape(events, marks=marks)
    names = ("aten.empty", *["aten.convolution.default"] * 2, "aten.add", "aten.convolution.default")
    tape = replace(tape, op_names=names, resolved=frozenset({2}), second_forward=8)
    verdicts = [
        (fit(tape, gpu).fits, fits_in(tape, gpu))
        for gpu in (replace(GPU, total_bytes=total * MIB) for total in range(2200, 2320, 4))
    ]
    assert {one for one, _ in verdicts} == {True, "uncertain"}
    assert [one for one, _ in verdicts] == [other for _, other in verdicts]

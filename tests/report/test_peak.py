"""What is alive at the peak, of tapes small enough to say so by hand."""

from __future__ import annotations

import pytest

from sizer.base.codec import decode, encode
from sizer.catalogue.gpu_keys import find_gpu
from sizer.report.peak import LARGEST, ModuleBytes, PeakReport, find_peak, with_children
from sizer.tape.tape import BlockNotes, PhaseOfStep, Tensor
from tests.tape.tapes import make_tape

GPU = find_gpu("a100-80gb")
MIB = 2**20


def noted(tensors: dict[int, Tensor], *, parameters: dict[int, str] | None = None, end: int = 99) -> BlockNotes:
    ends = [(1, PhaseOfStep(step=0, phase="load")), (end, PhaseOfStep(step=1, phase="backward"))]
    return BlockNotes(tensors=tensors, parameters=parameters or {}, ends=ends)


def peak_of(tape, notes: BlockNotes) -> PeakReport:
    return find_peak(tape, notes, GPU, query="q", dtype="float32", expandable_segments=False)


@pytest.fixture
def report() -> PeakReport:
    tape = make_tape(
        [("w", 2 * MIB, "parameter"), ("a", 4 * MIB), ("b", 4 * MIB, "gradient"), "-a", ("c", MIB, "workspace")]
    )
    large = Tensor(shape=(1024, 1024), dtype="float32")
    notes = noted({0: Tensor(shape=(512, 1024), dtype="float32"), 1: large, 2: large}, parameters={2: "m.w"})
    return peak_of(tape, notes)


def test_it_is_the_moment_with_most_allocated(report):
    assert (report.allocated_bytes, report.step, report.phase) == (10 * MIB, 1, "backward")
    assert (report.op, report.module) == ("aten.b", "m.b")
    assert {category: size for category, size in report.at_peak.items() if size} == {
        "parameter": 2 * MIB,
        "activation": 4 * MIB,
        "gradient": 4 * MIB,
    }


def test_the_sentence_says_where_and_what_takes_most(report):
    assert report.sentence == (
        "In the backward pass of step 1, by aten.b in m.b: "
        "2 tensors of [1024, 1024] float32 (activation, gradient), 8.00 MiB of 10.00 MiB (80%); "
        "2.00 MiB are there all the time (parameter)."
    )


def test_weights_alone_are_what_takes_most_where_there_is_nothing_else():
    tape = make_tape([("w", 2 * MIB, "parameter"), ("b", 512, "buffer")])
    report = peak_of(tape, noted({block: Tensor(shape=(1,), dtype="int8") for block in (0, 1)}, end=2))
    assert "2 tensors of [1] int8 (parameter, buffer), 2.00 MiB of 2.00 MiB (100%)" in report.sentence
    assert report.sentence.endswith("; 2.00 MiB are there all the time (parameter, buffer).")


def test_tensors_are_named_and_the_largest_come_first(report):
    assert [group.describe() for group in report.tensors] == [
        "1 × [1024, 1024] float32, activation, aten.a in m.a",
        "1 × [1024, 1024] float32, gradient, aten.b in m.w",
        "1 × [512, 1024] float32, parameter, aten.w in m.w",
    ]
    assert [group.phase for group in report.tensors] == ["backward", "backward", "load"]


def test_a_gradient_belongs_to_the_module_of_its_parameter(report):
    own = {row.path: row.by_category for row in report.modules}
    assert own == {"m": {"parameter": 2 * MIB, "gradient": 4 * MIB}, "m.a": {"activation": 4 * MIB}}
    assert with_children(report.modules) == {
        "": {"parameter": 2 * MIB, "gradient": 4 * MIB, "activation": 4 * MIB},
        "m": {"parameter": 2 * MIB, "gradient": 4 * MIB, "activation": 4 * MIB},
        "m.a": {"activation": 4 * MIB},
    }


def test_a_module_that_holds_nothing_itself_has_what_its_children_have():
    rows = [ModuleBytes(path="a.0.b", by_category={"input": 3}), ModuleBytes(path="a.1", by_category={"input": 4})]
    assert {path: sizes["input"] for path, sizes in with_children(rows).items()} == {
        "": 7,
        "a": 7,
        "a.0": 3,
        "a.0.b": 3,
        "a.1": 4,
    }


def test_layers_are_one_row_and_small_rows_are_counted_together():
    count = 3 * LARGEST
    tape = make_tape([(f"{number}.x", 512 * (1 + number)) for number in range(count)])
    # the operator has a number of its own in each of these blocks, so that no two are alike
    report = peak_of(tape, noted({block: Tensor(shape=(1 + block, 128), dtype="float32") for block in range(count)}))
    assert len(report.tensors) == LARGEST
    assert report.rest_count == count - LARGEST
    assert sum(group.bytes for group in report.tensors) + report.rest_bytes == report.allocated_bytes
    assert {group.module for group in report.tensors} == {"m.*.x"}


def test_a_workspace_has_no_shape():
    report = peak_of(make_tape([("w", 512, "workspace")]), noted({}, end=1))
    assert report.tensors[0].describe() == "1 × workspace, aten.w in m.w"
    assert "1 workspace (workspace), 512 B of 512 B (100%)" in report.sentence


def test_it_survives_the_way_to_the_page(report):
    assert decode(PeakReport, encode(report)) == report

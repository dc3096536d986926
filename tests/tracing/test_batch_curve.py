"""Two traces give the memory of every batch size: compared with traces at sizes that were not used to fit."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from sizer.allocator.allocator import replay
from sizer.catalogue.gpus import GPUS
from sizer.estimating.tracer import Tracer
from sizer.query.text import parse_query
from sizer.tape.affine import NotAffineError, fit_affine
from sizer.tape.archive import Traced, pack, unpack
from sizer.tape.family import TapeFamily
from sizer.tape.per_sample import PerSampleTape, fit_per_sample, in_order
from sizer.tape.size_queries import by_block
from sizer.tape.tape import Tape
from sizer.tracing.batch_lines import LineFacts, trace_lines
from sizer.tracing.device import Device
from sizer.tracing.steps import Work
from sizer.tracing.trace import Ends, build, trace
from tests.tracing.test_cpu_truth import MODELS

CASES = [(name, "training") for name in MODELS] + [(name, "inference") for name in ("resnet18", "gpt2", "bert", "t5")]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_predicted_peaks_equal_traced_peaks(name: str, mode: str) -> None:
    blueprint, work, device = MODELS[name](mode), Work(mode=mode, dtype="float32"), Device("cuda", (8, 0))
    module = build(blueprint)
    first = trace(blueprint, module, work, batch=2, device=device)
    line = fit_affine(first, trace(blueprint, module, work, batch=3, device=device, short=True))
    for batch in (4, 7):
        traced = trace(blueprint, module, work, batch=batch, device=device)
        predicted = line.evaluate(batch)
        assert predicted.sizes == traced.sizes
        expected, found = (replay(tape, backend="cuda") for tape in (traced, predicted))
        assert found.peak_allocated_bytes == expected.peak_allocated_bytes
        assert found.peak_reserved_bytes == expected.peak_reserved_bytes
        assert found.phases == expected.phases


# Models that go through the samples one by one: their tapes have more events with each
SAMPLE_BY_SAMPLE = [
    "arch=torchvision:fasterrcnn_mobilenet_v3_large_320_fpn",
    "arch=torchvision:ssd300_vgg16",
    *(
        pytest.param(query, marks=pytest.mark.exhaustive)
        for query in (
            "arch=torchvision:fasterrcnn_resnet50_fpn",
            "arch=torchvision:maskrcnn_resnet50_fpn",
            "arch=torchvision:keypointrcnn_resnet50_fpn&mode=inference",
            "arch=torchvision:retinanet_resnet50_fpn&gpu=t4",
            "arch=torchvision:fcos_resnet50_fpn&gpu=cpu",
            "arch=torchvision:ssdlite320_mobilenet_v3_large&mode=inference",
            "arch=hf:qwen2.5-vl-3b&mode=inference",
        )
    ),
]


@pytest.mark.parametrize("query", SAMPLE_BY_SAMPLE)
def test_work_that_takes_samples_one_by_one_is_that_of_its_traces(query: str) -> None:
    request = parse_query(f"{query}&dtype=float32&batch=2")
    gpu = GPUS[request.gpu]
    family = Tracer(request, gpu).trace("float32", (2,)).family
    assert isinstance(family.lines[0][1], PerSampleTape)
    assert unpack(pack(Traced(family=family))).family == family
    for batch in (1, 2, 4, 9):
        if batch < family.smallest:
            continue
        traced, predicted = Tracer(request, gpu).trace_cell("float32", batch), family.evaluate(batch)
        assert in_order(predicted).order == in_order(traced).order
        assert (predicted.sizes, predicted.modules, predicted.ops) == (traced.sizes, traced.modules, traced.ops)
        assert by_block(predicted.size_queries) == by_block(traced.size_queries)
        expected, found = (replay(tape, backend=gpu.backend) for tape in (traced, predicted))
        assert found.peak_reserved_bytes == expected.peak_reserved_bytes
        assert found.phases == expected.phases


def test_what_a_sample_adds_must_repeat_what_the_one_before_has_added() -> None:
    line = fit_per_sample(*(one_by_one(batch) for batch in (2, 3)))
    line.check(one_by_one(5))
    for other in (one_by_one(5, last=64), one_by_one(5, each=80)):
        with pytest.raises(NotAffineError, match="trace each batch separately"):
            line.check(other)
    with pytest.raises(NotAffineError, match="repeats nothing"):
        fit_per_sample(one_by_one(2), one_by_one(3, last=64))
    with pytest.raises(ValueError, match="must be at least 2"):
        line.evaluate(1)
    with pytest.raises(ValueError, match=r"its tape would have .* events: give \d+ at most"):
        line.evaluate(10**8)
    assert len(line.evaluate(line.batch_of(1000)).order) <= 1000 < len(line.evaluate(line.batch_of(1000) + 1).order)


def one_by_one(batch: int, *, each: int = 16, last: int = 0) -> Tape:
    """A function that makes two blocks for each sample, and a list of results; all are released when it returns."""
    sizes = [1024 * batch, *[each, 2 * each] * batch, 8 * batch, *([last] if last else [])]
    blocks = len(sizes)
    firsts, seconds = range(1, 1 + 2 * batch, 2), range(2, 2 + 2 * batch, 2)
    released = [*firsts, *seconds, *range(1 + 2 * batch, blocks)]
    ops = [0, *[1, 1] * batch, 2, *([2] if last else [])]
    return Tape(
        batch=batch,
        order=array("q", [*range(blocks), *(~block for block in released), ~0]),
        sizes=array("q", sizes),
        categories=bytes(blocks),
        ops=array("l", ops),
        modules=array("l", [0] * blocks),
        op_names=("aten.empty.memory_format", "aten.index.Tensor", "aten.stack.default"),
        module_names=("",),
        marks=((2 * blocks, "forward"),),
    ).validate()


def test_a_second_sample_with_blocks_of_its_own_spares_a_trace() -> None:
    def traced(begun: Tape | None) -> tuple[TapeFamily, list[tuple[int, bool]]]:
        done = []

        def at(batch: int, *, short: bool = False) -> Tape:
            done.append((batch, bool(short)))
            return one_by_one(batch)

        family = trace_lines(at, (1, 2), Device("cuda", (8, 0)), smallest=1, begun=begun, known=LineFacts())
        return family, done

    (aware, few), (unaware, many) = traced(one_by_one(1)), traced(None)
    assert few == [(2, False), (3, False), (5, True)]
    assert many == [(2, False), (3, True), (3, False), (5, True), (1, False)], "the first trace stands"
    assert aware == unaware and isinstance(aware.lines[0][1], PerSampleTape)


def test_a_trace_that_its_first_step_shows_to_be_off_the_line_goes_on() -> None:
    done = []

    def at(batch: int, *, short: Ends = False) -> Tape:
        tape = one_by_one(batch)
        done.append((batch, short(tape) if callable(short) else short))
        return tape

    family = trace_lines(at, (1, 2), Device("cuda", (8, 0)), smallest=1, known=LineFacts())
    assert done == [(2, False), (3, False), (5, True), (1, False)]
    assert isinstance(family.lines[0][1], PerSampleTape)


def plain(batch: int, *, at_one: int = 0, lasting: int = 0) -> Tape:
    """Two blocks for a batch, of which one is released, and so many more that last; at batch 1 the first is larger."""
    sizes = [1024 * batch + (at_one if batch == 1 else 0), 512, *[8] * lasting]
    return Tape(
        batch=batch,
        order=array("q", [*range(len(sizes)), ~1]),
        sizes=array("q", sizes),
        categories=bytes(len(sizes)),
        ops=array("l", [0] * len(sizes)),
        modules=array("l", [0] * len(sizes)),
        op_names=("aten.empty.memory_format",),
        module_names=("",),
        marks=((len(sizes) + 1, "forward"),),
    ).validate()


@pytest.mark.parametrize(
    ("begun", "traced"),
    [
        (None, [(2, False), (3, True), (1, True), (5, True), (1, False)]),
        (plain(1, at_one=64), [(2, False), (3, True), (1, True), (5, True)]),  # not asked for: checked, and there is its tape
        (plain(3), [(2, False), (1, True), (5, True), (1, False)]),  # one of the two that the line is made from
        (plain(8), [(2, False), (3, True), (1, True), (1, False)]),  # checks the line in the place of batch 5
        (plain(8, lasting=1), [(2, False), (3, True), (1, True), (5, True), (1, False)]),  # a first step, which is no other's
    ],
)
def test_a_trace_that_was_there_before_spares_another(begun: Tape | None, traced: list[tuple[int, bool]]) -> None:
    done: list[tuple[int, bool]] = []

    def at(batch: int, *, short: bool = False) -> Tape:
        done.append((batch, bool(short)))
        return plain(batch, at_one=64)

    family = trace_lines(at, (8,), Device("cuda", (8, 0)), smallest=1, begun=begun, known=LineFacts())
    assert done == traced
    assert [family.evaluate(batch).sizes[0] for batch in (1, 2, 8)] == [1024 + 64, 2048, 8192]


def test_a_trace_that_was_there_before_is_held_against_the_line() -> None:
    odd = plain(8)
    odd = replace(odd, sizes=array("q", [1, *odd.sizes[1:]]))
    with pytest.raises(NotAffineError, match="batch 8"):
        trace_lines(
            lambda batch, **_: plain(batch, at_one=64), (8,), Device("cuda", (8, 0)), smallest=1, begun=odd, known=LineFacts()
        )


def test_no_trace_is_cut_short_where_no_step_repeats_another() -> None:
    done: list[tuple[int, bool]] = []

    def at(batch: int, *, short: bool = False) -> Tape:
        done.append((batch, bool(short)))
        return plain(batch, at_one=64)

    trace_lines(at, (8,), Device("cuda", (8, 0)), smallest=1, known=LineFacts(), repeats=False)
    assert done == [(2, False), (3, False), (1, False), (5, False)]


@pytest.mark.parametrize("keeps", [False, True])
def test_whole_traces_stand_where_the_first_is_the_same_again(keeps: bool) -> None:
    done: list[tuple[int, bool]] = []

    def at(batch: int, *, short: bool = False) -> Tape:
        seen = keeps and len(done) > 0
        done.append((batch, bool(short)))
        return one_by_one(batch, each=48 if seen else 16, last=8 * (batch > 4))

    whole: dict[int, Tape] = {}
    with pytest.raises(NotAffineError, match="batch"):
        trace_lines(at, (2, 4), Device("cuda", (8, 0)), smallest=1, known=LineFacts(), whole=whole)
    whole_traces = [batch for batch, short in done if not short]
    assert whole_traces == ([2, 3, 4, 2, 3, 4] if keeps else [2, 3, 4, 2])
    assert whole == {batch: at(batch) for batch in (2, 3, 4)}

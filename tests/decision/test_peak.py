"""What is alive at the peak is what the estimate of the same question says is allocated; noting it changes no trace."""

from __future__ import annotations

import json
import pickle
from importlib.util import find_spec

import pytest
from torch.cuda import _memory_viz

from sizer.allocator.addresses import find_addresses
from sizer.allocator.snapshot import make_snapshot
from sizer.base.codec import decode, encode
from sizer.base.config_json import encode_config
from sizer.base.errors import RequestError, TraceError
from sizer.catalogue.gpu_keys import find_gpu
from sizer.decision.cells import Cells, one_cell
from sizer.decision.peak import peak, snapshot
from sizer.query.text import parse_query
from sizer.report.estimate import Estimate
from sizer.report.peak import PeakReport
from sizer.tape.loops import written
from sizer.tape.tape import BlockNotes, Tape
from tests.decision.questions import CNN, DETECTION, IN_TESTS, LANGUAGE, TWO_LAYERS
from tests.tracing.models import LLAMA

SMALL_LLAMA = f"arch=config:{encode_config(json.dumps(LLAMA | {'num_hidden_layers': 2}))}"

QUESTIONS = {
    **IN_TESTS,
    "detection": DETECTION,
    "expandable": f"{LANGUAGE}&expandable=1",
    "mixed precision": "arch=torchvision:resnet18&image=64&dtype=amp-float16&batch=8&gpu=rtx-4090&optimizer=sgd-momentum",
    "CPU": "arch=hf:gpt2&seq=32&dtype=bfloat16&batch=1&gpu=cpu&checkpointing=1",
    "generation": f"{TWO_LAYERS}&seq=64&mode=generate&new=6&dtype=bfloat16&batch=4&gpu=rtx-4090",
    **(
        {"quantized": f"{SMALL_LLAMA}&seq=64&dtype=bfloat16&batch=2&train=adapter&weights=nf4&gpu=rtx-4090"}
        if find_spec("bitsandbytes") and find_spec("peft")
        else {}
    ),
    "Apple": "arch=torchvision:resnet18&image=64&dtype=float32&batch=8&gpu=m2-ultra-64gb",
}


@pytest.fixture(scope="module", params=QUESTIONS.values(), ids=QUESTIONS)
def asked(request) -> Cells:
    return Cells(one_cell(parse_query(request.param)))


@pytest.fixture(scope="module")
def noted(asked) -> tuple[Tape, BlockNotes]:
    return asked.noted(asked.request)


@pytest.fixture(scope="module")
def report(asked) -> PeakReport:
    return list(peak(asked.request))[-1]


@pytest.fixture(scope="module")
def expected(asked) -> Estimate:
    return asked.estimate(asked.request)


def test_the_trace_is_the_same(asked, noted):
    assert noted[0] == asked.tape(asked.request)


def test_every_block_but_a_workspace_is_a_tensor(noted):
    tape, notes = noted
    workspace = {block for block in range(len(tape.sizes)) if block not in notes.tensors}
    categories = {tape.categories[block] for block in notes.tensors}
    assert {tape.categories[block] for block in workspace}.isdisjoint(categories)
    assert [end for end, _ in notes.ends] == sorted(end for end, _ in notes.ends)
    assert notes.ends[-1][0] == len(tape.order)


def test_figures_are_those_of_the_estimate(report, expected):
    assert report.allocated_bytes == expected.peak_allocated_bytes
    assert report.reserved_bytes == expected.reserved_at_peak_bytes
    assert report.at_peak == expected.at_peak
    assert (report.op, report.module) == (expected.peak_op, expected.peak_module)
    assert sum(group.bytes for group in report.tensors) + report.rest_bytes == expected.peak_allocated_bytes
    by_category = dict.fromkeys(expected.at_peak, 0)
    for row in report.modules:
        for category, size in row.by_category.items():
            by_category[category] += size
    assert by_category == expected.at_peak


def test_it_survives_the_way_to_the_page(report):
    assert decode(PeakReport, encode(report)) == report


def test_tensors_hold_as_many_bytes_as_their_shape_says():
    (*_, report) = peak(parse_query(CNN))
    widths = {"float32": 4, "int64": 8, "uint8": 1}
    for group in report.tensors:
        if group.dtype:
            elements = 1
            for size in group.shape:
                elements *= size
            assert 0 <= group.bytes - group.count * elements * widths[group.dtype] <= group.count * 2**20


def test_gradients_and_optimizer_state_are_named_by_their_parameters():
    (*_, report) = peak(parse_query(CNN))
    own = {row.path: row.by_category for row in report.modules}
    for category in ("parameter", "gradient", "optimizer state"):
        assert category in own["layer4.1.conv2"]
    state = {row.path for row in report.modules if "optimizer state" in row.by_category}
    assert state == {row.path for row in report.modules if "parameter" in row.by_category}


@pytest.mark.parametrize("query", [CNN, LANGUAGE, f"{LANGUAGE}&expandable=1"])
def test_pytorchs_own_reader_takes_the_snapshot(query):
    cells = Cells(one_cell(parse_query(query)))
    expected, request = cells.estimate(cells.request), cells.request
    made = make_snapshot(cells.tape(request), find_gpu(request.gpu), expandable_segments=request.expandable_segments)
    summary = _memory_viz.segsum(made)
    assert f"total_reserved: {_memory_viz.Bytes(expected.reserved_at_peak_bytes)}\n" in summary
    assert sum(map(_memory_viz.calc_active, made["segments"])) == expected.peak_allocated_bytes
    assert "Device 0" in _memory_viz.trace(made)
    flames = _memory_viz.memory(made, format_flamegraph=lambda lines: lines)
    assert "the model" in flames
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "snapshot.pickle" in plot(made)


def test_a_snapshot_is_of_one_cell_on_cuda():
    with pytest.raises(RequestError, match=r"only for CUDA's allocator"):
        snapshot(parse_query("arch=hf:gpt2&seq=8&dtype=float32&batch=1&gpu=cpu"))
    with pytest.raises(RequestError, match=r"this answer is for one dtype and batch size"):
        snapshot(parse_query("arch=hf:gpt2"))


def test_of_many_tokens_the_prompt_is_traced_where_the_peak_is():
    # the prompt's logits of 64 × 50,257 are much larger than the cache of so few tokens
    query = f"{TWO_LAYERS}&seq=512&mode=generate&new=300&dtype=bfloat16&batch=4&gpu=rtx-4090"
    request = one_cell(parse_query(query))
    found = list(peak(request))[-1]
    assert found.phase == "prefill"
    assert found.allocated_bytes == Cells(request).estimate(request).peak_allocated_bytes
    assert "max_new_tokens=300" in found.script


def test_a_peak_among_many_tokens_is_refused():
    query = f"{TWO_LAYERS}&seq=4&mode=generate&new=300&dtype=bfloat16&batch=64&gpu=rtx-4090"
    with pytest.raises(TraceError, match="among 300 tokens, which are not traced one by one; ask for at most 256"):
        list(peak(parse_query(query)))


def test_a_snapshot_of_a_generation_holds_every_step(monkeypatch):
    request = parse_query(f"{TWO_LAYERS}&seq=16&mode=generate&new=40&dtype=bfloat16&batch=2&gpu=rtx-4090")
    whole = written(Cells(one_cell(request)).tape(one_cell(request)))
    made = pickle.loads(snapshot(request))
    actions = [event["action"] for event in made["device_traces"][0]]
    allocated, _ = find_addresses(whole, find_gpu("rtx-4090"), expandable_segments=False).peak(whole)
    assert actions.count("alloc") == sum(event >= 0 and whole.sizes[event] > 0 for event in whole.order[:allocated])
    monkeypatch.setattr("sizer.decision.peak.EVENTS_AT_MOST", 100)
    with pytest.raises(
        RequestError, match=r"a snapshot of this size: given .*, allowed 100; ask for fewer new tokens"
    ):
        snapshot(request)

"""The estimate end to end, in this process: invariants on every answer, and what is said where there is none."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from sizer.base.config_json import encode_config
from sizer.base.errors import BuildError, RequestError
from sizer.catalogue.gpus import GPUS
from sizer.catalogue.modes import MODES, Mode
from sizer.estimating.estimator import Estimator, estimate
from sizer.query.text import parse_query
from sizer.query.values import DTYPES
from sizer.report.report import Report
from sizer.tracing.cuda.by_capability import CUDNN
from sizer.tracing.cuda.size_oracle import KINDS
from tests.architecture.rare_configs import RARE
from tests.decision.questions import TWO_LAYERS

QUERIES = [
    "arch=torchvision:resnet18&image=64",
    "arch=torchvision:resnet18&image=64&mode=inference",
    "arch=hf:gpt2&seq=64&gpu=rtx-3060-12gb",
    pytest.param(
        "arch=hf:bert-base-uncased&seq=64&gpu=h100-80gb&dtype=bfloat16,amp-bfloat16", marks=pytest.mark.exhaustive
    ),
    pytest.param(
        "arch=hf:t5-small&seq=32&gpu=t4&optimizer=adafactor&dtype=float32,float16,amp-float16",
        marks=pytest.mark.exhaustive,
    ),
    "arch=torchvision:mobilenet_v3_small&gpu=cpu&dtype=float32",
    "arch=torchvision:vit_b_32&gpu=m2-ultra-64gb&dtype=float32,float16",
]


def test_expandable_segments_change_what_the_allocator_adds_alone() -> None:
    query = "arch=torchvision:resnet50&dtype=float32&batch=8&expandable="
    (fixed,), (expandable,) = (estimate(parse_query(f"{query}{switch}")).estimates for switch in "01")
    assert expandable.peak_requested_bytes == fixed.peak_requested_bytes
    # every block is split there, so that it is at most 511 bytes larger than what was asked for, and not up to 1 MiB
    assert expandable.peak_allocated_bytes - expandable.peak_requested_bytes < 2**20
    assert fixed.peak_allocated_bytes - fixed.peak_requested_bytes > 2**20
    assert expandable.peak_reserved_bytes < fixed.peak_reserved_bytes


def test_expandable_segments_are_refused_off_cuda() -> None:
    request = parse_query("arch=torchvision:resnet18&image=64&dtype=float32&batch=8&expandable=1")
    with pytest.raises(RequestError, match=r"expandable: given '1' on .*, allowed 1 only on a CUDA device"):
        estimate(request, gpu=GPUS["cpu"])


def test_a_device_of_ones_own_is_estimated_as_its_like_in_the_catalogue() -> None:
    query = "arch=hf:gpt2&seq=64&dtype=bfloat16&batch=2,64&gpu="
    known, own = (estimate(parse_query(f"{query}{gpu}")) for gpu in ("rtx-4090", "custom:24084MiB@8.9"))
    assert (own.gpu.key, own.request["gpu"]) == ("custom:24084MiB@8.9",) * 2
    assert parse_query(own.query) == parse_query(f"{query}custom:24084MiB@8.9")
    assert Report.from_dict(own.to_dict()) == own
    for mine, theirs in zip(own.estimates, known.estimates, strict=True):
        assert mine.peak_allocated_bytes == theirs.peak_allocated_bytes
        assert mine.peak_reserved_bytes == theirs.peak_reserved_bytes
        assert mine.at_peak == theirs.at_peak
        # it may have as few multiprocessors as an RTX 2000 Ada, or as many as an RTX 6000 Ada
        assert mine.process_low_bytes < theirs.process_low_bytes < theirs.process_high_bytes < mine.process_high_bytes
    assert not own.uncounted, "this model convolves nothing"


def test_a_device_of_ones_own_has_its_convolutions_modelled_and_says_so() -> None:
    report = estimate(parse_query("arch=torchvision:resnet18&image=64&dtype=float32&batch=8&gpu=custom:81038MiB@8.0"))
    assert [line for line in report.uncounted if "workspaces of convolutions: modelled" in line]
    assert report.max_batch[0].batch > 8


@pytest.mark.parametrize(("gpu", "maker"), [("mi300x", "ROCm"), ("arc-b580", "Intel")])
def test_another_makers_device_is_estimated_with_a_caution(gpu: str, maker: str) -> None:
    query = "arch=hf:gpt2&seq=64&dtype=bfloat16&batch=2&gpu="
    report, stand_in = (estimate(parse_query(f"{query}{key}")) for key in (gpu, "a100-80gb"))
    (caution,) = report.cautions
    assert maker in caution and caution.endswith("are modelled as for CUDA capability 8.0")
    assert caution in report.notes
    assert report.estimates[0].peak_allocated_bytes == stand_in.estimates[0].peak_allocated_bytes


@pytest.mark.parametrize("mode", [mode for mode in MODES.values() if not mode.serves], ids=lambda mode: mode.key)
def test_a_mode_marks_its_phases_and_keys_that_it_does_not_use_change_nothing(mode: Mode) -> None:
    model = f"{TWO_LAYERS}&seq=16&new=8" if mode.generates else "arch=torchvision:resnet18&image=64"
    query = f"{model}&dtype=float32&batch=2&mode={mode.key}"
    others = {"optimizer": "sgd", "optimizer_impl": "loop", "checkpointing": "1"}
    (plain,) = estimate(parse_query(query)).estimates
    assert tuple(use.phase for use in plain.phases) == mode.phases
    assert [mode.phase_after(phase) for phase in mode.phases] == [*mode.phases[1:], mode.phases[-1]]
    for key, value in others.items():
        (other,) = estimate(parse_query(f"{query}&{key}={value}")).estimates
        assert (other == plain) == (key in mode.unused), key


@pytest.fixture(scope="module", params=QUERIES)
def report(request) -> Report:
    return estimate(parse_query(request.param))


def test_all_cells_are_there(report: Report) -> None:
    asked = {(d, b) for d in report.request["dtypes"] for b in report.request["batches"]}
    assert {(row.dtype, row.batch) for row in report.estimates} == asked
    assert report.failures == {}


def test_parts_and_totals(report: Report) -> None:
    for row in report.estimates:
        assert sum(row.at_peak.values()) == row.peak_allocated_bytes
        assert row.weights_bytes + row.buffers_bytes <= row.peak_requested_bytes <= row.peak_allocated_bytes
        assert row.peak_allocated_bytes <= row.peak_reserved_bytes
        assert row.process_low_bytes <= row.process_bytes <= row.process_high_bytes
        assert row.weights_bytes == report.model.parameters * (2 if row.dtype in ("bfloat16", "float16") else 4)


def test_gradients_are_as_large_as_weights(report: Report) -> None:
    training = report.request["mode"] == "training"
    for row in report.estimates:
        if row.batch > 1:  # at 1 a gradient can be a view that keeps a larger tensor alive, as in ViT's class token
            assert row.gradients_bytes == (row.weights_bytes if training else 0)


def test_memory_grows_with_the_batch(report: Report) -> None:
    for dtype in report.request["dtypes"]:
        rows = sorted((row for row in report.estimates if row.dtype == dtype), key=lambda row: row.batch)
        for smaller, larger in itertools.pairwise(rows):
            assert smaller.activations_bytes < larger.activations_bytes
            # requested bytes: unsplit blocks of up to 1 MiB make allocated bytes go up and down where activations are few;
            # and a batch of 1 can need copies that others do not
            if smaller.batch > 1:
                assert smaller.peak_requested_bytes <= larger.peak_requested_bytes


def test_resnet50_is_what_its_shapes_say() -> None:
    row = estimate(parse_query("arch=torchvision:resnet50&batch=32&dtype=float32")).find("float32", 32)
    # 25,557,032 parameters * 4 B; buffers 53,120 * 4 B + 53 counters * 8 B; AdamW: two moments, its counters on the CPU
    assert row.weights_bytes == 102_228_128
    assert row.buffers_bytes == 212_904
    assert row.gradients_bytes == 102_228_128
    assert row.optimizer_bytes == 204_456_256
    assert row.peak_phase == "step2"


def test_sixteen_bit_types_halve_the_weights_and_autocast_does_not() -> None:
    report = estimate(parse_query("arch=torchvision:resnet18&image=128&batch=64"))
    rows = {dtype: report.find(dtype, 64) for dtype in DTYPES}
    assert rows["float16"].weights_bytes * 2 == rows["float32"].weights_bytes == rows["amp-float16"].weights_bytes
    assert rows["amp-bfloat16"].activations_bytes < rows["float32"].activations_bytes


def test_a_batch_of_one_that_the_model_refuses_is_left_out_and_said() -> None:
    report = estimate(parse_query("arch=torchvision:deeplabv3_mobilenet_v3_large&batch=1,2&dtype=float32"))
    assert [row.batch for row in report.estimates] == [2]
    assert any(note.startswith("batch 1 is left out") for note in report.notes)
    with pytest.raises(RequestError, match="batch"):
        estimate(parse_query("arch=torchvision:deeplabv3_mobilenet_v3_large&batch=1&dtype=float32"))


def test_work_off_the_line_is_traced_batch_by_batch_and_said() -> None:
    report = of_config({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64}, "seq=16&pp=2&rank=0&batch=2,4")
    assert [row.batch for row in report.estimates] == [2, 4]
    assert any("traced separately at each batch size" in note for note in report.notes)


def of_config(config: dict, rest: str) -> Report:
    return estimate(parse_query(f"arch=config:{encode_config(json.dumps(config))}&dtype=float32&{rest}"))


def test_a_model_without_a_step_is_counted_and_says_why() -> None:
    report = of_config({"model_type": "bark", **RARE["bark"]}, "batch=1,2")
    assert report.model.parameters > 10**4
    assert not report.estimates
    assert report.failures["float32"].startswith("BarkModel has no forward; estimate one of its parts")


def test_a_model_that_takes_one_sample_at_a_time_is_estimated_for_one() -> None:
    config = {"model_type": "tvp", **RARE["tvp"]}
    assert [row.batch for row in of_config(config, "batch=1").estimates] == [1]
    assert "batch=1 can be estimated" in of_config(config, "batch=1,2").failures["float32"]


@pytest.mark.parametrize("gpu", [pytest.param("a100-80gb", marks=pytest.mark.exhaustive), "cpu"])
def test_more_bytes_than_a_replay_can_add_up_are_a_reason_not_a_crash(gpu: str) -> None:
    # wte [2**27, 2**27] float32: weights, gradient, two moments and what foreach holds, 2**56 bytes each and twice 2**60 or more
    config = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 2**27, "vocab_size": 2**27, "n_positions": 16}
    query = f"arch=config:{encode_config(json.dumps(config))}&dtype=float32&seq=8&batch="
    for batches in ("1", "1,2"):
        report = estimate(parse_query(f"{query}{batches}&gpu={gpu}"))
        assert not report.estimates
        assert report.model.parameters > 2**54
        assert re.search(
            r"would allocate 1.\de\+19 bytes in all: allowed less than 2\*\*62", report.failures["float32"]
        )


def test_cudnn_is_not_named_as_the_source_where_it_answered_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    request = parse_query("arch=torchvision:resnet18&image=64&dtype=float32&batch=2&mode=inference")
    asked = estimate(request)
    assert not asked.uncounted
    assert any("engines that cuDNN" in line for line in asked.explanation.modelled)
    monkeypatch.setitem(KINDS, CUDNN, lambda gpu, queries: [None] * len(queries))
    silent = estimate(request)
    said = (
        "workspaces of convolutions: modelled, since cuDNN has no plan for them; the range of the process allows for it"
    )
    assert silent.uncounted == (said,)
    assert said in silent.explanation.modelled
    assert not any("engines that cuDNN" in line for line in silent.explanation.modelled)


def test_checkpointing_lowers_activations() -> None:
    plain, less = (
        estimate(parse_query(f"arch=hf:gpt2&seq=128&batch=2&dtype=float32&checkpointing={on}")).find("float32", 2)
        for on in (0, 1)
    )
    assert less.activations_bytes < plain.activations_bytes / 2


def test_checkpointing_that_is_not_there_is_refused() -> None:
    with pytest.raises((BuildError, RequestError), match="checkpointing"):
        estimate(parse_query("arch=torchvision:alexnet&checkpointing=1&batch=2&dtype=float32"))


def test_a_rank_holds_its_share_and_the_report_says_so() -> None:
    query = f"{TWO_LAYERS}&seq=64&dtype=float32&batch=1,2&gpu=h100-80gb"
    alone, sharded, both = (
        estimate(parse_query(f"{query}{keys}")) for keys in ("", "&parallel=fsdp&ranks=16", "&parallel=ddp&ranks=16")
    )
    whole, share = alone.estimates[0], sharded.estimates[0]
    # each parameter's first dimension is cut into 16, rounded up: 768 and 3,072 rows evenly, 50,257 tokens into 3,142
    padded = 3142 * 16 - 50257
    assert share.weights_bytes == (whole.weights_bytes + 4 * 768 * padded) // 16
    assert share.buffers_bytes == whole.buffers_bytes
    assert both.estimates[0].weights_bytes == whole.weights_bytes
    # what DDP holds beside: a bucket for each gradient
    assert both.estimates[0].at_peak["workspace"] >= whole.weights_bytes
    assert sharded.cautions[0].startswith(
        "these are the figures of each of 16 ranks of FSDP2; the batch is that of one rank, all"
    )
    # 688 and 2,000 MB of one communicator
    nccl = "have 16, 32 samples; NCCL needs 0.641 GiB to 1.86 GiB of each GPU, by published figures"
    assert nccl in sharded.cautions[0] and sharded.cautions[0] in sharded.notes
    assert (sharded.request["parallel"], sharded.request["ranks"]) == ("fsdp", 16)
    assert "parallel" not in alone.request and not alone.cautions
    assert sharded.gpu.context_bytes - alone.gpu.context_bytes == 1_060 * 10**6
    assert sharded.max_batch[0].batch > alone.max_batch[0].batch
    assert share.peak_allocated_bytes < whole.peak_allocated_bytes < both.estimates[0].peak_allocated_bytes


def test_progress_is_told() -> None:
    told: list[str] = []
    estimate(parse_query("arch=torchvision:resnet18&image=64&batch=2&dtype=float32"), progress=told.append)
    assert told[0] == "building the model on meta"
    assert "tracing float32 at batch 2" in told


def test_no_batch_size_is_traced_twice() -> None:
    told: list[str] = []
    estimate(parse_query("arch=hf:gpt2&seq=64&batch=1,2&dtype=float32"), progress=told.append)
    # the first figures; the line from 2 and 3; the logits of a batch of 1 are contiguous without a copy, so it is off the line; 5
    # checks that
    assert [text for text in told if "tracing" in text] == [f"tracing float32 at batch {n}" for n in (1, 2, 3, 5)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_first_trace_answers_a_batch_of_one_in_any_dtype(dtype: str) -> None:
    told: list[str] = []
    reports = Estimator(parse_query(f"arch=hf:gpt2&seq=32&dtype={dtype}&batch=1,2"), progress=told.append).reports()
    first = next(report for report in reports if report.estimates)
    assert [(row.dtype, row.batch) for row in first.estimates] == [(dtype, 1)]
    assert [line for line in told if line.startswith("tracing ")] == [f"tracing {dtype} at batch 1"]


def test_the_first_trace_of_a_generation_answers_its_smallest_batch_size_and_checks_the_line() -> None:
    told: list[str] = []
    query = parse_query("arch=hf:gpt2&mode=generate&seq=16&new=4&batch=8,32&dtype=float32")
    _, first, *_, last = Estimator(query, progress=told.append).reports()
    assert [row.batch for row in first.estimates] == [8]
    assert first.estimates[0] == last.estimates[0]
    # a batch of 1 is off the line from 2 and 3, and is traced once: no generation is cut short
    assert [text for text in told if "tracing float32" in text] == [f"tracing float32 at batch {n}" for n in (8, 2, 3, 1)]


def test_a_generation_says_what_its_cache_holds() -> None:
    # keys and values of 12 layers of 768 elements in bfloat16: 36,864 bytes a token; the last of the tokens is not in it
    query = "arch=hf:gpt2&mode=generate&seq=32&new=16&dtype=bfloat16&batch=1,3"
    report = estimate(parse_query(query))
    for row in report.estimates:
        assert row.kv_cache_bytes == row.batch * (32 + 15) * 36_864
        assert row.at_peak["kv cache"] >= row.batch * 32 * 36_864
        assert sum(row.at_peak.values()) == row.peak_allocated_bytes
        assert [use.phase for use in row.phases] == ["load", "prefill", "decode"]
    (cache,) = report.kv_caches
    assert cache.token_bytes == 36_864
    assert (report.request["new"], report.request["cache"]) == (16, "dynamic")
    assert Report.from_dict(report.to_dict()) == report
    other = estimate(parse_query("arch=hf:gpt2&mode=inference&seq=32&dtype=bfloat16&batch=1"))
    assert not other.kv_caches and "new" not in other.request


def test_a_generation_beyond_a_table_of_positions_is_refused() -> None:
    with pytest.raises(
        RequestError, match=r"a table of positions: given 600 tokens after a prompt of 512, allowed 1024"
    ):
        estimate(parse_query(f"{TWO_LAYERS}&mode=generate&seq=512&new=600&dtype=float32&batch=1"))
    assert estimate(parse_query(f"{TWO_LAYERS}&mode=generate&dtype=float32&batch=1")).request["sequence_length"] == 512

"""Adapters, quantized weights and generations, measured on this CPU by the real libraries, held against their estimates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from sizer.allocator.timeline import live_by_category
from sizer.base.config_json import encode_config
from sizer.base.errors import BuildError, RequestError
from sizer.device.comparison.comparison import Comparison
from sizer.device.readers.open import open_reader
from sizer.device.record.measurement import DeviceFacts
from sizer.device.trial import launch
from sizer.device.trial.materialize import loaded_on
from sizer.device.trial.trial import measure_request
from sizer.query.text import parse_query
from tests.benchmarks.bench_accuracy import hold
from tests.tracing.models import GPT2, LLAMA

TINY = {**LLAMA, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL_GPT2 = {**GPT2, "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 1000}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "quant_method": "bitsandbytes"}
LLAMA_TEXT, GPT2_TEXT, NF4_TEXT = (
    f"arch=config:{encode_config(json.dumps(config))}&seq=32&batch=2"
    for config in (TINY, SMALL_GPT2, {**TINY, "quantization_config": NF4})
)
ALWAYS = {
    "QLoRA": f"{LLAMA_TEXT}&dtype=bfloat16&train=adapter&weights=nf4-dq&checkpointing=1",
    "LLM.int8()": f"{LLAMA_TEXT}&dtype=float32&mode=inference&weights=int8",
}
OTHERS = {
    "LoRA beside int8": f"{LLAMA_TEXT}&dtype=amp-bfloat16&train=adapter&weights=int8",
    "DoRA beside NF4": f"{LLAMA_TEXT}&dtype=float32&train=adapter&adapter=dora&weights=nf4&accumulate=2",
    "NF4, quantized twice": f"{LLAMA_TEXT}&dtype=bfloat16&mode=inference&weights=nf4-dq",
    "a checkpoint in NF4": f"{NF4_TEXT}&dtype=bfloat16&mode=inference",
    "FP8, which a CPU loads unquantized": f"{LLAMA_TEXT}&dtype=bfloat16&mode=inference&weights=fp8",
    "generation from NF4": f"{LLAMA_TEXT}&dtype=bfloat16&mode=generate&new=20&weights=nf4",
    "generation": f"{GPT2_TEXT}&dtype=amp-bfloat16&mode=generate&new=40",
    "generation from int8, static": f"{LLAMA_TEXT}&dtype=bfloat16&mode=generate&new=8&cache=static&weights=int8",
}


@pytest.fixture(autouse=True)
def _without_tables() -> Iterator[None]:
    """bitsandbytes keeps tables from the first weight on; a measurement has a process of its own."""
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.backends import utils
    from bitsandbytes.backends.default import ops

    ops._get_4bit_quantize_bounds.cache_clear()
    utils._code_4bit_cache.clear()
    yield


def compared(query: str) -> Comparison:
    return hold(query, measure_request(parse_query(query), open_reader("cpu"), timing=False)).comparison


@pytest.mark.parametrize(
    "query",
    [
        *(pytest.param(query, id=name) for name, query in ALWAYS.items()),
        *(pytest.param(query, id=name, marks=pytest.mark.exhaustive) for name, query in OTHERS.items()),
    ],
)
def test_bytes_alive_after_every_phase_are_those_of_the_estimate(query: str) -> None:
    comparison = compared(query)
    exact = [row for row in comparison.rows if row.tolerance == 0]
    phases = {row.phase for row in exact if row.quantity.endswith(".allocated_bytes")}
    assert phases == {reading.phase for reading in comparison.measurement.phases}
    assert len(phases) == 5 if "train" in query else 3
    assert [row for row in exact if abs(row.difference_bytes) > row.allowance_bytes] == []
    assert all(row.allowance_bytes <= 200 for row in exact)  # numbers that autograd has saved, in tensors of 8 bytes
    assert abs(comparison.find("peak_allocated_bytes").error) < 0.001
    assert comparison.wrong == ()


def test_a_recording_says_where_the_cache_of_a_generation_is() -> None:
    measured = measure_request(parse_query(OTHERS["generation"]), open_reader("cpu"), timing=False)
    assert [reading.phase for reading in measured.measurement.phases] == ["load", "prefill", "decode"]
    assert measured.measurement.tensors.inputs_bytes == 2 * 32 * 8  # tokens, int64
    held = live_by_category(measured.recording)
    # keys and values of 2 layers, 2 sequences of 64 values of 2 bytes: of the prompt's 32 tokens, of all but the last of 40 more
    assert held["prefill"]["kv cache"] == 2 * 2 * 2 * 64 * 2 * 32
    assert held["decode"]["kv cache"] == 2 * 2 * 2 * 64 * 2 * (32 + 39)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("mode=generate&cache=offloaded", "cache: given 'offloaded' with gpu=cpu, allowed dynamic, static"),
        ("optimizer=paged-adamw-8bit", "optimizer: given 'paged-adamw-8bit' with gpu=cpu, allowed PyTorch's own"),
    ],
)
def test_what_a_cpu_cannot_do_is_refused_before_anything_starts(keys: str, message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}"):
        launch.start(f"{LLAMA_TEXT}&dtype=float32&{keys}", "cpu")


def test_kernels_that_are_not_here_are_not_measured() -> None:
    awq = {**TINY, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}}
    request = parse_query(f"arch=config:{encode_config(json.dumps(awq))}&mode=inference&dtype=float16&batch=1")
    gpu = DeviceFacts(device="cuda:0", name="a GPU", total_bytes=2**34, capability=(8, 0))
    with pytest.raises(BuildError, match="the kernels of AWQ are not installed here"):
        loaded_on(request, gpu)
    assert loaded_on(replace(request, weights="full"), gpu).request.weights == "full"
    with pytest.raises(
        BuildError, match=r"^optimum-quanto compiles its kernels at run time, .*given cache=quantized"
    ):
        loaded_on(parse_query(f"{LLAMA_TEXT}&dtype=float32&mode=generate&cache=quantized"), gpu)

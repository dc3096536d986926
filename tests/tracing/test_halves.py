"""Tiny models cast to half as a whole: what runs for real traces, and what does not is refused at the same line of its code."""

from __future__ import annotations

import re

import pytest
import torch

from sizer.architecture.blueprint import Blueprint
from sizer.architecture.huggingface import huggingface_blueprint
from sizer.base.errors import TraceError
from sizer.tracing.device import Device
from sizer.tracing.steps import Work, place
from sizer.tracing.trace import build, line_of, trace
from tests.architecture.rare_configs import RARE
from tests.architecture.tiny_configs import TINY, VISION

STEPLESS = {"bark", "sam2_video", "tvp"}  # nothing trains them, or not two samples at once
# Models that make something in float32 in their own forward, loss or matcher, or ask for what no half has a kernel for.
OWN_DOING: dict[str, dict] = {
    "autoformer": {
        "d_model": 16, "prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2], "encoder_layers": 1,
        "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
    },
    "fastspeech2_conformer": {
        "hidden_size": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_num_attention_heads": 2,
        "decoder_num_attention_heads": 2, "encoder_linear_units": 32, "decoder_linear_units": 32, "num_mel_bins": 8,
        "vocab_size": 40,
    },
    "yolos": {**VISION, "image_size": [32, 32], "num_detection_tokens": 4},
}  # fmt: skip
CONFIGS = {**TINY, **{name: {"model_type": name, **config} for name, config in RARE.items() if name not in STEPLESS}}
FAILING = {name: {"model_type": name, **config} for name, config in OWN_DOING.items()}
LENGTHS = {"blt": 16, "esmfold2": 8, "moonshine": 16, "granitemoehybrid": 16, "voxtral_realtime": 16, "vits": 16,
           "wav2vec2": 4000}  # fmt: skip


def plan(name: str) -> Blueprint:
    return huggingface_blueprint((CONFIGS | FAILING)[name], name=name, sequence_length=LENGTHS.get(name))


def real_failure(blueprint: Blueprint, dtype: torch.dtype) -> str | None:
    """The line of the model's code at which a real step on the CPU fails; None where it runs."""
    torch.manual_seed(0)
    module = blueprint.build().to(dtype).train()
    example = place(blueprint.example(2, True), dtype, lambda tensor: tensor)
    try:
        blueprint.loss(module, example).backward()
    except Exception as error:  # whatever a model raises
        return line_of(error) or "backward"
    return None


def traced_failure(blueprint: Blueprint, dtype: str) -> str | None:
    """The same of a trace by the CPU's rules, which says what to ask for instead."""
    try:
        trace(
            blueprint, build(blueprint), Work(mode="training", dtype=dtype), batch=2, device=Device("cpu"), short=True
        )
    except TraceError as error:
        assert f"ask for amp-{dtype}" in str(error), error
        return re.search(r"\(([\w.]+:\d+)\);", str(error))[1]
    return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if number % 6 else ())
        for number, name in enumerate(sorted(CONFIGS | FAILING))
    ],
)
def test_a_trace_ends_where_the_model_itself_does(name):
    assert traced_failure(plan(name), "bfloat16") == real_failure(plan(name), torch.bfloat16)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["bert", "esmfold2", "qwen3_moe", "sam", "t5", "vit", *FAILING])
def test_so_it_does_in_float16(name):
    assert traced_failure(plan(name), "float16") == real_failure(plan(name), torch.float16)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAILING)
def test_these_fail_by_their_own_doing(name):
    assert real_failure(plan(name), torch.bfloat16) is not None
    assert real_failure(plan(name), torch.float32) is None

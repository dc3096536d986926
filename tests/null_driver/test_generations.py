"""Generations with each cache: the estimate's peaks against PyTorch's own CUDA code, to the byte."""

from __future__ import annotations

import json

import pytest

from sizer.allocator.allocator import replay
from sizer.base.versions import installed_version
from sizer.catalogue.gpus import GPUS
from sizer.tracing.cuda.size_oracle import size_oracle_of
from sizer.tracing.device import Device
from sizer.tracing.generation import trace_generation
from tests.null_driver.conftest import Run
from tests.tracing.generations import generation, work
from tests.tracing.quantized_caches import four_bit_caches

# head, cache, dtype, sequences, prompt, new tokens
CASES = [
    ("LlamaForCausalLM", "dynamic", "bfloat16", 2, 24, 24),
    ("LlamaForCausalLM", "dynamic", "bfloat16", 64, 200, 24),
    ("LlamaForCausalLM", "static", "bfloat16", 64, 200, 24),
    ("LlamaForCausalLM", "dynamic", "float32", 8, 64, 24),
    ("GPT2LMHeadModel", "dynamic", "float16", 16, 64, 24),
    ("GPT2LMHeadModel", "static", "float32", 4, 64, 24),
    ("MistralForCausalLM", "dynamic", "bfloat16", 4, 118, 24),
    ("Gemma2ForCausalLM", "dynamic", "bfloat16", 8, 56, 24),
    ("DeepseekV3ForCausalLM", "dynamic", "bfloat16", 4, 24, 24),
    ("BartForConditionalGeneration", "dynamic", "float32", 8, 64, 24),
    ("GPT2LMHeadModel", "dynamic", "float16", 1, 24, 24),  # products of a single row, with a bias
]
# On the host but for the layer that is at work, which comes on a second stream.
OFFLOADED_CASES = [
    ("GPT2LMHeadModel", "offloaded", "float16", 16, 64, 12),
    ("GPT2LMHeadModel", "offloaded_static", "float32", 1, 24, 12),
    ("LlamaForCausalLM", "offloaded", "bfloat16", 2, 24, 24),
    ("LlamaForCausalLM", "offloaded", "bfloat16", 64, 200, 24),
    ("LlamaForCausalLM", "offloaded_static", "bfloat16", 64, 200, 24),
    ("MistralForCausalLM", "offloaded", "bfloat16", 4, 118, 24),
]

# In 4 bits except for the last tokens; quantized again after each 20.
QUANTIZED_CASES = [
    ("LlamaForCausalLM", "quantized", "bfloat16", 2, 24, 44),
    ("GPT2LMHeadModel", "quantized", "float16", 16, 64, 44),
    ("GPT2LMHeadModel", "quantized", "float32", 1, 24, 44),
]

# With PyTorch 2.11 seven blocks of 512 bytes more are estimated at this one's peak than there are; the reason was not found.
UNLIKE_IN_2_11 = {CASES[3]}
MOST_UNLIKE_BYTES = 7 * 512


ALWAYS = [*CASES[::4], CASES[-1], OFFLOADED_CASES[0], QUANTIZED_CASES[0]]


@pytest.mark.parametrize(
    ("gpu", "expandable", "cases"),
    [
        ("rtx-3060-12gb", True, ALWAYS),
        pytest.param(
            "rtx-3060-12gb", True, [case for case in CASES if case not in ALWAYS], marks=pytest.mark.exhaustive
        ),
        pytest.param("h100-80gb", False, CASES[1::2], marks=pytest.mark.exhaustive),
        pytest.param("h100-80gb", False, OFFLOADED_CASES[1:], marks=pytest.mark.exhaustive),
        pytest.param("h100-80gb", False, QUANTIZED_CASES[1:], marks=pytest.mark.exhaustive),
    ],
)
def test_generations_take_what_pytorchs_own_code_does(
    run_on_null: Run, gpu: str, expandable: bool, cases: list[tuple]
) -> None:
    setting = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if expandable else {}
    truth = run_on_null("tests.null_driver.generations", json.dumps(cases), gpu=gpu, **setting)
    wrong = {}
    for case, theirs in zip(cases, truth, strict=True):
        head, cache, dtype, batch, prompt, new = case
        blueprint, module = generation(head, prompt=prompt)
        device = Device("cuda", GPUS[gpu].capability)
        asked = work(new, cache=cache, dtype=dtype)
        with four_bit_caches():
            tape = trace_generation(blueprint, module, asked, batch=batch, device=device)
        found = replay(tape.resolve(size_oracle_of(GPUS[gpu])), backend="cuda", expandable_segments=expandable)
        mine = [found.peak_allocated_bytes, found.peak_reserved_bytes]
        if mine != theirs:
            wrong[case] = (mine, theirs)
    assert set(wrong) == (UNLIKE_IN_2_11 & {*cases} if installed_version() == (2, 11) else set()), wrong
    assert all(
        abs(mine[0] - theirs[0]) <= MOST_UNLIKE_BYTES and mine[1] == theirs[1] for mine, theirs in wrong.values()
    )

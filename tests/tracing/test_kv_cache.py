"""The bytes of a generation's cache by its own tensors: against figures that others published, for every preset that generates."""

from __future__ import annotations

import json

import pytest

from sizer.architecture import make_blueprint
from sizer.catalogue.gpus import GPUS
from sizer.catalogue.presets import PRESETS
from sizer.errors import RequestError
from sizer.memory.codec import decode, encode
from sizer.memory.kv_cache import KvCache, KvSegment, build_kv_cache, sequence_bytes
from sizer.request import parse_query
from sizer.tracing.kv_cache import trace_kv_cache
from sizer.tracing.trace import build
from tests.tracing.generations import device, generation, work

# Bytes a token in bfloat16: 61 layers of (512 + 64) elements; 60 layers of 128 heads of 64, keys and values, which transformers
# caches for every head; 32 layers of 2 * 8 * 128; 28 layers of 2 * 8 * 128. vLLM and SGLang print the last two as
# 131,128 and 114,667 (their logs' token counts against the memory they had).
PUBLISHED = {"deepseek-v3": 70_272, "falcon-40b": 1_966_080, "llama-3-8b": 131_072, "qwen3-1.7b": 114_688}
# As servers' logs have them: llama.cpp the MiB of 2,048 tokens (huggingface.co/dranger003/c4ai-command-r-v01-iMat.GGUF, discussion
# 6: Llama-3-70B, Mixtral-8x7B, a fine-tuned Mistral-7B, Qwen1.5-32B, whose heads and layers are Qwen2.5's), SGLang the GiB of so
# many tokens, to two decimals (GPT-2: kvcached's notes on WSL2; Qwen3-235B, a rank of 4: vllm-project/vllm, issue 21348), vLLM the
# GiB of so many blocks of 16 (Llama-3.1-8B: vllm-project/vllm, issue 10517, a comment of 2 December 2024). Presets whose heads and
# layers are those of a logged one are not repeated.
LOGGED = {
    "llama-3.1-8b": 3.81 * 2**30 / (1952 * 16),
    "llama-3-70b": 640 * 2**20 / 2048,
    "mixtral-8x7b": 256 * 2**20 / 2048,
    "mistral-7b-v0.3": 256 * 2**20 / 2048,
    "qwen2.5-32b": 512 * 2**20 / 2048,
    "gpt2": 2 * 4.27 * 2**30 / 248_479,
    "qwen3-235b-a22b": 4 * 2 * 8.23 * 2**30 / 367_404,
}


def segments(query: str) -> tuple[KvSegment, ...]:
    blueprint = make_blueprint(parse_query(f"{query}&mode=generate&seq=64"))
    return trace_kv_cache(blueprint, build(blueprint), work(8), device=device())


@pytest.mark.parametrize(("preset", "token_bytes"), [(key, size) for key, size in PUBLISHED.items() if key in PRESETS])
def test_bytes_a_token_are_the_published_ones(preset: str, token_bytes: int) -> None:
    (line,) = segments(f"arch=hf:{preset}")
    assert (line.token_bytes, line.constant_bytes) == (token_bytes, 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("preset", LOGGED)
def test_bytes_a_token_are_those_of_servers_logs(preset: str) -> None:
    (line,) = segments(f"arch=hf:{preset}")
    assert line.constant_bytes == 0
    assert line.token_bytes == pytest.approx(LOGGED[preset], rel=0.002)


def test_a_window_ends_the_growth_of_its_layers() -> None:
    # of 2 layers one keeps 64 tokens: 2 * 2 heads * 64 elements * 2 bytes = 512 bytes a token and layer, and its window as a number
    blueprint, module = generation("Gemma2ForCausalLM")
    found = trace_kv_cache(blueprint, module, work(8), device=device())
    assert found == (
        KvSegment(start=0, constant_bytes=8, token_bytes=1024),
        KvSegment(start=64, constant_bytes=8 + 64 * 512, token_bytes=512),
    )
    assert [sequence_bytes(found, context) for context in (10, 63, 64, 1000)] == [
        8 + 10 * 1024, 8 + 63 * 1024, 8 + 64 * 1024, 8 + 64 * 512 + 1000 * 512
    ]  # fmt: skip


def test_of_an_offloaded_cache_all_layers_but_one_are_on_the_host() -> None:
    # of 2 layers one is on the device between two steps: 2 * 2 heads * 64 elements * 2 bytes
    blueprint, module = generation("LlamaForCausalLM")
    (line,) = trace_kv_cache(blueprint, module, work(8, cache="offloaded"), device=device())
    (plain,) = trace_kv_cache(blueprint, module, work(8), device=device())
    assert (line.constant_bytes, line.token_bytes) == (plain.constant_bytes, plain.token_bytes)
    assert (line.host_constant_bytes, line.host_token_bytes) == (0, plain.token_bytes // 2)
    assert plain.host_token_bytes == 0


def test_a_state_that_does_not_grow_is_a_constant() -> None:
    blueprint, module = generation("MambaForCausalLM")
    (line,) = trace_kv_cache(blueprint, module, work(8), device=device())
    assert line.token_bytes == 0 < line.constant_bytes


def test_a_model_that_reads_its_prompt_in_an_encoder_has_no_line() -> None:
    blueprint, module = generation("T5ForConditionalGeneration")
    assert trace_kv_cache(blueprint, module, work(8), device=device()) == ()


def test_what_a_paged_server_holds_is_counted_in_blocks() -> None:
    gpu = GPUS["a100-40gb"]
    found = build_kv_cache(
        (KvSegment(start=0, constant_bytes=100, token_bytes=10),), dtype="bfloat16", weights_bytes=2**30, gpu=gpu
    )
    budget = gpu.total_bytes * 90 // 100 - 2**30
    first = found.rows[0]
    assert (first.context, first.sequence_bytes, first.paged_bytes) == (1024, 10_340, 10_340)
    assert (found.paged_budget_bytes, first.paged_sequences) == (budget, budget // 10_340)
    assert decode(KvCache, json.loads(json.dumps(encode(found))), "cache") == found
    none = build_kv_cache(found.segments, dtype="bfloat16", weights_bytes=2**50, gpu=gpu)
    assert {row.paged_sequences for row in none.rows} == {0}


def test_a_model_without_a_language_models_head_is_refused() -> None:
    with pytest.raises(RequestError, match=r"does not generate text by transformers' own generate"):
        make_blueprint(parse_query("arch=hf:bert-base-uncased&mode=generate"))

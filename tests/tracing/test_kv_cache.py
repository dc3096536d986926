"""The bytes of a generation's cache by its own tensors: against figures that others published, for every preset that generates."""

from __future__ import annotations

import json
from unittest import mock

import pytest

from sizer.architecture import make_blueprint
from sizer.base.codec import decode, encode
from sizer.base.config_json import encode_config
from sizer.base.errors import RequestError, TraceError
from sizer.catalogue.presets import PRESETS
from sizer.query.text import parse_query
from sizer.report.kv_cache import KvCache, KvSegment, build_kv_cache, sequence_bytes
from sizer.tape.loops import written
from sizer.tracing import generation as generation_tape
from sizer.tracing.cache_growth import trace_kv_cache
from sizer.tracing.depth import DeepTraces, find_repeated
from sizer.tracing.generation import UNUSUAL, trace_generation
from sizer.tracing.token_trace import trace_tokens
from sizer.tracing.trace import build
from tests.architecture.tiny_configs import TINY
from tests.tracing.generations import device, generation, work

# Bytes a token in bfloat16: 60 layers of 128 heads of 64, keys and values, which transformers caches for every head; 32 layers
# of 2 * 8 * 128; 28 layers of 2 * 8 * 128. vLLM and SGLang print the last two as 131,128 and 114,667 (their logs' token counts
# against the memory they had).
PUBLISHED = {"falcon-40b": 1_966_080, "llama-3-8b": 131_072, "qwen3-1.7b": 114_688}
GIB, MIB = 2**30, 2**20
BLOCK = 16  # tokens
LLAMA_CPP = "llama.cpp: huggingface.co/dranger003/c4ai-command-r-v01-iMat.GGUF, discussion 6"
IK_LLAMA_CPP = "ik_llama.cpp, which keeps every token of every layer: github.com/ikawrakow/ik_llama.cpp"
UNSLOTH = "vLLM: github.com/unslothai/notebooks, nb"
# Bytes a token by lines of servers' logs that others published, and where: of vLLM the GiB, to two decimals, for so many tokens
# or blocks; of SGLang the GiB of keys, to two decimals, as many as of values, for so many tokens; of llama.cpp the MiB of its
# context, exact. Half of the last decimal and a block that did not fit are less than 0.2 % of each. A log counts where its model
# has the preset's heads and layers; presets that share them with one that is here are here only by a log of their own.
LOGGED = {
    "llama-3.1-8b": (
        3.81 * GIB / (1952 * BLOCK),
        "vLLM: github.com/vllm-project/vllm, issue 10517, comment of 2 December 2024",
    ),
    "llama-3.2-1b": (17.20 * GIB / 563_744, f"{UNSLOTH}/Llama_FP8_GRPO.ipynb"),
    "llama-3.2-3b": (23.46 * GIB / (13_724 * BLOCK), f"{UNSLOTH}/Advanced_Llama3_1_(3B)_GRPO_LoRA.ipynb"),
    "llama-3-70b": (640 * MIB / 2048, LLAMA_CPP),
    "llama-2-7b": (256 * MIB / 512, "llama.cpp: github.com/danbev/learning-ai, fundamentals/llama.cpp/README.md"),
    "llama-2-13b": (400 * MIB / 512, f"{IK_LLAMA_CPP}, pull request 328"),
    "qwen3-8b": (8.98 * GIB / 65_376, f"{UNSLOTH}/Qwen3_8B_FP8_GRPO.ipynb"),
    "qwen3-14b": (6.51 * GIB / 42_656, "vLLM: github.com/LMCache/LMCache, issue 1739"),
    "qwen3-30b-a3b": (2 * 76.44 * GIB / 1_669_816, "SGLang: github.com/sgl-project/sglang, pull request 18263"),
    "qwen3-235b-a22b": (4 * 2 * 8.23 * GIB / 367_404, "SGLang, a rank of 4: github.com/vllm-project/vllm, issue 21348"),
    "qwen2.5-0.5b": (
        34.81 * GIB / (190_100 * BLOCK),
        "vLLM: github.com/johnson7788/RLDecisionAgent, backend/ART_mcp-rl/example_mcp_rl.md",
    ),
    "qwen2.5-1.5b": (
        224 * MIB / 8192,
        "llama.cpp, DeepSeek-R1-Distill-Qwen-1.5B: github.com/fabiomatricardi/YouAreTheBenchmark, "
        "DeepSeek R1 Distill Qwen 1.5B/333.DeepSeek R1 Distill Qwen 1.5B_LlamaCPP_API_promptTest.py",
    ),
    "qwen2.5-3b": (4.01 * GIB / (7300 * BLOCK), f"{UNSLOTH}/Qwen2.5_(3B)-GRPO.ipynb"),
    "qwen2.5-7b": (
        896 * MIB / 16_384,
        "llama.cpp: developers.llamaindex.ai/python/framework/integrations/llm/llama_cpp",
    ),
    "qwen2.5-14b": (
        768 * MIB / 4096,
        "llama.cpp, a fine-tuned DeepSeek-R1-Distill-Qwen-14B: github.com/vxiaozhi/vxiaozhi.github.io, "
        "docs/_posts/zh/llm/2025-03-08-llama-cpp-get-started.md",
    ),
    "qwen2.5-32b": (512 * MIB / 2048, f"{LLAMA_CPP} (Qwen1.5-32B)"),
    "mistral-7b-v0.3": (256 * MIB / 2048, f"{LLAMA_CPP} (a fine-tuned Mistral-7B)"),
    "mixtral-8x7b": (256 * MIB / 2048, LLAMA_CPP),
    "gemma-2-2b": (208 * MIB / 2048, f"{IK_LLAMA_CPP}, issue 60"),
    "phi-3-mini-4k": (768 * MIB / 2048, "llama.cpp: github.com/danbev/learning-ai, agents/llama-cpp-agent/README.md"),
    "phi-4": (
        45.21 * GIB / (14_815 * BLOCK),
        "vLLM: github.com/datawhalechina/self-llm, models/phi4/06-Phi-4-GRPO及swanlab可视化.md",
    ),
    # 61 layers of (512 + 64) elements
    "deepseek-v3": (2196 * MIB / 32_768, f"{IK_LLAMA_CPP}, pull request 235 (DeepSeek-R1)"),
    "gpt2": (2 * 4.27 * GIB / 248_479, "SGLang: kvcached's notes on WSL2"),
    "pythia-1.4b": (
        384 * MIB / 2048,
        "llama.cpp: github.com/ggml-org/ci, "
        "llama.cpp/00/06f5a74a59945f22ff966e723c3d566b3ca8d0/ggml-3-arm64-cpu/pythia_1_4b-tg-f16.log",
    ),
}


# Bytes a token in bfloat16 after the window, by the GiB for 2**20 tokens that others published. Of DeepSeek V4 30 (21) layers make
# an entry of 512 elements and a key of 128 for each 4 tokens, and 31 (20) layers an entry for each 128.
VLLM = "vLLM's article on DeepSeek V4: vllm.ai/blog/deepseek-v4"
AT_A_MILLION = {
    "deepseek-v4-flash": (6.72, "r/LocalLLaMA, The exact KV cache usage of DeepSeek V4"),
    "deepseek-v4-pro": (9.62, VLLM),
    "deepseek-v3.2": (83.88, f"{VLLM} (83.9), and r/LocalLLaMA, The exact KV cache usage of DeepSeek V4"),
}


def segments(query: str) -> tuple[KvSegment, ...]:
    blueprint = make_blueprint(parse_query(f"{query}&mode=generate&seq=64"))
    module = build(blueprint)
    return trace_kv_cache(blueprint, module, work(8), device=device(), repeated=find_repeated(module))


@pytest.mark.parametrize(("preset", "token_bytes"), [(key, size) for key, size in PUBLISHED.items() if key in PRESETS])
def test_bytes_a_token_are_the_published_ones(preset: str, token_bytes: int) -> None:
    (line,) = segments(f"arch=hf:{preset}")
    assert (line.token_bytes, line.constant_bytes) == (token_bytes, 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("preset", LOGGED)
def test_bytes_a_token_are_those_of_servers_logs(preset: str) -> None:
    logged, _ = LOGGED[preset]
    line, *later = segments(f"arch=hf:{preset}")
    window = PRESETS[preset].config.get("sliding_window")  # these servers keep what a window has left behind, too
    assert [segment.start for segment in later] == ([window] if window else [])
    assert bool(line.constant_bytes) == bool(window)  # each layer that has a window keeps it as a number
    assert line.token_bytes == pytest.approx(logged, rel=0.002)


@pytest.mark.parametrize(
    "preset", [pytest.param(one, marks=() if one == "deepseek-v4-flash" else pytest.mark.exhaustive) for one in AT_A_MILLION]
)
def test_bytes_a_token_are_those_of_a_million_tokens(preset: str) -> None:
    million, _ = AT_A_MILLION[preset]
    *_, last = segments(f"arch=hf:{preset}&weights=full")
    assert last.token_bytes == pytest.approx(million * GIB / 2**20, rel=0.001)


def test_seventeen_models_have_a_source() -> None:
    known = [preset for preset in {*PUBLISHED, *LOGGED, *AT_A_MILLION} if preset in PRESETS]
    assert len(known) >= 17
    assert all(source for _, source in [*LOGGED.values(), *AT_A_MILLION.values()])


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


def deepseek_v4(rate: int, more: str = "", layers: int = 1) -> tuple:
    """A few layers of DeepSeek V4 with a window of 128 tokens that compress each `rate` tokens into one entry."""
    return mixed_deepseek_v4([rate] * layers, 512, head_dim=32 if rate == 4 else 64, more=more)


def mixed_deepseek_v4(rates: list[int], prompt: int, *, head_dim: int = 32, topk: int = 8, more: str = "") -> tuple:
    """Layers of DeepSeek V4 after a prompt; each compresses so many tokens into one entry, and an indexer chooses `topk`."""
    pytest.importorskip("transformers.models.deepseek_v4")
    config = {
        "model_type": "deepseek_v4", "hidden_size": 64, "head_dim": head_dim,
        "num_attention_heads": 2, "num_key_value_heads": 1,
        "num_hidden_layers": len(rates), "num_hash_layers": 0, "n_routed_experts": 2, "num_experts_per_tok": 1,
        "moe_intermediate_size": 32, "index_head_dim": 16, "index_n_heads": 2, "index_topk": topk, "o_groups": 2,
        "o_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 16, "sliding_window": 128, "vocab_size": 128,
        "max_position_embeddings": 1_048_576, "compress_ratios": [*rates, 0],
    }  # fmt: skip
    asked = f"arch=config:{encode_config(json.dumps(config))}&mode=generate&seq={prompt}{more}"
    blueprint = make_blueprint(parse_query(asked))
    return blueprint, build(blueprint)


# In bfloat16 an entry of 32 elements takes 64 bytes. Of 4 tokens one is made, and an index key of 16 * 2 = 32 bytes: 24 a token. Of
# 128 tokens one entry of 64 elements is made: 128 bytes, 1 a token. The window keeps 128 tokens of as many bytes as an entry.
@pytest.mark.parametrize(("rate", "entry_bytes"), [(4, 96), pytest.param(128, 128, marks=pytest.mark.exhaustive)])
def test_a_cache_that_grows_in_steps_is_a_line_through_whole_steps(rate: int, entry_bytes: int) -> None:
    blueprint, module = deepseek_v4(rate)
    *_, last = found = trace_kv_cache(blueprint, module, work(8), device=device())
    assert [segment.start for segment in found] == [0, 128]
    assert last.token_bytes == entry_bytes // rate
    assert last.constant_bytes > 128 * 64
    traced = trace_tokens(blueprint, module, work(600), batch=1, device=device(), tokens=130, after=0)
    held = dict(enumerate(traced.cache_bytes, start=512))
    assert held[640] - held[512 + rate] == (640 - 512 - rate) // rate * entry_bytes  # after the prompt has been released
    assert sequence_bytes(found, 640) == held[640]


# 128 tokens after a prompt of 512 the layer makes its next entry: not among 120
@pytest.mark.parametrize(
    ("rate", "new"),
    [(4, UNUSUAL + 6 * 8 + 3), (128, 120), pytest.param(128, UNUSUAL + 6 * 128 + 3, marks=pytest.mark.exhaustive)],
)
def test_the_steps_of_a_cache_that_grows_in_steps_come_again(rate: int, new: int) -> None:
    blueprint, module = deepseek_v4(rate)
    tape = written(trace_generation(blueprint, module, work(new), batch=1, device=device()))
    plain = trace_tokens(blueprint, module, work(new), batch=1, device=device(), tokens=new, after=0).tape
    assert (tape.order.tolist(), tape.sizes.tolist()) == (plain.order.tolist(), plain.sizes.tolist())


# Where 4 tokens make an entry in some layers and 128 in others: no entry of 128; one among the steps traced from the prompt
# on; one; five, of which the last follows from those before; one with which a window fills, and from which an indexer has enough.
@pytest.mark.parametrize(
    ("prompt", "new", "topk", "tokens"),
    [
        pytest.param(512, 60, 8, 20, id="none"),
        pytest.param(510, 80, 8, 48, id="in the first run", marks=pytest.mark.exhaustive),
        pytest.param(512, 256, 8, 51, id="one", marks=pytest.mark.exhaustive),
        pytest.param(510, 560, 8, 170, id="five", marks=pytest.mark.exhaustive),
        pytest.param(100, 330, 32, 170, id="window", marks=pytest.mark.exhaustive),
    ],
)
def test_entries_of_few_and_of_many_tokens_come_again(prompt: int, new: int, topk: int, tokens: int) -> None:
    blueprint, module = mixed_deepseek_v4([4, 128], prompt, topk=topk)
    traced = []

    def noted(*told: object, **more: object) -> object:
        traced.append(more["tokens"])
        return trace_tokens(*told, **more)

    with mock.patch.object(generation_tape, "trace_tokens", noted):
        tape = written(trace_generation(blueprint, module, work(new), batch=1, device=device()))
    plain = trace_tokens(blueprint, module, work(new), batch=1, device=device(), tokens=new, after=0).tape
    assert (tape.order.tolist(), tape.sizes.tolist()) == (plain.order.tolist(), plain.sizes.tolist())
    assert sum(traced) <= tokens


def test_an_indexer_that_has_enough_later_is_no_rule() -> None:
    blueprint, module = mixed_deepseek_v4([4, 128], 512, topk=8 * 128)  # 4,096 tokens
    with pytest.raises(TraceError, match="follow no rule"):
        trace_generation(blueprint, module, work(4000), batch=1, device=device())


# From 100 tokens on, the 36th new one, the indexer of DeepSeek V3.2 chooses no more of them.
def test_an_indexer_of_tokens_fills_like_a_window() -> None:
    pytest.importorskip("transformers.models.deepseek_v32")
    config = {
        "model_type": "deepseek_v32", "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "first_k_dense_replace": 2, "n_routed_experts": 4, "num_experts_per_tok": 1, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 32, "intermediate_size": 64, "index_head_dim": 32, "index_n_heads": 2,
        "index_topk": 100, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
        "v_head_dim": 16, "vocab_size": 128, "max_position_embeddings": 4096,
    }  # fmt: skip
    blueprint = make_blueprint(parse_query(f"arch=config:{encode_config(json.dumps(config))}&mode=generate&seq=64"))
    module = build(blueprint)
    tape = written(trace_generation(blueprint, module, work(80), batch=1, device=device()))
    plain = trace_tokens(blueprint, module, work(80), batch=1, device=device(), tokens=80, after=0).tape
    assert (tape.order.tolist(), tape.sizes.tolist()) == (plain.order.tolist(), plain.sizes.tolist())


# A job of DeepSeek-V4-Flash, which has 43 layers, ended after 120 s: 270 s of CPU time for 128 tokens, and 59 s with fewer layers.
def test_a_deep_model_with_such_a_cache_is_traced_with_fewer_layers() -> None:
    blueprint, module = deepseek_v4(4, layers=12)
    repeated = find_repeated(module)
    assert repeated
    whole = trace_generation(blueprint, module, work(10), batch=1, device=device())
    traced = []

    def noted(*told: object, **more: object) -> object:
        traced.append(len(module.model.layers))
        return trace_tokens(*told, **more)

    with mock.patch.object(generation_tape, "trace_tokens", noted):
        deep = trace_generation(blueprint, module, work(10), batch=1, device=device(), deep=DeepTraces(repeated))
    assert deep == whole
    assert traced == [12, 2, 3, 4]  # the prompt of the whole model, and three depths


@pytest.mark.exhaustive
def test_the_lines_of_such_a_cache_follow_from_fewer_layers() -> None:
    blueprint, module = deepseek_v4(4, layers=12)
    lines = trace_kv_cache(blueprint, module, work(8), device=device())
    assert trace_kv_cache(blueprint, module, work(8), device=device(), repeated=find_repeated(module)) == lines


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


@pytest.mark.parametrize("more", ["", "&inputs=text"])
def test_a_model_that_reads_images_has_the_lines_of_its_text(more: str) -> None:
    # 2 layers of keys and values of 2 heads of 8 elements of 2 bytes: 128 bytes a token
    config = encode_config(json.dumps(TINY["llava"]))
    blueprint = make_blueprint(parse_query(f"arch=config:{config}&mode=generate{more}"))
    (line,) = trace_kv_cache(blueprint, build(blueprint), work(8), device=device())
    assert (line.token_bytes, line.constant_bytes) == (128, 0)


def test_a_cache_has_a_row_for_each_context_and_leaves_servers_to_their_plan() -> None:
    found = build_kv_cache((KvSegment(start=0, constant_bytes=100, token_bytes=10),), dtype="bfloat16")
    assert [(row.context, row.sequence_bytes) for row in found.rows[:2]] == [(1024, 10_340), (4096, 41_060)]
    assert decode(KvCache, json.loads(json.dumps(encode(found))), "cache") == found
    assert "paged" not in json.dumps(encode(found))


def test_a_model_without_a_language_models_head_is_refused() -> None:
    with pytest.raises(RequestError, match=r"does not generate text by transformers' own generate"):
        make_blueprint(parse_query("arch=hf:bert-base-uncased&mode=generate"))

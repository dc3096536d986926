"""Servers of language models: engines, their versions, and the values that their flags take."""

from __future__ import annotations

from dataclasses import dataclass

AUTO = "auto"
KV_DTYPES = (AUTO, "fp8")
CACHE_TYPES = ("f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")  # of llama.cpp; its default is f16
APIS = ("server", "offline")
SAMPLERS = (AUTO, "sort", "triton", "flashinfer")
SWITCHES = (AUTO, "0", "1")
# Layouts that a server quantizes to, or finds in a checkpoint; "checkpoint" and "full" are values of sizer.catalogue.weights.
LAYOUTS = ("awq", "gptq", "fp8", "w8a8", "mxfp4")
# Types of GGUF files, llama.cpp b11549, tools/quantize/quantize.cpp, QUANT_OPTIONS.
FILE_TYPES = (
    *("f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "q4_1", "q4_0"),
    *("iq4_nl", "iq4_xs"),
    *("q3_k_l", "q3_k_m", "q3_k_s", "iq3_m", "iq3_s", "iq3_xs", "iq3_xxs", "q2_k", "q2_k_s", "iq2_m", "iq2_s", "iq2_xs", "iq2_xxs"),
    *("iq1_m", "iq1_s", "mxfp4"),
)
MAX_LAYERS = 1000
NEWEST_BUILD = 11_549  # of llama.cpp, October 2026
# Build from which the server keeps the logits of one token for each slot (de6f727 of 2026-06-01, llama.cpp's pull request 23861).
FEW_OUTPUTS = 9467
LORA_RANK, LORA_RANKS = 16, (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vllm/config/lora.py, the default and MaxLoRARanks, 0.33
MAX_LORAS = 1024
# Methods of speculative decoding by vLLM's names. In their place stands a draft model's preset, or a head (sizer.catalogue.heads).
NGRAM, MTP, EAGLE, EAGLE3, DRAFT_MODEL = "ngram", "mtp", "eagle", "eagle3", "draft_model"
DRAFTS = (NGRAM, MTP, EAGLE, EAGLE3)
MAX_DRAFTED = 128  # vllm/v1/sample/rejection_sampler.py, MAX_SPEC_LEN, 0.33
MAX_OFFLOAD = 4096  # GiB
MAX_SEQS = 65_536
MAX_TOKENS = 4_194_304
# Flags of SGLang that bound or divide its pool: what they take, and an example (server_args.py, 0.5.23).
_COUNT, _RATIO = r"[0-9]{1,9}", r"[0-9]{1,3}(?:\.[0-9]{1,6})?"
POOL_FLAGS = {
    "max_total_tokens": (_COUNT, "32768"),
    "page_size": (_COUNT, "64"),
    "swa_full_tokens_ratio": (_RATIO, "0.5"),
    "mamba_full_memory_ratio": (_RATIO, "0.5"),
    "max_mamba_cache_size": (_COUNT, "64"),
    "mamba_ssm_dtype": ("float32|bfloat16|float16", "bfloat16"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One value of `engine=`.

    `oldest` and `newest` bound the versions with known rules, None if the engine has no version here. `backends` are the device
    types with known rules. `takes` are its query keys, in addition to the keys of every engine. `layouts` and `kv` are the values
    of `weights` and `kv` that it takes.
    """

    key: str
    title: str
    oldest: tuple[int, int, int] | None = None
    newest: tuple[int, int, int] | None = None
    backends: tuple[str, ...] = ("cuda",)
    takes: tuple[str, ...] = ()
    layouts: tuple[str, ...] = LAYOUTS
    kv: tuple[str, ...] = KV_DTYPES


_SHARED = ("util", "max_num_seqs", "max_num_batched_tokens", "pp", "dp", "ep", "enforce_eager")

_ROWS = (
    Engine(
        key="vllm",
        title="vLLM",
        oldest=(0, 9, 0),
        newest=(0, 33, 0),
        takes=(
            *(*_SHARED, "api", "sampler", "prefix_caching", "kv_bytes", "outside", "graphs", "kv", "tp"),
            *("engine_version", "weights", "max_loras", "max_lora_rank", "fully_sharded_loras", "cpu_offload_gb", "dcp"),
            "speculative",
        ),
    ),
    Engine(
        key="sglang",
        title="SGLang",
        oldest=(0, 4, 0),
        newest=(0, 5, 23),
        takes=(*_SHARED, "prefix_caching", "kv", "tp", "engine_version", "weights", "speculative", "attn_dp", "pool"),
    ),
    Engine(
        key="llama.cpp",
        title="llama.cpp",
        backends=("cuda", "mps", "cpu"),
        takes=(
            *("engine_version", "max_num_seqs", "max_num_batched_tokens", "kv", "weights", "gpu_layers", "cpu_moe", "pp"),
            "fa",
        ),
        layouts=FILE_TYPES,
        kv=(AUTO, *CACHE_TYPES),
    ),
)

ENGINES: dict[str, Engine] = {row.key: row for row in _ROWS}


def format_release(release: tuple[int, int, int]) -> str:
    """Return a version of an engine as text: (0, 9, 2) is "0.9.2"."""
    return ".".join(map(str, release))

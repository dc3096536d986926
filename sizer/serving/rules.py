"""Differences between versions of vLLM and SGLang: a row for each version from which a rule holds, with its source."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from sizer.base.units import GIB, MIB
from sizer.serving.groups import GROUPS, SLOTS, TUPLES

Release = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule: the value of a name from a version on, and where the value was read or measured."""

    name: str
    since: Release
    value: object
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of one version of vLLM.

    - `util`: default of gpu_memory_utilization.
    - `sampler`: code path of the sampler in the profile run.
    - `graphs_in_budget`: graphs are estimated before the cache is sized.
    - `padding`: ratio of layer counts below which groups of layers are padded.
    - `batches_in_flight`: number of steps that a sliding window keeps.
    - `tokens_of_requests`: the log counts KV tokens of whole requests.
    - `large_seqs`: max_num_seqs on a large device. `huge_tokens`: devices of 160 GiB or more take more tokens.
    - `largest_graph`: tokens of the largest graph on a data center's Blackwell. `step_graph`: a step of the most tokens has a graph
      if it is not larger. `decode_graphs`: further graphs for decoding: "drafts" for each number of requests with drafted tokens,
      "all" also for max_num_seqs.
    - `item_floor`: by default a step holds the largest item of Gemma 4, a video.
    - `float_rotations`: image encoders rotate copies in float32.
    - `outside_bytes`, `outside_ranks_bytes`: allocated outside of PyTorch, the latter with more than one rank. `graph_bytes`:
      bytes of a graph for each layer and captured size. These three are fitted.
    - `second_runner`: models that the second model runner runs: comma-separated types, "dense" for models without experts and
      states, "all". `second_sampler`: code path in its profile run. `second_graphs`: it estimates graphs.
    - `benchmarks`: compilation benchmarks kernels on tensors of their arguments' sizes.
    - `shared_keys`: layers that reuse another layer's cache have keys and values.
    - `offloads_tower`: cpu_offload_gb moves encoders to the host.
    - `chunked`: layers that attend within chunks keep only these.
    - `packing`: how pages of several sizes share a block (sizer.serving.groups). `weighted_groups`: the log weights groups by
      their pages. `idle_block`: one block is reserved.
    - `state_prefixes`: prefixes of models with attention and states are cached by default. `state_checkpoints`: layers that then
      keep one state more of a request, which a prefill writes at the end of a block.
    - `lora_least_rank`: smallest max_lora_rank. `lora_vocabularies`: model types with slots for embedding and logits, in
      addition to sizer.serving.lora. `lora_vocabulary`: tokens that an adapter may add.
    - `lora_tied_twice`: Qwen3's tied embedding has slots twice. `lora_experts`: experts have slots. `lora_joined_experts`: gate
      and up of some models share one slot.
    - `lora_graphs`: number of graphs for a captured size. `second_lora_graphs`: the same for the second model runner.
    - `second_drafts`: methods of speculative decoding that the second model runner runs. `second_stages`: EAGLE3 runs there in a
      pipeline, too.
    - `rejection`: what the profile run of the first model runner verifies. `drafted_sizes`: graphs cover the drafted tokens of
      all requests. `shared_head`: layers for multi-token prediction use the model's head. `draft_buffers`: buffers that exist
      before weights are loaded reduce the cache.
    """

    util: float
    sampler: str
    graphs_in_budget: bool
    padding: float
    batches_in_flight: int
    tokens_of_requests: bool
    large_seqs: int
    huge_tokens: bool
    largest_graph: int
    step_graph: bool
    decode_graphs: str
    item_floor: bool
    float_rotations: bool
    outside_bytes: int
    outside_ranks_bytes: int
    graph_bytes: int
    second_runner: str
    second_sampler: str
    second_graphs: bool
    benchmarks: bool
    shared_keys: bool
    offloads_tower: bool
    chunked: bool
    packing: str
    weighted_groups: bool
    idle_block: bool
    state_prefixes: bool
    state_checkpoints: str
    lora_least_rank: int
    lora_vocabularies: str
    lora_vocabulary: int
    lora_tied_twice: bool
    lora_experts: bool
    lora_joined_experts: bool
    lora_graphs: int
    second_lora_graphs: int
    second_drafts: str
    second_stages: bool
    rejection: str
    drafted_sizes: bool
    shared_head: bool
    draft_buffers: bool


FITTED = "fitted on the startup logs in docs/serving.md"
_FIRST = (0, 9, 0)
_CONFIG, _RUNNER = "vllm/config/vllm.py", "vllm/v1/worker/gpu/model_runner.py"
_EARLY, _LORA = "qwen3, llama, mistral", "vllm/lora/layers"
_CHUNKED = "vllm/envs.py, VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE"
_PAGES = "vllm/v1/core/kv_cache_utils.py"
_UNSUPPORTED = "_get_v2_model_runner_unsupported_features"
_REJECTION = "vllm/v1/sample/rejection_sampler.py"
_QWEN3 = "qwen3, qwen3_moe, qwen3_vl_text, qwen3_vl_moe_text"

RULES: tuple[Rule, ...] = (
    Rule(name="util", since=_FIRST, value=0.9, source="vllm/config/cache.py"),
    Rule(name="util", since=(0, 20, 0), value=0.92, source="vllm/config/cache.py, 0.33"),
    Rule(name="sampler", since=_FIRST, value="sort", source="vllm/v1/sample/ops/topk_topp_sampler.py"),
    Rule(name="sampler", since=(0, 16, 0), value="triton", source="vllm/v1/sample/ops/topk_topp_triton.py"),
    Rule(
        name="sampler",
        since=(0, 22, 0),
        value="flashinfer",
        source="vllm/v1/worker/gpu_model_runner.py, _dummy_sampler_run, 0.33: the Triton path runs after FlashInfer's",
    ),
    Rule(name="graphs_in_budget", since=_FIRST, value=False, source="vllm/v1/worker/gpu_worker.py"),
    Rule(
        name="graphs_in_budget",
        since=(0, 20, 0),
        value=True,
        source="vllm/envs.py, VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS, 0.19.0 and 0.20.0",
    ),
    Rule(name="padding", since=_FIRST, value=1.0, source="vllm/v1/core/kv_cache_utils.py"),
    Rule(name="padding", since=(0, 12, 0), value=1.5, source="vllm/v1/core/kv_cache_planning.py, 0.33"),
    Rule(name="batches_in_flight", since=_FIRST, value=1, source="vllm/v1/kv_cache_interface.py, SlidingWindowSpec"),
    Rule(
        name="batches_in_flight",
        since=(0, 26, 0),
        value=2,
        source="vllm/config/vllm.py, max_in_flight_tokens, 0.26.0; 0.25.1 has none",
    ),
    Rule(name="tokens_of_requests", since=_FIRST, value=False, source="vllm/v1/core/kv_cache_utils.py"),
    Rule(
        name="tokens_of_requests",
        since=(0, 20, 1),
        value=True,
        source="vllm/v1/core/kv_cache_utils.py, get_kv_cache_capacity, 0.33",
    ),
    Rule(name="large_seqs", since=_FIRST, value=1024, source="vllm/engine/arg_utils.py, get_batch_defaults"),
    Rule(name="huge_tokens", since=_FIRST, value=False, source="vllm/engine/arg_utils.py, get_batch_defaults"),
    Rule(name="huge_tokens", since=(0, 28, 0), value=True, source="vllm/engine/arg_utils.py, get_batch_defaults, 0.28.0"),
    Rule(name="largest_graph", since=_FIRST, value=512, source=f"{_CONFIG}, _set_cudagraph_sizes, 0.27.1"),
    Rule(name="largest_graph", since=(0, 28, 0), value=1024, source=f"{_CONFIG}, _set_cudagraph_sizes, 0.28.0"),
    Rule(name="step_graph", since=_FIRST, value=False, source=f"{_CONFIG}, _set_cudagraph_sizes, 0.20.0"),
    Rule(name="step_graph", since=(0, 20, 1), value=True, source=f"{_CONFIG}, _set_cudagraph_sizes, 0.20.1"),
    Rule(name="decode_graphs", since=_FIRST, value="none", source=f"{_CONFIG}, _set_cudagraph_sizes, 0.28.0"),
    Rule(name="decode_graphs", since=(0, 29, 0), value="drafts", source=f"{_CONFIG}, uniform_decode_sizes, 0.29.0"),
    Rule(name="decode_graphs", since=(0, 31, 0), value="all", source=f"{_CONFIG}, uniform_decode_sizes, 0.31.0"),
    Rule(name="item_floor", since=_FIRST, value=False, source="vllm/engine/arg_utils.py, 0.21.0"),
    Rule(name="item_floor", since=(0, 22, 0), value=True, source="vllm/engine/arg_utils.py, _get_min_mm_batched_tokens, 0.22.0"),
    Rule(
        name="float_rotations",
        since=_FIRST,
        value=True,
        source="vllm/model_executor/models/qwen2_vl.py, apply_rotary_pos_emb_vision, 0.11",
    ),
    Rule(
        name="float_rotations",
        since=(0, 14, 0),
        value=False,
        source="vllm/model_executor/models/qwen2_5_vl.py, ApplyRotaryEmb; logs of 0.17 and later",
    ),
    Rule(name="outside_bytes", since=_FIRST, value=GIB // 20, source=FITTED),
    Rule(name="outside_bytes", since=(0, 22, 0), value=GIB // 4, source=FITTED),
    Rule(name="outside_ranks_bytes", since=_FIRST, value=18 * GIB // 10, source=f"{FITTED}: NCCL came after the snapshot"),
    Rule(name="outside_ranks_bytes", since=(0, 10, 0), value=15 * GIB // 100, source=FITTED),
    Rule(name="graph_bytes", since=_FIRST, value=3 * MIB // 10, source=FITTED),
    Rule(name="second_runner", since=_FIRST, value="none", source=_CONFIG),
    Rule(name="second_runner", since=(0, 22, 0), value="qwen3", source=f"{_CONFIG}, DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES, 0.22.1"),
    Rule(name="second_runner", since=(0, 23, 0), value=_EARLY, source=f"{_CONFIG}, 0.23.0"),
    Rule(
        name="second_runner",
        since=(0, 24, 0),
        value=f"{_EARLY}, deepseek_v2, qwen2_moe, granitemoe",
        source=f"{_CONFIG}, 0.24.0",
    ),
    Rule(name="second_runner", since=(0, 25, 0), value="dense", source=f"{_CONFIG}, _is_default_v2_model_runner_model, 0.25.1"),
    Rule(name="second_runner", since=(0, 29, 0), value="all", source=f"{_CONFIG}, use_v2_model_runner, 0.29.0"),
    Rule(name="second_sampler", since=_FIRST, value="copied", source="vllm/v1/worker/gpu/sample/sampler.py, 0.24.0"),
    Rule(name="second_sampler", since=(0, 28, 0), value="bare", source="sampler.py, needs_logits_processing, 0.28.0"),
    Rule(name="second_sampler", since=(0, 33, 0), value="triton", source=f"{_RUNNER}, _dummy_sampler_run, 0.33.0"),
    Rule(name="second_graphs", since=_FIRST, value=False, source=f"{_RUNNER}, profile_cudagraph_memory, 0.28.0"),
    Rule(name="second_graphs", since=(0, 29, 0), value=True, source=f"{_RUNNER}, profile_cudagraph_memory, 0.29.0"),
    Rule(name="benchmarks", since=_FIRST, value=False, source="vllm/config/compilation.py, 0.11.0"),
    Rule(name="benchmarks", since=(0, 11, 2), value=True, source="vllm/config/compilation.py, benchmark_combo_kernel, 0.11.2"),
    Rule(name="shared_keys", since=_FIRST, value=True, source="vllm/model_executor/models/gemma3n.py, 0.9.2"),
    Rule(name="shared_keys", since=(0, 30, 0), value=False, source="vllm/model_executor/models/gemma4.py, q_proj, 0.30.0"),
    Rule(name="offloads_tower", since=_FIRST, value=False, source="vllm/model_executor/models/utils.py, make_layers, 0.9.0"),
    Rule(
        name="offloads_tower",
        since=(0, 30, 0),
        value=True,
        source="vllm/model_executor/models/interfaces.py, supports_tower_offload, 0.30.0",
    ),
    Rule(name="chunked", since=_FIRST, value=False, source="vllm/attention/layers/chunked_local_attention.py, 0.10.0"),
    Rule(name="chunked", since=(0, 10, 0), value=True, source="vllm/v1/kv_cache_interface.py, ChunkedLocalAttentionSpec, 0.10.0"),
    Rule(name="chunked", since=(0, 10, 1), value=False, source=f"{_CHUNKED}, 0.10.1"),
    Rule(name="chunked", since=(0, 14, 0), value=True, source=f"{_CHUNKED}, 0.14.0"),
    Rule(name="packing", since=_FIRST, value=TUPLES, source=f"{_PAGES}, _get_kv_cache_config_deepseek_v4, 0.20.0"),
    Rule(name="packing", since=(0, 24, 0), value=SLOTS, source=f"{_PAGES}, _get_kv_cache_config_packed, 0.24.0"),
    Rule(name="packing", since=(0, 29, 0), value=GROUPS, source=f"{_PAGES}, _get_packed_kv_cache_groups, 0.29.0"),
    Rule(name="weighted_groups", since=_FIRST, value=True, source=f"{_PAGES}, get_max_concurrency_for_kv_cache_config, 0.26.0"),
    Rule(name="weighted_groups", since=(0, 27, 0), value=False, source=f"{_PAGES}, 0.27.0"),
    Rule(name="idle_block", since=_FIRST, value=False, source=f"{_PAGES}, 0.28.0"),
    Rule(name="idle_block", since=(0, 29, 0), value=True, source=f"{_PAGES}, check_enough_kv_cache_memory, 0.29.0"),
    Rule(name="state_prefixes", since=_FIRST, value=False, source="vllm/config/model.py, is_prefix_caching_supported, 0.25.1"),
    Rule(name="state_prefixes", since=(0, 26, 0), value=True, source="vllm/config/model.py, is_prefix_caching_supported, 0.26.0"),
    Rule(name="state_checkpoints", since=_FIRST, value="none", source="vllm/v1/kv_cache_interface.py, MambaSpec, 0.31.0"),
    Rule(
        name="state_checkpoints",
        since=(0, 32, 0),
        value="mamba2",
        source="vllm/model_executor/layers/mamba/mamba_mixer2.py, num_prefill_checkpoint_blocks, 0.32.0",
    ),
    Rule(
        name="state_checkpoints",
        since=(0, 33, 0),
        value="mamba2, gdn",
        source="vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py, num_prefill_checkpoint_blocks, 0.33.0",
    ),
    Rule(name="lora_least_rank", since=_FIRST, value=8, source="vllm/config.py, possible_max_ranks, 0.9.0"),
    Rule(name="lora_least_rank", since=(0, 11, 1), value=1, source="vllm/config/lora.py, MaxLoRARanks, 0.11.1"),
    Rule(name="lora_vocabularies", since=_FIRST, value="mistral", source="vllm/model_executor/models/registry.py, 0.9.0"),
    Rule(name="lora_vocabularies", since=(0, 15, 0), value="none", source="vllm/model_executor/models/mistral.py, 0.15.0"),
    Rule(
        name="lora_vocabularies",
        since=(0, 16, 0),
        value=_QWEN3,
        source="vllm/model_executor/models/qwen3.py, embedding_modules, 0.16.0",
    ),
    Rule(
        name="lora_vocabularies",
        since=(0, 29, 0),
        value=f"{_QWEN3}, qwen3_5_text, qwen3_5_moe_text",
        source="vllm/model_executor/models/qwen3_5.py, embedding_modules, 0.29.0",
    ),
    Rule(name="lora_vocabulary", since=_FIRST, value=256, source="vllm/config.py, lora_extra_vocab_size, 0.9.0"),
    Rule(name="lora_vocabulary", since=(0, 12, 0), value=0, source=f"{_LORA}/logits_processor.py, 0.12.0"),
    Rule(name="lora_tied_twice", since=_FIRST, value=False, source="vllm/model_executor/models/qwen3.py, 0.15.0"),
    Rule(name="lora_tied_twice", since=(0, 16, 0), value=True, source="vllm/model_executor/models/qwen3.py, lm_head, 0.16.0"),
    Rule(name="lora_tied_twice", since=(0, 28, 0), value=False, source="vllm/model_executor/models/qwen3.py, tie_weights, 0.28.0"),
    Rule(name="lora_experts", since=_FIRST, value=False, source="vllm/lora/layers, 0.11.0"),
    Rule(name="lora_experts", since=(0, 11, 1), value=True, source=f"{_LORA}/fused_moe.py, FusedMoEWithLoRA, 0.11.1"),
    Rule(name="lora_joined_experts", since=_FIRST, value=False, source=f"{_LORA}/fused_moe.py, 0.11.1"),
    Rule(name="lora_joined_experts", since=(0, 12, 0), value=True, source=f"{_LORA}/fused_moe.py, FusedMoE3DWithLoRA, 0.12.0"),
    Rule(name="lora_graphs", since=_FIRST, value=1, source="vllm/config/compilation.py, 0.11.0"),
    Rule(name="lora_graphs", since=(0, 11, 1), value=2, source="vllm/config/compilation.py, cudagraph_specialize_lora, 0.11.1"),
    Rule(name="second_lora_graphs", since=_FIRST, value=1, source="vllm/v1/worker/gpu/cudagraph_utils.py, 0.22.0"),
    Rule(
        name="second_lora_graphs",
        since=(0, 24, 0),
        value=2,
        source="vllm/v1/worker/gpu/cudagraph_utils.py, lora_capture_cases, 0.24.0",
    ),
    Rule(name="second_drafts", since=_FIRST, value="eagle, eagle3, mtp", source=f"{_CONFIG}, {_UNSUPPORTED}, 0.22.1"),
    Rule(
        name="second_drafts",
        since=(0, 31, 0),
        value="eagle, eagle3, mtp, draft_model",
        source=f"{_CONFIG}, {_UNSUPPORTED}, 0.31.0",
    ),
    Rule(
        name="second_drafts",
        since=(0, 32, 0),
        value="eagle, eagle3, mtp, draft_model, ngram",
        source=f"{_CONFIG}, {_UNSUPPORTED}, 0.32.0",
    ),
    Rule(name="second_stages", since=_FIRST, value=False, source=f"{_CONFIG}, {_UNSUPPORTED}, 0.29.0"),
    Rule(name="second_stages", since=(0, 30, 0), value=True, source=f"{_CONFIG}, {_UNSUPPORTED}, 0.30.0"),
    Rule(name="rejection", since=_FIRST, value="drafted", source=f"{_REJECTION}, compute_probs, 0.10.2"),
    Rule(name="rejection", since=(0, 11, 1), value="both", source=f"{_REJECTION}, bonus_logits, 0.11.1"),
    Rule(name="rejection", since=(0, 14, 0), value="copied", source=f"{_REJECTION}, target_logits.clone, 0.14.0"),
    Rule(name="drafted_sizes", since=_FIRST, value=False, source=f"{_CONFIG}, _set_cudagraph_sizes, 0.12.0"),
    Rule(name="drafted_sizes", since=(0, 13, 0), value=True, source=f"{_CONFIG}, _set_cudagraph_sizes, 0.13.0"),
    Rule(name="shared_head", since=_FIRST, value=False, source="vllm/v1/spec_decode/eagle.py, 0.15.0"),
    Rule(name="shared_head", since=(0, 16, 0), value=True, source="vllm/v1/spec_decode/eagle.py, _maybe_share_lm_head, 0.16.0"),
    Rule(name="draft_buffers", since=_FIRST, value=False, source="vllm/utils/mem_utils.py, memory_profiling, 0.26.0"),
    Rule(name="draft_buffers", since=(0, 27, 0), value=True, source="vllm/utils/mem_utils.py, total_consumed, 0.27.0"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangRules:
    """The rules of one version of SGLang for the memory that it reserves outside of its static share.

    `share` is the basis of the share: "ranks", on large devices a reserve instead ("ranks or 13 GiB", "ranks or 18 GiB"), "memory",
    or "tokens" of a prefill chunk. The other fields apply to "tokens",
    with the defaults of 0.5.3. `small_tokens`, `small_batch` and `small_batch_ranks` are chunked_prefill_size and
    cuda_graph_max_bs of a device of 20 to 35 GiB; the last one applies from 4 tensor-parallel ranks on. `batch_capped` says
    whether max_running_requests bounds cuda_graph_max_bs.

    `eager_decode` and `eager_prefill` say whether memory is reserved for graphs that are switched off. `prefill_graphs` says
    whether prefills have graphs, `prefill_stages` and `prefill_latent` whether this includes pipelines and MLA,
    `prefill_capped` whether the longest request bounds their sizes. `windowed` lists prefixes of model types with a separate
    pool for sliding windows; other models keep all tokens in each layer.

    With speculative decoding, `draft_mib` is reserved for heads and layers for multi-token prediction, `draft_model_mib` for a
    draft model. `draft_in_share` says whether weights and layers of a draft are part of the static share. `draft_headroom` says
    whether the pool has room for the drafted tokens of all requests in addition, `draft_prefills` whether prefills have graphs.
    `draft_windows` says which layers of a draft count in a model with a pool of windows: "none", those in "full", or each as its
    "own" kind. `padded_states` is the number of states that pad the pool. `bounds_full` says whether max_total_tokens bounds the
    tokens of full attention in a model with a pool of windows, else those before windows get a pool.

    `images_share` is the factor of the share for a model that reads images, 0 if the size of its encoder decides it;
    `images_always` says whether a requested share has it, too. `aiter_share` is the factor with AITER's attention on AMD.
    `paged_windows` lists prefixes of model types whose windows have no pool on a data center's Blackwell.

    Without prefix caching a model with states has one of them for each of max_running_requests; if these are not given,
    `state_limit`, or by the memory if that is 0. `uncached_states` lists prefixes of types without prefix caching. With it a
    running request has `states_of_request` states, two more for the types in `buffered_states`.

    `loaded_bytes` are taken by loading in addition to the weights. They are fitted.
    """

    share: str
    small_tokens: int = 2048
    small_batch: int = 16
    small_batch_ranks: int = 80
    batch_capped: bool = False
    eager_decode: bool = True
    eager_prefill: bool = True
    prefill_graphs: bool = False
    prefill_stages: bool = False
    prefill_latent: bool = True
    prefill_capped: bool = False
    windowed: tuple[str, ...] = ()
    draft_mib: int = 2048
    draft_model_mib: int = 6144
    draft_in_share: bool = False
    draft_headroom: bool = True
    draft_prefills: bool = True
    draft_windows: str = "none"
    padded_states: int = 0
    bounds_full: bool = False
    images_share: float = 0.0
    images_always: bool = False
    aiter_share: float = 1.0
    paged_windows: tuple[str, ...] = ()
    state_limit: int = 0
    uncached_states: tuple[str, ...] = ()
    states_of_request: int = 3
    buffered_states: tuple[str, ...] = ()
    loaded_bytes: int = GIB // 20


_ARGS, _HOOK, _GRAPHS = "sglang/srt/server_args.py", "sglang/srt/arg_groups/memory_hook.py", "cuda_graph_hook.py"
_CONFIG = "sglang/srt/configs/model_config.py"
_POOL = "sglang/srt/model_executor/pool_configurator.py"
_RUNNER_FILE, _ATTENTION = "sglang/srt/model_executor/model_runner.py", "sglang/srt/arg_groups/attention_hook.py"
_POOLS = "sglang/srt/model_executor/model_runner_kv_cache_mixin.py"
_BUFFERED = ("qwen3_5", "qwen3_next", "falcon_h1", "granitemoehybrid", "nemotron_h")
_OLDEST, _TOKENS = (0, 4, 0), (0, 5, 3)
AITER_SHARE, AITER_TOKENS = 0.85, 8192  # factor of the share with AITER's attention if the longest request has more tokens
_WINDOWED = ("gpt_oss", "llama4", "mimo_v2", "step3p5")


def _rule(name: str, since: Release, value: object, source: str) -> Rule:
    return Rule(name=name, since=since, value=value, source=source)


SGLANG_RULES: tuple[Rule, ...] = (
    _rule("share", _OLDEST, "ranks", f"{_ARGS}, 0.4.4"),
    _rule("share", (0, 4, 6), "ranks or 13 GiB", f"{_ARGS}, 0.4.6"),
    _rule("share", (0, 4, 7), "ranks or 18 GiB", f"{_ARGS}, 0.4.7"),
    _rule("share", (0, 4, 8), "memory", f"{_ARGS}, 0.4.9"),
    _rule("share", _TOKENS, "tokens", f"{_ARGS}, _handle_gpu_memory_settings, 0.5.3"),
    _rule("small_tokens", _TOKENS, 2048, f"{_ARGS}, 0.5.3"),
    _rule("small_tokens", (0, 5, 20), 4096, f"{_HOOK}, handle_gpu_memory_settings, 0.5.20"),
    _rule("small_batch", _TOKENS, 16, f"{_ARGS}, 0.5.3"),
    _rule("small_batch", (0, 5, 5), 24, f"{_ARGS}, 0.5.5"),
    _rule("small_batch", (0, 5, 20), 48, f"{_HOOK}, 0.5.20"),
    _rule("small_batch_ranks", _TOKENS, 80, f"{_ARGS}, 0.5.3"),
    _rule("small_batch_ranks", (0, 5, 20), 160, f"{_HOOK}, 0.5.20"),
    _rule("batch_capped", (0, 5, 22), True, f"{_HOOK}, 0.5.22"),
    _rule("eager_decode", _TOKENS, True, f"{_ARGS}, 0.5.3"),
    _rule("eager_decode", (0, 5, 15), False, f"{_ARGS}, 0.5.15"),
    _rule("eager_prefill", _TOKENS, True, f"{_ARGS}, 0.5.3"),
    _rule("eager_prefill", (0, 5, 14), False, f"{_ARGS}, 0.5.14"),
    _rule("prefill_graphs", (0, 5, 10), True, f"{_ARGS}, _handle_piecewise_cuda_graph, 0.5.10"),
    _rule("prefill_stages", (0, 5, 10), False, f"{_ARGS}, _handle_piecewise_cuda_graph, 0.5.10"),
    _rule("prefill_stages", (0, 5, 15), True, f"{_ARGS}, _apply_cuda_graph_compatibility, 0.5.15"),
    _rule("prefill_stages", (0, 5, 19), False, f"{_GRAPHS}, apply_cuda_graph_compatibility, 0.5.19"),
    _rule("prefill_latent", (0, 5, 10), True, f"{_ARGS}, _handle_gpu_memory_settings, 0.5.10"),
    _rule("prefill_latent", (0, 5, 15), False, f"{_ARGS}, _disable_breakable_cudagraph_if_incompatible, 0.5.15"),
    _rule("prefill_latent", (0, 5, 18), True, f"{_ARGS}, 0.5.18"),
    _rule("prefill_capped", (0, 5, 13), True, f"{_ARGS}, 0.5.13"),
    _rule("prefill_capped", (0, 5, 17), False, f"{_ARGS}, 0.5.17"),
    _rule("windowed", _OLDEST, (), f"{_CONFIG}, is_hybrid_model, 0.5.6"),
    _rule("windowed", (0, 5, 8), _WINDOWED, f"{_CONFIG}, is_hybrid_swa_model, 0.5.8"),
    _rule("windowed", (0, 5, 11), (*_WINDOWED, "gemma4"), f"{_CONFIG}, 0.5.11"),
    _rule("windowed", (0, 5, 12), (*_WINDOWED, "gemma4", "laguna"), f"{_CONFIG}, 0.5.12"),
    _rule("windowed", (0, 5, 18), (*_WINDOWED, "gemma4", "laguna", "muse_glimmer"), f"{_CONFIG}, 0.5.18"),
    _rule("draft_mib", _TOKENS, 2048, f"{_ARGS}, _handle_gpu_memory_settings, 0.5.3"),
    _rule("draft_mib", (0, 5, 10), 4096, f"{_ARGS}, _handle_gpu_memory_settings, 0.5.10"),
    _rule("draft_mib", (0, 5, 14), 0, f"{_ARGS}, _handle_gpu_memory_settings, 0.5.14"),
    _rule("draft_model_mib", _TOKENS, 6144, f"{_ARGS}, _handle_gpu_memory_settings, 0.5.3"),
    _rule("draft_model_mib", (0, 5, 14), 0, f"{_ARGS}, _handle_gpu_memory_settings, 0.5.14"),
    _rule("draft_in_share", _TOKENS, False, "sglang/srt/model_executor/model_runner.py, profile_max_num_token, 0.5.3"),
    _rule("draft_in_share", (0, 5, 14), True, f"{_POOL}, and managers/scheduler.py, init_model_worker, 0.5.14"),
    _rule("draft_headroom", _TOKENS, True, "sglang/srt/model_executor/model_runner.py, draft_runner_cache_size, 0.5.3"),
    _rule("draft_headroom", (0, 5, 7), False, "sglang/srt/model_executor/model_runner_kv_cache_mixin.py, 0.5.7"),
    _rule("draft_prefills", (0, 5, 10), False, f"{_ARGS}, _handle_piecewise_cuda_graph, 0.5.10"),
    _rule("draft_prefills", (0, 5, 11), True, f"{_ARGS}, _handle_piecewise_cuda_graph, 0.5.11"),
    _rule("draft_windows", (0, 5, 14), "none", f"{_POOL}, HybridSWAPoolConfigurator, 0.5.14"),
    _rule("draft_windows", (0, 5, 15), "full", f"{_POOL}, _draft_full_layers_num, 0.5.15"),
    _rule("draft_windows", (0, 5, 19), "own", f"{_POOL}, _draft_swa_layers_num, 0.5.19"),
    _rule("padded_states", (0, 5, 14), 0, f"{_POOLS}, 0.5.14"),
    _rule("padded_states", (0, 5, 17), 1, "sglang/srt/mem_cache/kv_cache_configurator.py, capped_reqs, 0.5.17"),
    _rule("bounds_full", (0, 5, 8), False, f"{_POOLS}, set_num_tokens_hybrid_swa, 0.5.8"),
    _rule("bounds_full", (0, 5, 11), True, f"{_POOL}, calculate_pool_sizes_from_max_tokens, 0.5.11"),
    _rule("images_share", _OLDEST, 0.95, f"{_RUNNER_FILE}, is_multimodal, 0.4.4"),
    _rule("images_share", (0, 4, 5), 0.9, f"{_RUNNER_FILE}, is_multimodal, 0.4.5"),
    _rule("images_share", (0, 5, 0), 0.0, f"{_ARGS}, adjust_mem_fraction_for_vlm, 0.5.1"),
    _rule("images_always", _OLDEST, True, f"{_RUNNER_FILE}, is_multimodal, 0.4.4"),
    _rule("images_always", (0, 4, 9), False, f"{_ARGS}, is_multimodal, 0.4.9"),
    _rule("aiter_share", _OLDEST, 1.0, f"{_RUNNER_FILE}, 0.4.6"),
    _rule("aiter_share", (0, 4, 7), AITER_SHARE, f"{_RUNNER_FILE}, context_len > 8192, 0.4.7; {_ATTENTION}, 0.5.23"),
    _rule("paged_windows", (0, 5, 8), ("gpt_oss",), f"{_ARGS}, trtllm_mha, 0.5.8"),
    _rule("paged_windows", (0, 5, 10), (), f"{_ARGS}, 0.5.10"),
    _rule("state_limit", _OLDEST, 512, f"{_RUNNER_FILE}, max_mamba_cache_size, 0.5.2"),
    _rule("state_limit", (0, 5, 9), 0, f"{_POOLS}, handle_max_mamba_cache, 0.5.9"),
    _rule("uncached_states", _OLDEST, ("qwen3_next", "falcon_h1", "nemotron_h"), f"{_RUNNER_FILE}, is_hybrid_gdn, 0.5.2"),
    _rule("uncached_states", (0, 5, 4), ("falcon_h1", "nemotron_h"), f"{_RUNNER_FILE}, mamba2_config, 0.5.4"),
    _rule("uncached_states", (0, 5, 7), ("kimi_linear",), f"{_ARGS}, disable_radix_cache, 0.5.7"),
    _rule("uncached_states", (0, 5, 14), (), f"{_ARGS}, _handle_mamba_radix_cache, 0.5.14"),
    _rule("states_of_request", _OLDEST, 3, f"{_POOLS}, MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO, 0.5.8"),
    _rule("buffered_states", _OLDEST, (), f"{_ARGS}, mamba_scheduler_strategy, 0.5.12"),
    _rule("buffered_states", (0, 5, 14), _BUFFERED, f"{_ARGS}, _support_mamba_cache_extra_buffer, 0.5.14"),
    _rule("loaded_bytes", _OLDEST, round(0.12 * GIB), FITTED),
    _rule("loaded_bytes", (0, 5, 8), round(0.05 * GIB), FITTED),
)


def rules_of(release: Release) -> Rules:
    """Return the rules of a version of vLLM: of each name the newest row that is not newer than the version."""
    found = _newest(RULES, release)
    return Rules(**{field.name: found[field.name] for field in fields(Rules)})


def sglang_rules_of(release: Release) -> SglangRules:
    """Return the rules of a version of SGLang, in the same way."""
    return SglangRules(**_newest(SGLANG_RULES, release))


def _newest(rules: tuple[Rule, ...], release: Release) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rule in sorted(rules, key=lambda row: row.since):
        if rule.since <= release:
            found[rule.name] = rule.value
    return found

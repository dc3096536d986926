"""Memory of SGLang on a GPU: its static share is for weights and cache, the rest for everything else.

Source: sglang/srt/server_args.py and model_executor/model_runner.py of SGLang 0.4.4 to 0.4.9 and 0.5.1 to 0.5.18, and
arg_groups/memory_hook.py, arg_groups/cuda_graph_hook.py, model_executor/pool_configurator.py and
mem_cache/kv_cache_configurator.py of 0.5.19 to 0.5.23. What versions do differently is in `sizer.serving.rules`.

*Known limitations*: SGLANG_ENABLE_POST_CAPTURE_KV_SIZING, which is off by default from 0.5.16 on, sizes the cache after graphs are
captured. From 0.5.16 on some models with an encoder keep graphs of prefills; here none does, and up to 0.5 GiB are not reserved.
In 0.5.17 models with DSA have graphs of prefills; here they have none, and 1.5 GiB are not reserved. Speculative decoding is
counted with a chain of drafted tokens (--speculative-eagle-topk 1). A tree has as many tokens in the pool from 0.5.7 on.
States are in float32 unless `pool` says otherwise: a config's own mamba_ssm_dtype, which counts from 0.5.9 on, is not read.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from sizer.base.codec import Difference
from sizer.base.errors import Refusal, RequestError
from sizer.base.units import GIB, MIB, format_bytes
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.heads import draft_method_of, repository_of
from sizer.catalogue.serving import AUTO, DRAFT_MODEL, EAGLE, EAGLE3, MTP, NGRAM, format_release
from sizer.report.served import ContextRow, Served, Starts, Want, both
from sizer.serving.answer import contexts_of
from sizer.serving.architecture import ENCODER, SLIDING, STATE, Architecture, Layer
from sizer.serving.cache import state_bytes, token_bytes
from sizer.serving.drafts import JOINED, draft_bytes, unshared_bytes, with_draft
from sizer.serving.flags import HOPPER, UNNAMED_LENGTH, Flags, check_engine, check_ranks, layout_of, release_of
from sizer.serving.layout import allocated, tensors, weights_bytes
from sizer.serving.levers import Change, Outcome, find_levers, gpu_with, shared_changes
from sizer.serving.rules import AITER_TOKENS, Release, SglangRules, sglang_rules_of

DRIVER_BYTES = 480 * MIB  # nvidia-smi's total over PyTorch's: 81,559 against 81,082 MiB on an H100
# NCCL and buffers between ranks, before the server measures the free memory: with four ranks or more on GPUs that NVLink or AMD's
# links connect, otherwise with several. Fitted on startup logs ("Init torch distributed ends. mem usage").
LINKED_BYTES, RANKS_BYTES, LINKED_RANKS = 5 * GIB // 4, GIB // 5, 4
LINKED = ((8, 0), (9, 0), (10, 0), (10, 3))  # capabilities of A100, H100, H200, B200 and B300
BAND = GIB
# With unified memory the free memory is the host's (utils/common.py, get_available_gpu_memory, 0.5.8 and 0.5.17: psutil). Nine
# published logs of a DGX Spark have 108.1 to 115.8 GiB before loading, 111.7 in the middle, of 119.2: a sixteenth is in use.
HOST_PART, UNIFIED_BAND = 16, 4 * GIB
# Two published logs of MI355X have 8.0 and 8.9 GiB between two and four ranks (0.5.17 and a later one), one of 0.5.8 has 3.7.
AMD_RANKS_BAND = 8 * GIB
SLIDING_RATIO = 0.8  # server_args.py, swa_full_tokens_ratio
STATE_RATIO = 0.9  # server_args.py, mamba_full_memory_ratio
STATE_ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}  # configs/mamba_utils.py, mamba2_state_dtype, 0.5.2 to 0.5.23
LATENT_GRAPHS_MIB = 1536  # for the prefill graphs of a model with MLA
# Text models in checkpoints that are served without images unless requested; configs/model_config.py, mm_disabled_models.
WITHOUT_IMAGES = ("gemma3_text", "llama4_text")
CUDA_MAKERS = ("NVIDIA", "")  # a custom device has no maker
PADDED_BATCH = 300  # requests of the largest graph from which on attention's data parallel reserves more; server_args.py, 0.5.3
ATTN_DP_SINCE, ATTN_DP_NAMED = (0, 5, 3), (0, 5, 22)  # releases with the rules that are planned, and with --attn-dp-size
# Weights that data parallel of attention splits among fewer ranks; the head and feed-forward layers stay with all.
ATTENDS = re.compile(r"\.(?:self_attn|attn|attention|linear_attn|mixer|mamba)\.|\b(?:embed_tokens|wte|word_embeddings)\.")
IMAGES_SINCE, SPARSE_SINCE = (0, 5, 18), (0, 5, 5)
BLACKWELL = (10, 0)
IMAGES_BYTES = 100 * MIB  # environ.py, SGLANG_VLM_CACHE_SIZE_MB; kv_cache_configurator.py, mm_runtime_reservation_gb
CONTEXTS = (1024, 4096, 16_384, 65_536, 131_072, 262_144)
DRAFTED_REQUESTS = 48  # server_args.py, max_running_requests with speculative decoding, 0.5.3; speculative_hook.py, 0.5.23
DRAFTS_SINCE, STATES_DRAFTED_SINCE = (0, 5, 3), (0, 5, 14)
BUFFERED = 2  # further states of a running request with the strategy extra_buffer; _calculate_mamba_ratio, get_mamba_tracking_slots
RUNNING = (2048, 4096)  # the least and the most of max_running_requests by default; resolve_max_num_reqs
AITER_HEADS = (16, 128)  # heads of MLA on a rank with which AITER runs; server_args.py, _get_default_attn_backend
UNSHARED, SHARED = (0, 15, 0), (0, 16, 0)  # releases of vLLM whose layers for multi-token prediction have a head or share it
ALGORITHMS = {NGRAM: "NGRAM", MTP: "NEXTN", EAGLE: "EAGLE", EAGLE3: "EAGLE3", DRAFT_MODEL: "STANDALONE"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangFlags:
    """The resolved flags of one SGLang server. Sizes are in bytes, lengths in tokens.

    `asked_fraction` and `asked_length` are None if the server decides. `latent` says whether the model has MLA, `encodes`
    whether it reads more than text. `graphs_of_prefills` says whether model and device support prefill graphs: models with an
    encoder and devices other than NVIDIA's do not. `images` is the number of layers and the hidden size of the image encoder.
    `prefixes` says whether prefixes are cached, `nvidia` whether the device has CUDA, `aiter` whether attention runs on AMD's
    kernels.

    `draft` is the method of speculative decoding, a draft model or a head, empty without; `draft_tokens` are the tokens that
    it drafts at once. `pool` are flags that bound or divide the pool, with their values. `attn_dp` is the number of groups of
    tensor-parallel ranks whose attention has requests of its own; chunked_prefill_size is that of all groups.
    """

    release: Release
    total_bytes: int
    context_length: int
    fraction: float
    chunked_prefill_size: int
    graph_batch: int
    running: int | None
    layout: str | None = None
    kv: str = AUTO
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: bool = False
    eager: bool = False
    used_bytes: int = 0
    asked_fraction: float | None = None
    asked_length: int | None = None
    latent: bool = False
    encodes: bool = False
    graphs_of_prefills: bool = True
    images: tuple[int, int] | None = None
    prefixes: bool = True
    nvidia: bool = True
    aiter: bool = False
    draft: str = ""
    draft_tokens: int = 0
    attn_dp: int = 1
    pool: tuple[tuple[str, str], ...] = ()

    @property
    def attn_tp(self) -> int:
        """Return the ranks that split the attention of a request."""
        return self.tp // self.attn_dp

    @property
    def copies(self) -> int:
        """Return how many pools hold requests of their own."""
        return self.dp * self.attn_dp

    def setting(self, name: str, default: float) -> float:
        """Return the number of a flag of the pool, or its default."""
        return float(dict(self.pool).get(name, default))

    @property
    def state_itemsize(self) -> int:
        """Return the bytes of an element of a layer's state."""
        return STATE_ITEMSIZES[dict(self.pool).get("mamba_ssm_dtype", "float32")]

    @property
    def draft_method(self) -> str:
        """Return the method of speculative decoding, empty without."""
        return draft_method_of(self.draft)

    @property
    def requests(self) -> int | None:
        """Return how many requests run at once in one copy, None if the tokens of the pool decide it."""
        asked = self.running or (DRAFTED_REQUESTS if self.draft else None)
        return asked and max(1, asked // self.attn_dp)

    def shown(self) -> dict[str, bool | int | float | str | None]:
        """Return the flags by SGLang's own names, and the longest request by the name that all servers share."""
        return {
            "max_model_len": self.context_length,
            "mem_fraction_static": self.fraction,
            "chunked_prefill_size": self.chunked_prefill_size // self.attn_dp,
            "cuda_graph_max_bs": self.graph_batch,
            "max_running_requests": self.requests and self.requests * self.attn_dp,
            "kv_cache_dtype": self.kv,
            "disable_radix_cache": not self.prefixes,
            "tp_size": self.tp,
            "pp_size": self.pp,
            "dp_size": self.dp,
            "attn_dp_size": self.attn_dp,
            "quantization": self.layout,
            "speculative_algorithm": ALGORITHMS.get(self.draft_method),
            "speculative_num_draft_tokens": self.draft_tokens + 1 if self.draft else None,
            **dict(self.pool),
        }


def _tier(rules: SglangRules, total_mib: float, tp: int) -> tuple[int, int]:
    """Return chunked_prefill_size and cuda_graph_max_bs by the device's memory."""
    if rules.share != "tokens":
        return (2048, 8) if total_mib < 25_000 else (8192, 160)
    small = (35, rules.small_tokens, rules.small_batch, rules.small_batch_ranks)
    for limit, tokens, few, more in ((20, 2048, 8, 8), small, (60, 4096, 32, 160), (160, 8192, 256, 512)):
        if total_mib < limit * 1024:
            return tokens, more if tp >= 4 else few
    return 16_384, 512


def _old_fraction(share: str, flags: SglangFlags, total_mib: float) -> float:
    """Return mem_fraction_static's default before 0.5.3 (server_args.py, 0.4.4, 0.4.6, 0.4.7 and 0.4.9)."""
    ranks = flags.tp * flags.pp if share in ("ranks or 18 GiB", "memory") else flags.tp
    if share == "memory":
        gib = ((35, 2.8, 10), (90, 9.5, 2), (160, 12, 2))
        reserved = next((base + ranks / part for limit, base, part in gib if total_mib < limit * 1024), 32) * 1024
        return round((total_mib - reserved) / total_mib, 3)
    if share == "ranks or 18 GiB" and total_mib > 180_000 and flags.nvidia:
        return 0.79
    if share == "ranks or 18 GiB" and total_mib > 96 * 1024:
        return min(0.88 + 48 * 1024 * 0.12 / total_mib, (total_mib - 18 * 1024) / total_mib)
    if share == "ranks or 13 GiB" and total_mib > 80 * 1024:
        return (total_mib - 13 * 1024) / total_mib
    if share == "ranks or 18 GiB" and total_mib > 80 * 1024:
        return 0.88
    shares = ((16, 0.79), (8, 0.81), (4, 0.85), (2, 0.87), (1, 0.88))
    return next(value for least, value in shares if ranks >= least)


def default_fraction(flags: SglangFlags, total_mib: float) -> float:
    """Return the default of mem_fraction_static for a device of `total_mib` MiB, as nvidia-smi prints it."""
    rules = sglang_rules_of(flags.release)
    if rules.share != "tokens":
        share = _old_fraction(rules.share, flags, total_mib)
        return share if rules.images_always else share * _images_factor(rules, flags)
    reserved = 512 + max(flags.chunked_prefill_size, 2048) * 1.5 + flags.tp * flags.pp / 8 * 1024
    if rules.eager_decode or not flags.eager:
        reserved += flags.graph_batch * 2
    if flags.attn_dp > 1:
        reserved += flags.graph_batch * flags.attn_dp * (4.5 if flags.graph_batch > PADDED_BATCH else 3)
    reserved += _prefill_graphs_mib(rules, flags)
    if total_mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    if flags.draft_method not in ("", NGRAM):
        reserved += rules.draft_model_mib if flags.draft_method == DRAFT_MODEL else rules.draft_mib
    return round((total_mib - reserved) / total_mib, 3) * _images_factor(rules, flags)


def _prefill_graphs_mib(rules: SglangRules, flags: SglangFlags) -> float:
    """Return the MiB reserved for prefill graphs: 8 MiB for each captured size, a fixed amount with MLA."""
    off = flags.eager and not rules.eager_prefill
    if not rules.prefill_graphs or off or not flags.graphs_of_prefills or (flags.pp > 1 and not rules.prefill_stages):
        return 0
    if flags.draft and not rules.draft_prefills:
        return 0
    if flags.latent:
        return LATENT_GRAPHS_MIB if rules.prefill_latent else 0
    tokens = flags.chunked_prefill_size
    if rules.prefill_capped and flags.asked_length is not None:
        tokens = min(tokens, flags.asked_length)
    return 8 * len(piecewise_sizes(tokens))


def _images_factor(rules: SglangRules, flags: SglangFlags) -> float:
    """Return the factor of the share for a model that reads images (adjust_mem_fraction_for_vlm, 0.5.1 to 0.5.23)."""
    if rules.images_share:
        return rules.images_share if flags.encodes else 1.0
    if flags.images is None:
        return 1.0
    layers, hidden = flags.images
    complexity = layers * hidden**2 / (24 * 1024**2)
    return 0.95 * max(0.8, min(1.05, 1.0 - 0.1 * (complexity - 1.0)))


def piecewise_sizes(tokens: int) -> list[int]:
    """Return the token counts of graphs of prefills (server_args.py, _generate_piecewise_cuda_graph_tokens, 0.5.10).

    They are the same in cuda_graph_hook.py, generate_prefill_cuda_graph_batch_sizes, 0.5.23.
    """
    steps = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, tokens + 1, 512))
    return [size for start, end, step in steps for size in range(start, end, step) if size <= tokens]


def resolve_sglang(request: Any, architecture: Architecture, gpu: Gpu) -> SglangFlags:
    """Return every flag of SGLang for a request, with the defaults of its version on its device.

    Raises RequestError for values that this model or version does not take.
    """
    release = release_of("sglang", request.engine_version)
    check_engine("sglang", architecture)
    check_ranks(request, architecture)
    total_mib = (gpu.total_bytes + DRIVER_BYTES) / MIB
    tokens, batch = _tier(sglang_rules_of(release), total_mib, request.tp)
    tokens = request.max_num_batched_tokens or tokens
    encodes = architecture.encoder is not None and architecture.model_type not in WITHOUT_IMAGES
    asked = request.max_model_len if isinstance(request.max_model_len, int) else None
    length = asked or architecture.positions or UNNAMED_LENGTH
    if architecture.positions and length > architecture.positions:
        allowed = f"at most the config's {architecture.positions:,} tokens"
        refusal = Refusal(key="max_model_len", given=f"{length:,}", allowed=allowed, todo="ask for less")
        raise RequestError(refusals=[refusal])
    flags = SglangFlags(
        release=release,
        total_bytes=gpu.total_bytes,
        context_length=length,
        fraction=0.0,
        chunked_prefill_size=tokens,
        graph_batch=batch,
        running=request.max_num_seqs,
        layout=layout_of(request, architecture),
        kv="fp8" if request.kv == AUTO and _has_fp8_by_default(architecture, gpu, release) else request.kv,
        tp=request.tp,
        pp=request.pp,
        dp=request.dp,
        ep=request.ep,
        eager=request.enforce_eager,
        used_bytes=request.used,
        asked_fraction=request.util,
        asked_length=request.max_model_len if isinstance(request.max_model_len, int) else None,
        latent=architecture.latent is not None,
        encodes=encodes,
        graphs_of_prefills=not encodes and gpu.maker in CUDA_MAKERS,
        images=architecture.vision if encodes else None,
        prefixes=request.prefix_caching != "0",
        nvidia=gpu.maker in CUDA_MAKERS,
        aiter=gpu.maker == "AMD" and (architecture.latent is None or architecture.heads // request.tp in AITER_HEADS),
        draft=request.speculative[0] if request.speculative else "",
        draft_tokens=request.speculative[1] if request.speculative else 0,
        attn_dp=request.attn_dp,
        pool=request.pool or (),
    )
    _check_draft(flags, architecture)
    _check_groups(flags)
    return with_fraction(flags)


def _check_draft(flags: SglangFlags, architecture: Architecture) -> None:
    """Raise RequestError for speculative decoding that this version refuses, or whose rules are not known."""
    if not flags.draft:
        return
    since = STATES_DRAFTED_SINCE if any(layer.kind == STATE for layer in architecture.layers) else DRAFTS_SINCE
    given, allowed, todo = "", "", ""
    if flags.release < since:
        given = f"{flags.draft} with {architecture.name} and engine_version={format_release(flags.release)}"
        allowed, todo = f"SGLang {format_release(since)} or later for this model", "ask for a later version"
    elif flags.pp > 1:
        given, allowed, todo = f"{flags.draft} with pp={flags.pp}", "pp=1: SGLang refuses both by default", "ask for more tp"
    if given:
        raise RequestError(refusals=[Refusal(key="speculative", given=given, allowed=allowed, todo=todo)])


def _check_groups(flags: SglangFlags) -> None:
    """Raise RequestError for groups of attention that do not divide the ranks, or whose rules are not known."""
    given, allowed, todo = f"{flags.attn_dp}", "", "ask for attn_dp=1"
    if flags.tp % flags.attn_dp:
        given, allowed = f"{flags.attn_dp} with tp={flags.tp}", "a divisor of tp"
    elif flags.attn_dp > 1 and flags.release < ATTN_DP_SINCE:
        given = f"{flags.attn_dp} with engine_version={format_release(flags.release)}"
        allowed, todo = f"SGLang {format_release(ATTN_DP_SINCE)} or later", "ask for a later version"
    if allowed:
        raise RequestError(refusals=[Refusal(key="attn_dp", given=given, allowed=allowed, todo=todo)])


def with_drafter(architecture: Architecture, flags: SglangFlags, gpu: Gpu, model: Architecture | None) -> Architecture:
    """Return a model with the draft of its speculative decoding; `model` is the draft model if the flags name one.

    Raises RequestError if the model does not take the draft.
    """
    found = with_draft(architecture, _layout_flags(architecture, flags, gpu), model)
    draft = found.draft
    if draft is None:
        return found
    # fc is a plain Linear in qwen3_5_mtp.py and qwen3_next_mtp.py: each rank has all of it
    whole = (draft.hidden, 2 * draft.hidden)
    weights = tuple(replace(one, shape=whole) if one.name == "mtp.fc.weight" else one for one in draft.weights)
    # the draft follows --quantization: server_args.py, speculative_draft_model_quantization, 0.5.14
    rounded = flags.layout == "fp8" and architecture.quantization is None
    return replace(found, draft=replace(draft, weights=weights, quantization="fp8" if rounded else draft.quantization))


def _has_fp8_by_default(architecture: Architecture, gpu: Gpu, release: Release) -> bool:
    """Return True if the cache of sparse attention is in FP8 by default.

    Source: sglang/srt/server_args.py, 0.5.5, and arg_groups/overrides.py, _dsa_kv_cache_dtype_default, 0.5.23.
    """
    sparse = any(layer.index_bytes for layer in architecture.layers)
    return sparse and release >= SPARSE_SINCE and (gpu.capability or HOPPER) >= BLACKWELL


def with_fraction(flags: SglangFlags) -> SglangFlags:
    """Return the flags with the graph sizes and the static share derived from the others, unless the share was requested."""
    total_mib, rules = (flags.total_bytes + DRIVER_BYTES) / MIB, sglang_rules_of(flags.release)
    _, batch = _tier(rules, total_mib, flags.tp)
    flags = replace(flags, graph_batch=min(batch, flags.running or batch) if rules.batch_capped else batch)
    return replace(flags, fraction=flags.asked_fraction or default_fraction(flags, total_mib))


def static_share(flags: SglangFlags) -> float:
    """Return the share of the free memory that the server uses: some models and kernels make the requested one smaller.

    Source: model_runner.py, is_multimodal, 0.4.8; server_args.py, _handle_attention_backend_compatibility, 0.5.17: the buffers of
    AITER grow with the tokens of the pool.
    """
    rules = sglang_rules_of(flags.release)
    images = _images_factor(rules, flags) if rules.images_always else 1.0
    return flags.fraction * images * (rules.aiter_share if flags.aiter and flags.context_length > AITER_TOKENS else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Memory of SGLang on one GPU, in bytes, the tokens of its pool, and the bytes of one token.

    `draft_bytes` are weights of a draft in the static share, `outside_bytes` its weights and cache outside of it. `running` is
    how many requests run at once in one copy.
    """

    free_bytes: int
    static_bytes: int
    weights_bytes: int
    pool_bytes: int
    state_bytes: int
    token_bytes: int
    tokens: int
    running: int
    draft_bytes: int
    outside_bytes: int

    @property
    def is_exhausted(self) -> bool:
        """Return whether a draft does not fit the memory outside of the static share."""
        return self.outside_bytes > self.free_bytes - self.static_bytes


def ranks_bytes(flags: SglangFlags, gpu: Gpu) -> int:
    """Return the bytes of buffers between ranks, which are allocated before the free memory is measured."""
    ranks = flags.tp * flags.pp
    linked = gpu.maker == "AMD" or (gpu.maker == "NVIDIA" and gpu.capability in LINKED)
    return 0 if ranks == 1 else LINKED_BYTES if linked and ranks >= LINKED_RANKS else RANKS_BYTES


def band_of(flags: SglangFlags, gpu: Gpu) -> tuple[int, str]:
    """Return by how many bytes the pool may be smaller or larger than planned, and why."""
    if gpu.unified:
        return UNIFIED_BAND, "up to 4 GiB: the free memory is the host's, of which other programs hold a part"
    if gpu.maker == "AMD" and flags.tp * flags.pp > 1:
        return AMD_RANKS_BAND, "up to 8 GiB: buffers between ranks differ by version and build"
    return BAND, "up to 1 GiB: memory that is in use before the weights are loaded differs by driver and build"


def plan_pool(architecture: Architecture, flags: SglangFlags, gpu: Gpu, change: int = 0) -> Pool:
    """Return the pool of a server: free memory before loading × the static share, less the weights (profile_max_num_token)."""
    context = max(gpu.context_bytes, gpu.total_bytes // HOST_PART) if gpu.unified else gpu.context_bytes
    free = flags.total_bytes - flags.used_bytes - context - ranks_bytes(flags, gpu)
    static = round(free * static_share(flags))
    layout, rules = _layout_flags(architecture, flags, gpu), sglang_rules_of(flags.release)
    weights = _weights_bytes(architecture, layout, flags)
    draft = unshared_bytes(architecture, layout) if rules.draft_in_share else 0
    images = IMAGES_BYTES if flags.encodes and flags.release >= IMAGES_SINCE else 0
    rest = static - weights - draft - rules.loaded_bytes - images + change
    itemsize = 1 if flags.kv == "fp8" else 2
    layers = architecture.layers[: len(architecture.layers) - len(architecture.lent)] + architecture.lent
    layers = layers[: -(-len(layers) // flags.pp)]
    paged = gpu.maker in CUDA_MAKERS and (gpu.capability or HOPPER)[0] == BLACKWELL[0]
    windows = () if paged and architecture.model_type.startswith(rules.paged_windows) else layers
    windowed = [number for number, layer in enumerate(windows) if _has_window(number, layer, architecture, flags)]
    bytes_of = [token_bytes(one, flags.attn_tp, itemsize) for one in layers]
    slides = sum(bytes_of[number] for number in windowed)
    full = sum(bytes_of) - slides
    more = _draft_token_bytes(architecture, flags, bytes_of, windowed)
    full, slides = full + more[0], slides + more[1]
    token = round(full + slides * flags.setting("swa_full_tokens_ratio", SLIDING_RATIO)) if full else slides
    served = replace(architecture, state_itemsize=flags.state_itemsize)
    state = sum(state_bytes(one, served, flags.attn_tp) for one in layers if one.kind == STATE)
    pool, most = _without_states(rest, state, flags, architecture) if state and token else (rest, RUNNING[1])
    tokens = max(0, pool) // token if token else 0
    bound = int(flags.setting("max_total_tokens", tokens))
    if full and slides and not rules.bounds_full:
        bound = bound * (full + slides) // token  # of tokens that all layers keep, before windows get a pool of their own
    if bound < tokens:
        tokens, pool = bound, bound * token
    tokens -= tokens % int(flags.setting("page_size", 1))
    outside = 0
    if architecture.draft is not None:
        if rules.draft_headroom and tokens:
            tokens += (flags.requests or 0) * (2 * flags.draft_tokens + 1) + 100
        own = sum(token_bytes(one, flags.attn_tp, itemsize) for one in architecture.draft.layers)
        outside = (0 if rules.draft_in_share else draft_bytes(architecture, layout)) + tokens * max(0, own - sum(more))
    return Pool(
        free_bytes=free,
        static_bytes=static,
        weights_bytes=weights,
        pool_bytes=pool,
        state_bytes=state,
        token_bytes=token,
        tokens=tokens,
        running=min(most, flags.requests or _running(tokens, flags.context_length)),
        draft_bytes=draft,
        outside_bytes=outside,
    )


def _weights_bytes(architecture: Architecture, layout: Flags, flags: SglangFlags) -> int:
    """Return the bytes of the weights of one rank; with groups of attention, a group has all of attention's.

    Source: models/deepseek_v2.py, qwen3_moe.py and others, attn_tp_size, and layers/vocab_parallel_embedding.py,
    use_attn_tp_group, 0.5.3 to 0.5.23.
    """
    if flags.attn_dp == 1:
        return weights_bytes(architecture, layout)
    def part(attends: bool) -> Architecture:
        weights, idle = (
            tuple(one for one in all_of if (ATTENDS.search(one.name) is not None and not ENCODER.search(one.name)) == attends)
            for all_of in (architecture.weights, architecture.idle_weights)
        )
        rows, buffers = ((), ()) if attends else (architecture.rotary_rows, architecture.step_buffers)
        return replace(architecture, weights=weights, idle_weights=idle, rotary_rows=rows, step_buffers=buffers)

    grouped = replace(layout, tp=flags.attn_tp)
    return allocated([*tensors(part(True), grouped), *tensors(part(False), layout)])


def _draft_token_bytes(
    architecture: Architecture, flags: SglangFlags, bytes_of: list[int], windowed: list[int]
) -> tuple[int, int]:
    """Return the bytes of a token that layers of a draft add: to those that keep all tokens, and to those with a window.

    A layer of a draft counts as one of the model. Layers for multi-token prediction of Qwen add none: their config does not name
    num_nextn_predict_layers. Source: pool_configurator.py, DefaultPoolConfigurator and HybridSWAPoolConfigurator, 0.5.14 to
    0.5.23, and model_runner_components/spec_aux_hidden_state.py.
    """
    draft, rules = architecture.draft, sglang_rules_of(flags.release)
    if draft is None or not rules.draft_in_share or (flags.draft == MTP and architecture.model_type in JOINED):
        return 0, 0
    count, kept = len(draft.layers), [size for number, size in enumerate(bytes_of) if size and number not in windowed]
    if not windowed:
        return int(sum(kept) * count / len(kept)) if kept else 0, 0
    if rules.draft_windows == "none":
        return 0, 0
    slides = 0
    if rules.draft_windows == "own":
        slides = sum(_has_window(number, layer, draft, flags) for number, layer in enumerate(draft.layers))
    return (count - slides) * (kept[0] if kept else 0), slides * bytes_of[windowed[0]]


def _running(tokens: int, length: int) -> int:
    """Return max_running_requests by default (kv_cache_configurator.py, resolve_max_num_reqs, 0.5.23; the same in 0.4.4)."""
    least, most = RUNNING
    return min(max(int(tokens / length * 512), least), most)


def _without_states(rest: int, state: int, flags: SglangFlags, architecture: Architecture) -> tuple[int, int]:
    """Return the bytes that are left for tokens in a model with states of `state` bytes, and how many requests these allow.

    With speculative decoding, running requests keep a state for each token that is verified. Source: kv_cache_configurator.py,
    _handle_max_mamba_cache and _calculate_mamba_ratio, 0.5.23; model_runner.py, 0.5.2 to 0.5.6.
    """
    rules = sglang_rules_of(flags.release)
    kind, verified, padded = architecture.model_type, flags.draft_tokens + 1 if flags.draft else 0, rules.padded_states
    cached = flags.prefixes and not kind.startswith(rules.uncached_states)
    each = (rules.states_of_request + BUFFERED * kind.startswith(rules.buffered_states)) if cached else 1
    slots = int(flags.setting("max_mamba_cache_size", 0 if cached else flags.requests or rules.state_limit))
    if not slots:
        ratio = flags.setting("mamba_full_memory_ratio", STATE_RATIO)
        budget = rest * ratio / (1 + ratio) - padded * state * (1 + verified)
        slots = int(budget // (state * (1 + verified / each)))
    if slots <= 0:  # "Not enough GPU memory for hybrid (mamba/linear-attention) state cache"
        return min(rest, 0), 0
    running = min(flags.requests or 0, slots // each)
    return rest - state * (slots + padded + (running + padded) * verified), slots // each


def _has_window(number: int, layer: Layer, architecture: Architecture, flags: SglangFlags) -> bool:
    """Return True if a layer has its keys and values in the pool of windows (get_hybrid_layer_ids in model_config.py, 0.5.23)."""
    if not architecture.model_type.startswith(sglang_rules_of(flags.release).windowed):
        return False
    return layer.kind == SLIDING or (architecture.model_type.startswith("llama4") and (number + 1) % 4 != 0)


def _layout_flags(architecture: Architecture, flags: SglangFlags, gpu: Gpu) -> Flags:
    """Return flags of vLLM with the same layout of weights: SGLang's layers are derived from vLLM's."""
    return Flags(
        release=(UNSHARED if sglang_rules_of(flags.release).draft_in_share else SHARED) if flags.draft else (0, 12, 0),
        total_bytes=flags.total_bytes,
        processors=1,
        util=1.0,
        max_model_len=flags.context_length,
        max_num_seqs=1,
        max_num_batched_tokens=1,
        layout=flags.layout,
        tp=flags.tp,
        pp=flags.pp,
        ep=flags.ep,
        marlin=flags.layout == "mxfp4" and (gpu.capability or HOPPER) < HOPPER,
        vocabulary=architecture.vocabulary,
        draft=flags.draft,
        draft_tokens=flags.draft_tokens,
        copies_latent=True,  # models/deepseek_v2.py, post_load_weights, 0.4.4: w_kc and w_vc are contiguous
    )


def answer_sglang(
    architecture: Architecture,
    flags: SglangFlags,
    gpu: Gpu,
    *,
    model: str,
    want: tuple[int, int] | None,
    auto: bool,
    with_levers: bool = True,
) -> Served:
    """Return the estimate of an SGLang server on one GPU; with `auto`, use the longest request that fits."""
    gpu = gpu_with(gpu, flags, replace(flags, tp=1, pp=1))  # without NCCL's memory, which `ranks_bytes` has
    band, why = band_of(flags, gpu)
    pool, low, high = (plan_pool(architecture, flags, gpu, change) for change in (0, -band, band))
    if auto and low.tokens:
        flags = replace(flags, context_length=min(flags.context_length, low.tokens))

    def outcome(other: SglangFlags) -> Outcome:
        other = with_fraction(other)
        found, least = (plan_pool(architecture, other, gpu, change) for change in (0, -band_of(other, gpu)[0]))
        starts = _starts(found, least, found)
        held = _wanted(found, least, found, other, want) if want is not None else None
        return Outcome(
            starts=starts,
            fits=both(starts, held),
            kv_cache_bytes=found.pool_bytes,
            requests_at_once=_at_once(found, other),
        )

    starts = _starts(pool, low, high)
    at_once = [round(_at_once(one, flags), 2) for one in (pool, low, high)]
    return Served(
        engine="sglang",
        engine_version=format_release(flags.release),
        flags=flags.shown(),
        gpus=flags.tp * flags.pp * flags.dp,
        budget_bytes=pool.static_bytes,
        weights_bytes=pool.weights_bytes,
        draft_bytes=pool.draft_bytes,
        profile_peak_bytes=0,
        forward_bytes=0,
        sampler_bytes=0,
        encoder_bytes=0,
        compiling_bytes=0,
        outside_torch_bytes=sglang_rules_of(flags.release).loaded_bytes,
        graphs_bytes=0,
        graphs_in_budget=False,
        kv_cache_bytes=Difference(pool.pool_bytes),
        kv_cache_low_bytes=Difference(low.pool_bytes),
        kv_cache_high_bytes=Difference(high.pool_bytes),
        blocks=pool.tokens,
        block_tokens=1,
        kv_tokens=pool.tokens,
        kv_tokens_low=low.tokens,
        kv_tokens_high=high.tokens,
        requests_at_once=at_once[0],
        requests_at_once_low=at_once[1],
        requests_at_once_high=at_once[2],
        longest=min(pool.tokens, architecture.positions or pool.tokens),
        starts=starts,
        command=sglang_command(model, flags),
        message="" if starts is True else _message(pool, flags),
        want=_wanted(pool, low, high, flags, want) if want is not None else None,
        levers=find_levers([*_changes(architecture, flags, want)] if with_levers else [], flags, outcome),
        contexts=tuple(_contexts(pool, flags, want)),
        reasons=(why, *_reasons(pool)),
    )


def _at_once(pool: Pool, flags: SglangFlags) -> float:
    """Return how many requests of the longest length run at once on all copies."""
    return min(pool.tokens / flags.context_length, pool.running) * flags.copies


def _starts(pool: Pool, low: Pool, high: Pool) -> Starts:
    """Return whether there is room for a token: SGLang does not ask for one request of the longest length.

    A draft outside of the static share has to fit the rest of the memory. A model with states needs those of one request
    (managers/tp_worker.py, "max_running_request is zero", 0.4.4 to 0.5.23).
    """
    if low.is_exhausted or not high.running:
        return False
    if not low.running and pool.tokens:
        return "uncertain"
    if high.is_exhausted and pool.tokens:
        return "uncertain"
    return True if low.tokens > 0 else "uncertain" if high.tokens > 0 and pool.pool_bytes > 0 else False


def _reasons(pool: Pool) -> Iterator[str]:
    """Yield which memory of a draft is outside of the static share."""
    if pool.outside_bytes:
        rest = format_bytes(pool.free_bytes - pool.static_bytes)
        yield f"the draft takes {format_bytes(pool.outside_bytes)} of the {rest} outside of the static share"


def _message(pool: Pool, flags: SglangFlags) -> str:
    """Return SGLang's own error.

    Source: model_runner.py, init_memory_pool, 0.5.3; model_runner_kv_cache_mixin.py, _profile_available_bytes, 0.5.14.
    """
    if pool.is_exhausted:
        return "torch.OutOfMemoryError: CUDA out of memory"
    if pool.tokens and not pool.running and flags.release >= (0, 5, 14):
        return (
            "Hybrid (mamba/linear-attention) state cache is too small to serve any requests. Try: (1) reduce "
            "--max-running-requests, (2) increase --mem-fraction-static, or (3) use GPUs with more memory."
        )
    if pool.tokens:
        return "" if pool.running else "max_running_request is zero"
    if flags.release >= (0, 5, 14) and pool.pool_bytes <= 0:
        loaded = sglang_rules_of(flags.release).loaded_bytes
        least = (pool.weights_bytes + pool.draft_bytes + loaded) / pool.free_bytes
        return (
            f"Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static={flags.fraction:g}. Raise "
            f"--mem-fraction-static above {ceil(least * 1000) / 1000:.3f} (minimum viable = 1 - available/pre = {least:.4f})."
        )
    return f"Not enough memory. Please try to increase --mem-fraction-static. Current value: mem_fraction_static={flags.fraction}"


def _wanted(pool: Pool, low: Pool, high: Pool, flags: SglangFlags, want: tuple[int, int]) -> Want:
    requests, tokens = want
    each = -(-requests // flags.copies)
    needed = each * tokens
    allowed = tokens <= flags.context_length and each <= pool.running
    fits: Starts = allowed and needed <= low.tokens
    if not fits and allowed and needed <= high.tokens:
        fits = "uncertain"
    missing = max(0, needed * pool.token_bytes - max(0, pool.pool_bytes))
    return Want(requests=requests, tokens=tokens, fits=fits, missing_bytes=missing)


def _contexts(pool: Pool, flags: SglangFlags, want: tuple[int, int] | None) -> Iterator[ContextRow]:
    for context in contexts_of(CONTEXTS, flags.context_length, want):
        yield ContextRow(context=context, requests=min(pool.tokens // context, pool.running) * flags.copies)


def _changes(architecture: Architecture, flags: SglangFlags, want: tuple[int, int] | None) -> Iterator[Change]:
    requests, tokens = want or (0, 0)
    here = -(-requests // flags.copies)
    if flags.requests is not None and flags.requests < here:
        yield Change(
            flag=f"--max-running-requests {here * flags.attn_dp}",
            query=f"max_num_seqs={here * flags.attn_dp}",
            fields={"running": here * flags.attn_dp},
            note=f"at most {here * flags.attn_dp} requests run at once",
        )
    if here * tokens > (bound := int(flags.setting("max_total_tokens", here * tokens))) > 0:
        pool = dict(flags.pool) | {"max_total_tokens": str(here * tokens)}
        yield Change(
            flag=f"--max-total-tokens {here * tokens}",
            query="pool=" + ",".join(f"{name}:{value}" for name, value in pool.items()),
            fields={"pool": tuple(pool.items())},
            note=f"the pool is bounded to {bound:,} tokens",
        )
    if flags.context_length < tokens <= architecture.positions:
        yield Change(
            flag=f"--context-length {tokens}",
            query=f"max_model_len={tokens}",
            fields={"context_length": tokens},
            note="longer requests are allowed",
        )
    if flags.chunked_prefill_size > 2048:
        yield Change(
            flag="--chunked-prefill-size 2048",
            query="max_num_batched_tokens=2048",
            fields={"chunked_prefill_size": 2048},
            note="prompts are read in smaller steps",
        )
    if flags.fraction < 0.92:
        yield Change(
            flag="--mem-fraction-static 0.92",
            query="util=0.92",
            fields={"asked_fraction": 0.92},
            note="less memory remains for activations and graphs",
        )
    yield from shared_changes(architecture, flags, "--kv-cache-dtype fp8_e4m3", "--tp")


def sglang_command(model: str, flags: SglangFlags) -> str:
    """Return `python -m sglang.launch_server` with every flag as resolved."""
    words = [
        *("python", "-m", "sglang.launch_server", "--model-path", model),
        *("--context-length", str(flags.context_length)),
        *("--mem-fraction-static", f"{flags.fraction:g}"),
        *("--chunked-prefill-size", str(flags.chunked_prefill_size)),
    ]
    words += ["--disable-cuda-graph"] if flags.eager else ["--cuda-graph-max-bs", str(flags.graph_batch)]
    words += ["--max-running-requests", str(flags.requests * flags.attn_dp)] if flags.requests else []
    for name, value in (("--tp", flags.tp), ("--pp-size", flags.pp), ("--dp", flags.dp)):
        words += [name, str(value)] if value > 1 else []
    if flags.attn_dp > 1:
        named = flags.release >= ATTN_DP_NAMED
        words += ["--attn-dp-size" if named else "--dp", str(flags.attn_dp), *([] if named else ["--enable-dp-attention"])]
    words += ["--kv-cache-dtype", "fp8_e4m3"] if flags.kv == "fp8" else []
    words += [] if flags.prefixes else ["--disable-radix-cache"]
    words += ["--quantization", "fp8"] if flags.layout == "fp8" else []
    for name, setting in flags.pool:
        words += [f"--{name.replace('_', '-')}", setting]
    return shlex.join([*words, *_draft_words(flags)])


def _draft_words(flags: SglangFlags) -> Iterator[str]:
    """Yield the flags of speculative decoding. HEAD stands for a head whose repository the query does not name."""
    if not flags.draft:
        return
    yield from ("--speculative-algorithm", ALGORITHMS[flags.draft_method])
    if flags.draft_method not in (NGRAM, MTP):
        yield from ("--speculative-draft-model-path", repository_of(flags.draft))
    if flags.draft_method != NGRAM:
        yield from ("--speculative-num-steps", str(flags.draft_tokens), "--speculative-eagle-topk", "1")
    yield from ("--speculative-num-draft-tokens", str(flags.draft_tokens + 1))

"""The flags of vLLM as the server resolves them: the requested value, else the version's default for the device."""

from __future__ import annotations

from dataclasses import dataclass

from sizer.base.errors import Refusal, RequestError
from sizer.base.units import GIB
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.heads import PACKED, draft_method_of
from sizer.catalogue.modes import TEXT
from sizer.catalogue.serving import (
    AUTO,
    DRAFT_MODEL,
    EAGLE3,
    ENGINES,
    LORA_RANK,
    LORA_RANKS,
    NGRAM,
    format_release,
)
from sizer.query.request import Request
from sizer.serving.architecture import CHUNKED, COMPRESSED, SLIDING, Architecture
from sizer.serving.groups import BLOCK as COMPRESSED_BLOCK
from sizer.serving.rules import Release, Rules, rules_of

LARGE_BYTES, HUGE_BYTES = 70 * GIB, 160 * GIB  # vllm/engine/arg_utils.py, get_batch_defaults
UNNAMED_LENGTH = 2048  # vllm/config/model.py, _get_and_verify_max_len: of configs that name no length
BLOCK_TOKENS = 16  # vllm/config/cache.py, CacheConfig.block_size
STATE_STEP = 16  # tokens by which an attention block grows until its page has the size of a state; platforms/interface.py
CHECKPOINT_STEP = 64  # vllm/v1/attention/backends/gdn_attn.py, FLASHINFER_GDN_CHECKPOINT_ALIGNMENT
LARGEST_GRAPH, BLACKWELL = 512, 10  # is_device_capability_family(100): compute capability 10.x
LATENT_BLOCK = 64  # vllm/platforms/cuda.py: FlashMLA and CUTLASS MLA need blocks of 64 tokens
HOPPER = (9, 0)
COMPRESSED_SINCE = (0, 20, 0)  # the first release with DeepSeek V4
LATENT_CONTEXT, GROUPED_CONTEXT = (0, 10, 2), (0, 11, 1)  # first releases with decode context parallel of MLA, of other attention


MARLIN_LAYOUTS = ("awq", "gptq")  # vllm/model_executor/layers/quantization/awq_marlin.py and gptq_marlin.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """Every flag of one vLLM server as resolved. Sizes are in bytes, lengths in tokens.

    - `layout`: layout of quantized weights, None for unquantized ones. `experts`: layout of experts if it differs. `marlin`:
      MXFP4 experts are padded for Marlin's kernel.
    - `kv_bytes`: the cache's size if it is given. `processors`: the device's multiprocessors.
    - `prefix_caching`: only affects models with states. `state_blocks`: further states of a request for prefixes. `state_step`:
      tokens by which a block grows until its page holds a state.
    - `largest_graph`: tokens of the largest CUDA graph.
    - `second_runner`: the second of vLLM's two model runners runs.
    - `text_alone`: no prompt of a model that reads images may contain any.
    - `loras`: slots of adapters, 0 without --enable-lora. `lora_rank`: the largest rank of an adapter. `lora_sharded`: ranks
      split both matrices of an adapter.
    - `offload_bytes`: weights that are offloaded to the host.
    - `dcp`: tensor-parallel ranks that share the tokens of a request (decode context parallel).
    - `draft`: method of speculative decoding, the preset of a draft model, or a head by its key or config; empty without.
      `draft_tokens`: tokens that it drafts at once.
    - `copies_latent`: MLA has copies of its matrix for keys and values even if the matrix is not quantized.
    """

    release: Release
    total_bytes: int
    processors: int
    util: float
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    layout: str | None = None
    experts: str | None = None
    kv: str = "auto"
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: bool = False
    eager: bool = False
    offline: bool = False
    sampler: str = "sort"
    marlin: bool = False
    kv_bytes: int | None = None
    used_bytes: int = 0
    outside_bytes: int | None = None
    graphs_bytes: int | None = None
    block: int = BLOCK_TOKENS
    prefix_caching: bool = True
    state_blocks: int = 0
    state_step: int = STATE_STEP
    vocabulary: int = 0
    second_runner: bool = False
    text_alone: bool = False
    loras: int = 0
    lora_rank: int = 16
    lora_sharded: bool = False
    offload_bytes: int = 0
    dcp: int = 1
    draft: str = ""
    draft_tokens: int = 0
    largest_graph: int = LARGEST_GRAPH
    copies_latent: bool = False

    @property
    def draft_method(self) -> str:
        """Return vLLM's name of the method of speculative decoding, empty without."""
        return draft_method_of(self.draft)

    @property
    def keeps_chunks(self) -> bool:
        """Return whether layers that attend within chunks keep only these; drafts of EAGLE and MTP have them keep all tokens.

        Source: vllm/config/vllm.py, need_disable_hybrid_kv_cache_manager, 0.33.
        """
        return self.rules.chunked and self.draft_method in ("", NGRAM, DRAFT_MODEL)

    @property
    def rules(self) -> Rules:
        """The rules of the version."""
        return rules_of(self.release)

    @property
    def expert_layout(self) -> str | None:
        """Return the layout of the matrices of experts."""
        return self.experts or self.layout

    @property
    def experts_on_marlin(self) -> bool:
        """Return whether Marlin's kernel multiplies the matrices of experts."""
        return self.marlin or self.expert_layout in MARLIN_LAYOUTS

    @property
    def graphs_in_budget(self) -> bool:
        """Return whether graphs are estimated before the cache is sized."""
        return self.rules.graphs_in_budget and (self.rules.second_graphs or not self.second_runner)

    @property
    def steps_in_flight(self) -> int:
        """Steps whose tokens a sliding window keeps: one, or the batches in flight in a pipeline (max_concurrent_batches).

        The first model runner schedules one step after the other with ngram (v1_async_sched_incompat, 0.26 to 0.33).
        """
        if self.rules.batches_in_flight == 1:
            return 1
        if self.draft == NGRAM and not self.second_runner:
            return self.pp
        return self.pp + 1 if self.second_runner else max(2, self.pp)

    @property
    def kv_itemsize(self) -> int:
        """Bytes of an element of the cache."""
        return 1 if self.kv == "fp8" else 2

    @property
    def budget_bytes(self) -> int:
        """Bytes of the device that the server may use: math.ceil(total × util), vllm/v1/worker/utils.py, request_memory."""
        thousandths = round(self.util * 10_000)
        return -(-self.total_bytes * thousandths // 10_000)

    @property
    def gpus(self) -> int:
        """Return the number of GPUs that the server runs on."""
        return self.tp * self.pp * self.dp

    def shown(self) -> dict[str, bool | int | float | str | None]:
        """Return the flags, keyed by vLLM's own names."""
        return {
            "gpu_memory_utilization": self.util,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "kv_cache_dtype": self.kv,
            "tensor_parallel_size": self.tp,
            "pipeline_parallel_size": self.pp,
            "data_parallel_size": self.dp,
            "decode_context_parallel_size": self.dcp,
            "enable_expert_parallel": self.ep,
            "enforce_eager": self.eager,
            "kv_cache_memory_bytes": self.kv_bytes,
            "block_size": self.block,
            "quantization": self.layout,
            "enable_prefix_caching": self.prefix_caching,
            "sampler": self.sampler,
            "model_runner": 2 if self.second_runner else 1,
            "max_loras": self.loras,
            "max_lora_rank": self.lora_rank if self.loras else None,
            "fully_sharded_loras": self.lora_sharded,
            "cpu_offload_gb": self.offload_bytes / GIB,
            "speculative_method": self.draft_method if self.draft.startswith(PACKED) else self.draft or None,
            "num_speculative_tokens": self.draft_tokens,
            "usage": "offline" if self.offline else "server",
            "vocabulary": self.vocabulary,
        }


def release_of(engine: str, text: str | None) -> Release:
    """Return the version that a text names; the newest known version if it is None.

    Raises:
        RequestError: The rules of the version are not known, because it is too old or too new.
    """
    row = ENGINES[engine]
    if row.oldest is None or row.newest is None:
        return (0, 0, 0)
    release = row.newest
    if text is not None:
        major, minor, patch = map(int, text.split("."))
        release = major, minor, patch
    if not row.oldest <= release <= row.newest:
        raise RequestError(
            f"engine_version: {row.title}'s rules are not known",
            given=str(text),
            allowed=f"{format_release(row.oldest)} to {format_release(row.newest)}",
            todo="write the version of the server's log, or leave it out for the newest known",
        )
    return release


def layout_of(request: Request, architecture: Architecture) -> str | None:
    """Return the layout of the weights that a request chooses, else the checkpoint's layout."""
    if request.server_weights is not None:
        return request.server_weights
    if request.weights == "checkpoint":
        return architecture.quantization
    return None if request.weights == "full" else request.weights


def resolve_flags(request: Request, architecture: Architecture, gpu: Gpu, processors: int) -> Flags:
    """Return every flag of vLLM for a request, with the defaults of its version on its device.

    Raises RequestError for values that this model or version does not take.

    Source: vllm/engine/arg_utils.py, get_batch_defaults and _set_default_max_num_seqs_and_batched_tokens_args; vLLM 0.33.
    """
    release = release_of("vllm", request.engine_version)
    rules, offline = rules_of(release), request.api == "offline"
    large = gpu.total_bytes >= LARGE_BYTES and "a100" not in gpu.name.lower() and not gpu.unified
    if rules.huge_tokens and gpu.total_bytes >= HUGE_BYTES:
        tokens, seqs = 16_384, 1024
    elif large:
        tokens, seqs = (16_384 if offline else 8192), rules.large_seqs
    else:
        tokens, seqs = (8192 if offline else 2048), 256
    asked = request.max_model_len if isinstance(request.max_model_len, int) else None
    length = asked or architecture.positions or UNNAMED_LENGTH
    _check_length(length, architecture)
    if architecture.is_compressed and release < COMPRESSED_SINCE:
        allowed = f"{format_release(COMPRESSED_SINCE)} and later for a model of type {architecture.model_type}"
        raise _refused("engine_version", format_release(release), allowed, "ask for a later version")
    check_ranks(request, architecture)
    if rules.item_floor and request.inputs != TEXT:
        tokens = max(tokens, architecture.item_tokens)
    if request.max_num_batched_tokens is None:
        tokens = min(tokens, (request.max_num_seqs or seqs) * length)
    tokens = request.max_num_batched_tokens or tokens
    layout = layout_of(request, architecture)
    _check_layout(layout, architecture)
    prefixes = caches_prefixes(rules, architecture) if request.prefix_caching == AUTO else request.prefix_caching == "1"
    draft, drafted = request.speculative or ("", 0)
    checkpoints = _checkpoints(rules, architecture, gpu) if prefixes else ""
    second = runs_second(rules, architecture) and _drafts_second(rules, draft, request.pp)
    path = rules.second_sampler if second else rules.sampler
    loras = 0 if request.max_loras is None and request.max_lora_rank is None else request.max_loras or 1
    _check_lora(request, rules)
    _check_context(request, architecture, release)
    # vllm/model_executor/layers/fused_moe/oracle/mxfp4.py, 0.19 and 0.33: experts with adapters run on Marlin's kernel
    marlin = layout == "mxfp4" and (release < (0, 12, 0) or (gpu.capability or HOPPER) < HOPPER or bool(loras))
    return Flags(
        release=release,
        total_bytes=gpu.total_bytes,
        processors=processors,
        util=rules.util if request.util is None else request.util,
        max_model_len=length,
        max_num_seqs=request.max_num_seqs or min(seqs, tokens),
        max_num_batched_tokens=tokens,
        layout=layout,
        experts=architecture.expert_quantization if layout == architecture.quantization else None,
        kv="fp8" if architecture.is_compressed else request.kv,  # models/deepseek_v4/attention.py: no other dtype
        tp=request.tp,
        pp=request.pp,
        dp=request.dp,
        ep=request.ep,
        eager=request.enforce_eager,
        offline=offline,
        sampler=path if request.sampler == "auto" else request.sampler,
        second_runner=second,
        text_alone=request.inputs == TEXT and architecture.vision is not None,
        marlin=marlin,
        loras=loras,
        lora_rank=request.max_lora_rank or LORA_RANK,
        lora_sharded=request.fully_sharded_loras,
        offload_bytes=int(request.cpu_offload_gb * GIB),
        dcp=request.dcp,
        draft=draft,
        draft_tokens=drafted,
        largest_graph=rules.largest_graph if (gpu.capability or (0, 0))[0] == BLACKWELL else LARGEST_GRAPH,
        prefix_caching=prefixes,
        state_blocks=1 if checkpoints else 0,
        state_step=CHECKPOINT_STEP if checkpoints == "gdn" else STATE_STEP,
        kv_bytes=request.kv_bytes,
        used_bytes=request.used,
        outside_bytes=request.outside,
        graphs_bytes=request.graphs,
        vocabulary=architecture.vocabulary,
        block=COMPRESSED_BLOCK if architecture.is_compressed else LATENT_BLOCK if architecture.latent else BLOCK_TOKENS,
    )


def caches_prefixes(rules: Rules, architecture: Architecture) -> bool:
    """Return whether vLLM caches prefixes of a model by default: not of states alone, of attention and states since 0.26."""
    return not architecture.has_states or (rules.state_prefixes and any(layer.elements for layer in architecture.layers))


def _checkpoints(rules: Rules, architecture: Architecture, gpu: Gpu) -> str:
    """Return the kind of layers whose prefills write a state for prefixes: "gdn", "mamba2", or empty for none.

    Source: qwen_gdn_linear_attn.py, _resolve_gdn_prefill_backend, 0.33: FlashInfer's kernel runs on Hopper and Blackwell.
    """
    kinds = rules.state_checkpoints.split(", ")
    logs = [weight for weight in architecture.weights if weight.name.endswith("A_log") and len(weight.shape) == 1]
    gated = [weight for weight in logs if ".linear_attn." in weight.name]
    if gated and "gdn" in kinds and gpu.maker == "NVIDIA" and (gpu.capability or (0, 0)) >= HOPPER:
        return "gdn"
    return "mamba2" if len(logs) > len(gated) and "mamba2" in kinds else ""


def runs_second(rules: Rules, architecture: Architecture) -> bool:
    """Return whether vLLM's second model runner runs a model by default.

    Source: vllm/config/vllm.py, use_v2_model_runner; vLLM 0.22 to 0.33.
    """
    models = rules.second_runner
    if models == "dense":
        moe = bool(architecture.experts) and architecture.model_type not in ("deepseek_v2", "qwen2_moe", "granitemoe")
        return not moe and not architecture.has_states
    return models == "all" or architecture.model_type in models.split(", ")


def _drafts_second(rules: Rules, draft: str, pp: int) -> bool:
    """Return whether the second model runner has a method of speculative decoding; the first one runs otherwise."""
    method = draft_method_of(draft)
    return not draft or (method in rules.second_drafts.split(", ") and (method != EAGLE3 or pp == 1 or rules.second_stages))


def _check_length(length: int, architecture: Architecture) -> None:
    if architecture.positions and length > architecture.positions:
        raise _refused("max_model_len", f"{length:,}", f"at most the config's {architecture.positions:,}", "ask for less")


def check_engine(engine: str, architecture: Architecture) -> None:
    """Raise RequestError for a model with a cache that only vLLM's rules describe."""
    if architecture.is_compressed:
        raise _refused("engine", f"{engine} with a model of type {architecture.model_type}", "vllm", "ask for engine=vllm")


def check_ranks(request: Request, architecture: Architecture) -> None:
    """Raise RequestError if ranks do not divide the heads or the layers."""
    if architecture.heads % request.tp:
        fitting = max(n for n in range(1, request.tp) if architecture.heads % n == 0)
        given, allowed = str(request.tp), f"a divisor of the model's {architecture.heads} attention heads"
        raise _refused("tp", given, allowed, f"ask for tp={fitting}")
    if request.pp > len(architecture.layers):
        raise _refused("pp", str(request.pp), f"at most the model's {len(architecture.layers)} layers", "ask for less")
    if request.ep and not architecture.experts:
        raise _refused("ep", "1", "0 for a model without experts", "remove it")


def _check_layout(layout: str | None, architecture: Architecture) -> None:
    if layout == "mxfp4" and not architecture.experts:
        raise _refused("weights", "mxfp4", "a model with experts: only their matrices are MXFP4", "ask for weights=fp8 or awq")


def _check_context(request: Request, architecture: Architecture, release: Release) -> None:
    """Raise RequestError for a degree of decode context parallel that a model or a version does not take.

    Source: vllm/config/model.py, verify_with_parallel_config, and SlidingWindowSpec in vllm/v1/kv_cache_interface.py.
    """
    degree, given = request.dcp, f"{request.dcp} with tp={request.tp}"
    if degree == 1:
        return
    since = LATENT_CONTEXT if architecture.latent else GROUPED_CONTEXT
    if release < since:
        allowed = f"1 before {format_release(since)}, the first release that has it for this attention"
        raise _refused("dcp", f"{degree} with engine_version={format_release(release)}", allowed, "ask for a later version")
    if any(layer.kind in (SLIDING, CHUNKED, COMPRESSED) for layer in architecture.layers):
        raise _refused("dcp", given, "1 for a model with sliding windows or chunks", "remove it")
    most = request.tp if architecture.latent else request.tp // architecture.kv_heads
    if request.tp % degree or degree > most:
        replicas = "tp" if architecture.latent else f"tp divided by the model's {architecture.kv_heads} key heads"
        todo = f"ask for dcp={most}" if most > 1 else "ask for a larger tp"
        raise _refused("dcp", given, f"a divisor of tp, at most {replicas}", todo)


def _check_lora(request: Request, rules: Rules) -> None:
    """Raise RequestError for a rank that this version, or a split among ranks, does not take."""
    rank = request.max_lora_rank or LORA_RANK
    if rank < rules.lora_least_rank:
        allowed = ", ".join(str(one) for one in LORA_RANKS if one >= rules.lora_least_rank)
        raise _refused("max_lora_rank", str(rank), f"{allowed} in this version", "ask for one of these")
    if request.fully_sharded_loras and rank % request.tp:
        allowed = f"a max_lora_rank that tp={request.tp} divides, with fully_sharded_loras=1"
        raise _refused("max_lora_rank", str(rank), allowed, "ask for another rank, or for fully_sharded_loras=0")
    if request.fully_sharded_loras and request.ep:
        raise _refused("fully_sharded_loras", "1 with ep=1", "0 with expert parallel", "remove it")


def _refused(key: str, given: str, allowed: str, todo: str) -> RequestError:
    return RequestError(refusals=[Refusal(key=key, given=given, allowed=allowed, todo=todo)])

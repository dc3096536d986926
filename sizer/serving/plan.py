"""The plan of vLLM for one GPU: how the budget is used, the capacity of the cache, and whether the server starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from sizer.base.units import GIB, format_bytes
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.serving import EAGLE, EAGLE3
from sizer.report.served import Starts, Want
from sizer.serving.architecture import Architecture
from sizer.serving.cache import CachePlan, blocks_of_request, longest_request, plan_cache
from sizer.serving.drafts import buffer_bytes, draft_bytes, drafting_bytes
from sizer.serving.flags import Flags
from sizer.serving.graphs import graph_bytes
from sizer.serving.layout import VOCABULARY_PADDING, offloaded_bytes, weights_bytes
from sizer.serving.lora import lora_bytes

MM_LIMIT = 999  # vllm/config/multimodal.py, limit_per_prompt's default
FIRST_IMAGES = (0, 11, 1)
DENSE_BAND, OTHER_BAND, VISION_BAND, COMPRESSED_BAND = 15 * GIB // 100, GIB, 2 * GIB, 8 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Peak bytes of the profile run: the sampler, the forward pass of one layer, and the image encoder.

    Each peak is relative to the bytes allocated before. `encoded_bytes` are the encoder's outputs, which stay allocated while
    the decoder runs. `draft_bytes` are those of one layer of a draft.
    """

    sampler_bytes: int
    forward_bytes: int
    draft_bytes: int = 0
    encoder_bytes: int = 0
    encoded_bytes: int = 0


Profiler = Callable[[Flags], Profile]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Memory plan of vLLM on one GPU, in bytes.

    `band_bytes` is how far the cache may be off in either direction, `reasons` why. `compiling_bytes` are part of the peak of a
    start that finds no compiled code in a cache.
    """

    flags: Flags
    budget_bytes: int
    free_bytes: int
    weights_bytes: int
    lora_bytes: int
    draft_bytes: int
    drafting_bytes: int
    offloaded_bytes: int
    forward_bytes: int
    sampler_bytes: int
    encoder_bytes: int
    compiling_bytes: int
    profile_peak_bytes: int
    outside_torch_bytes: int
    graphs_bytes: int
    kv_cache_bytes: int
    band_bytes: int
    cache: CachePlan
    low: CachePlan
    high: CachePlan
    starts: Starts
    reasons: tuple[str, ...]

    @property
    def is_free(self) -> bool:
        """Return whether the device has the budget free when the server starts."""
        return self.flags.kv_bytes is not None or self.free_bytes >= self.budget_bytes


def make_plan(architecture: Architecture, flags: Flags, profiler: Profiler, gpu: Gpu) -> Plan:
    """Return the plan of the stage that has the fewest blocks.

    Args:
        architecture: The model.
        flags: The server's flags.
        profiler: Returns the bytes of the profile run.
        gpu: The device.

    Source: vllm/v1/worker/gpu_worker.py, determine_available_memory, and worker/utils.py, request_memory; vLLM 0.33.
    """
    profile = profiler(flags)
    stages = [_plan_stage(architecture, flags, profile, gpu, stage) for stage in range(flags.pp)]
    with_cache = [plan for plan in stages if plan.cache.block_bytes]  # the last layers of Gemma 4 reuse the cache of earlier layers
    return min(with_cache or stages, key=lambda plan: plan.cache.blocks)


def _plan_stage(architecture: Architecture, flags: Flags, profile: Profile, gpu: Gpu, stage: int) -> Plan:
    rules, budget = flags.rules, flags.budget_bytes
    offloaded = offloaded_bytes(architecture, flags, stage)
    weights, adapters = weights_bytes(architecture, flags, stage) - offloaded, lora_bytes(architecture, flags, stage)
    # While the sampler runs, the hidden states of the whole step and twice those of its requests are allocated.
    hidden = architecture.hidden * 2
    sampling = profile.sampler_bytes + (flags.max_num_batched_tokens + 2 * flags.max_num_seqs) * hidden
    last = stage == flags.pp - 1
    draft = draft_bytes(architecture, flags, stage)
    states, drafting = drafting_bytes(architecture, flags, profile.draft_bytes) if last else (0, 0)
    peak = max(profile.forward_bytes + states, sampling, drafting) if last else profile.forward_bytes
    compiling = compiling_bytes(architecture, flags) if stage == 0 else 0
    benchmarked, peak = max(0, compiling - peak), max(peak, compiling)
    if stage == 0:
        peak = max(peak + profile.encoded_bytes, profile.encoder_bytes)
    outside, graphs = flags.outside_bytes, flags.graphs_bytes
    if outside is None:
        outside = rules.outside_bytes + (rules.outside_ranks_bytes if flags.tp * flags.pp > 1 else 0)
        outside += buffer_bytes(architecture, flags, stage)
    if graphs is None or flags.eager:
        graphs = graph_bytes(architecture, flags)
    available = budget - weights - adapters - draft - peak - outside - (graphs if flags.graphs_in_budget else 0)
    if flags.kv_bytes is not None:
        available = flags.kv_bytes
    band, reasons = _band(architecture, flags)
    if gpu.unified and 0 < band < VISION_BAND:
        band, reasons = VISION_BAND, (*reasons, "up to 2 GiB: the server's host memory is part of unified memory")
    if benchmarked and band and compiling + DENSE_BAND > band:
        band = compiling + DENSE_BAND
        reasons = (*reasons, f"up to {format_bytes(band)}: a first start compiles, a later one reads compiled code from a cache")
    cache, low, high = (plan_cache(architecture, flags, available + change, stage) for change in (0, -band, band))
    free = flags.total_bytes - flags.used_bytes - gpu.context_bytes
    plan = Plan(
        flags=flags,
        budget_bytes=budget,
        free_bytes=free,
        weights_bytes=weights,
        lora_bytes=adapters,
        draft_bytes=draft,
        drafting_bytes=drafting,
        offloaded_bytes=offloaded,
        forward_bytes=profile.forward_bytes,
        sampler_bytes=profile.sampler_bytes if last else 0,
        encoder_bytes=profile.encoder_bytes if stage == 0 else 0,
        compiling_bytes=compiling,
        profile_peak_bytes=peak,
        outside_torch_bytes=outside,
        graphs_bytes=graphs,
        kv_cache_bytes=available,
        band_bytes=band,
        cache=cache,
        low=low,
        high=high,
        starts=False,
        reasons=reasons,
    )
    return replace(plan, starts=_starts(plan, gpu))


def _band(architecture: Architecture, flags: Flags) -> tuple[int, tuple[str, ...]]:
    """Return how far the cache may be off, in bytes, and why."""
    if flags.kv_bytes is not None:
        return 0, ("the size of the cache is given",)
    band, reasons = DENSE_BAND, ["dense model on one card: the logs in docs/serving.md differ by up to 0.15 GiB"]
    others = [
        (
            bool(flags.graphs_in_budget and not flags.eager and flags.graphs_bytes is None),
            "the estimate of CUDA graphs, which is fitted",
        ),
        (bool(architecture.experts), "workspaces of expert kernels, which depend on the kernel"),
        (flags.tp * flags.pp * flags.dp > 1 and flags.outside_bytes is None, "buffers between the ranks, which are fitted"),
        (flags.draft in (EAGLE, EAGLE3), f"the {flags.draft} head, which is taken to have the model's sizes"),
        (architecture.draft is not None, "the draft's buffers and graphs, by their source"),
    ]
    for applies, reason in others:
        if applies:
            band, reasons = OTHER_BAND, [*(reasons if band == OTHER_BAND else []), f"up to 1 GiB: {reason}"]
    if architecture.tower is not None and encodes_images(architecture, flags):
        reasons = [*(reasons if band == OTHER_BAND else []), "up to 1 GiB: the encoder's dummy run, by its source"]
        band = OTHER_BAND
    elif architecture.encoder is not None:
        band, reasons = VISION_BAND, [*reasons, f"up to 2 GiB: the {architecture.encoder} encoder's profile run is not counted"]
    if architecture.is_compressed:
        said = "up to 8 GiB: its streams of hidden states and buffers of sparse attention are not counted; two logs held 7 more"
        band, reasons = COMPRESSED_BAND, [*reasons, said]
    return band, tuple(reasons)


def compiling_bytes(architecture: Architecture, flags: Flags) -> int:
    """Return the bytes that a start without cached compiled code allocates during compilation, 0 without kernel benchmarks.

    The first kernel reads the embedding: its benchmark uses a tensor of that size, and writes the hidden states of a step. In a
    model that reads images or sound, the token embedding is not part of the compiled code.
    Source: vllm/config/compilation.py, benchmark_combo_kernel; torch/_inductor: benchmarks allocate each argument.
    """
    if flags.eager or not flags.rules.benchmarks or architecture.encoder is not None:
        return 0
    rows = -(-architecture.vocabulary // VOCABULARY_PADDING) * VOCABULARY_PADDING
    return (-(-rows // flags.tp) + flags.max_num_batched_tokens) * architecture.hidden * 2


def encodes_images(architecture: Architecture, flags: Flags) -> bool:
    """Return whether the largest item of the profile run is an image: up to 0.11.0 that of Qwen3-VL is a video."""
    return not (architecture.deepstack and flags.release < FIRST_IMAGES)


def encoder_items(architecture: Architecture, flags: Flags) -> int:
    """Return how many of the largest images, or pieces of sound, the profile run encodes at once.

    Source: vllm/multimodal/encoder_budget.py, MultiModalBudget, with limit_mm_per_prompt's default, and models/voxtral.py,
    get_max_audio_tokens: a sound is as long as a request; 0.33.
    """
    tower = architecture.tower
    if tower is None or not encodes_images(architecture, flags):
        return 0
    tokens = flags.max_model_len if tower.sound else tower.tokens
    budget = max(flags.max_num_batched_tokens, tokens)
    in_prompt = max(1, min(MM_LIMIT, flags.max_model_len // tokens))
    pieces = -(-tokens // tower.tokens) if tower.sound else 1
    return pieces * max(1, min(budget // tokens, flags.max_num_seqs * in_prompt))


def _starts(plan: Plan, gpu: Gpu) -> Starts:
    """Return whether the server starts: the budget is free, and one request of the longest length has room."""
    def holds(cache: CachePlan) -> bool:
        return 0 < cache.blocks_per_request <= cache.usable

    if not plan.is_free:
        unsure = plan.free_bytes + gpu.context_bytes - gpu.context_low_bytes >= plan.budget_bytes
        return "uncertain" if unsure and holds(plan.high) else False
    if holds(plan.low):
        return True
    return "uncertain" if holds(plan.high) else False


def longest_of(plan: Plan, architecture: Architecture, limit: int) -> int:
    """Return the longest request in tokens, up to `limit`, that the plan's cache holds."""
    return longest_request(plan.cache, plan.flags, limit, architecture.encoder_tokens)


def wanted(plan: Plan, architecture: Architecture, want: tuple[int, int]) -> Want:
    """Return whether the cache holds the wanted (requests, tokens of each) at once, and the missing bytes.

    Data-parallel copies share the requests.
    """
    requests, tokens = want
    here = -(-requests // plan.flags.dp)
    each = blocks_of_request(plan.cache.groups, plan.flags, tokens, architecture.encoder_tokens)
    needed = here * each
    short, held = needed > plan.cache.usable, (needed + plan.flags.rules.idle_block) * plan.cache.checked_bytes
    missing = max(0, held - max(0, plan.kv_cache_bytes)) if short else 0
    allowed = tokens <= plan.flags.max_model_len and here <= plan.flags.max_num_seqs
    fits: Starts = plan.starts if needed <= plan.low.usable and allowed else False
    if fits is False and allowed and plan.starts is not False and needed <= plan.high.usable:
        fits = "uncertain"
    return Want(requests=requests, tokens=tokens, fits=fits, missing_bytes=missing)


def server_message(plan: Plan, architecture: Architecture) -> str:
    """Return vLLM's own error with the plan's numbers, nothing if the server starts.

    Source: vllm/v1/worker/utils.py, request_memory, and v1/core/kv_cache_planning.py, _check_enough_kv_cache_memory; vLLM 0.33.
    """
    flags = plan.flags
    if plan.starts is True:
        return ""
    if not plan.is_free:
        return (
            f"Free memory on device cuda:0 ({_gib(plan.free_bytes)}/{_gib(flags.total_bytes)} GiB) on startup is less than "
            f"desired GPU memory utilization ({flags.util:g}, {_gib(plan.budget_bytes)} GiB). Decrease GPU memory utilization or "
            "reduce GPU memory used by other processes."
        )
    if (held := plan.weights_bytes + plan.lora_bytes + plan.draft_bytes) > flags.total_bytes:
        return f"CUDA out of memory while the weights are loaded: {format_bytes(held)} on one GPU"
    if plan.kv_cache_bytes <= 0:
        return (
            "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine."
        )
    if plan.cache.usable >= plan.cache.blocks_per_request:
        return ""
    longest = longest_of(plan, architecture, flags.max_model_len)
    available = plan.kv_cache_bytes - plan.cache.block_bytes * flags.rules.idle_block
    estimate = f"Based on the available memory, the estimated maximum model length is {longest}. " if longest else ""
    return (
        f"To serve at least one request with the model's max seq len ({flags.max_model_len}), "
        f"({_gib(plan.cache.needed_bytes)} GiB KV cache is needed, which is larger than the available KV cache memory "
        f"({_gib(available)} GiB). {estimate}Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when "
        "initializing the engine."
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"

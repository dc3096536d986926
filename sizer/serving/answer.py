"""From a plan to the answer: the figures, the server's message, levers, a table of contexts, and the command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from sizer.base.codec import Difference
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.serving import format_release
from sizer.report.served import ContextRow, Served, both
from sizer.serving.architecture import Architecture
from sizer.serving.cache import blocks_of_request
from sizer.serving.command import vllm_command
from sizer.serving.flags import Flags, caches_prefixes
from sizer.serving.levers import Outcome, find_levers, gpu_with, vllm_changes
from sizer.serving.plan import Plan, Profiler, longest_of, make_plan, server_message, wanted

CONTEXTS = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144, 524_288, 1_048_576)


def longest_flags(architecture: Architecture, flags: Flags, profiler: Profiler, gpu: Gpu) -> Flags:
    """Return the flags with max_model_len set to the longest request that fits; the model's own length if none fits.

    The lower end of the cache's range is used, so that the server starts.
    """
    plan = make_plan(architecture, flags, profiler, gpu)
    longest = longest_of(replace(plan, cache=plan.low), architecture, flags.max_model_len)
    return replace(flags, max_model_len=longest) if longest else flags


def answer_vllm(
    architecture: Architecture,
    flags: Flags,
    profiler: Profiler,
    gpu: Gpu,
    *,
    model: str,
    want: tuple[int, int] | None = None,
    with_levers: bool = True,
) -> Served:
    """Return the estimate of a vLLM server on one GPU.

    Args:
        architecture: The model.
        flags: The server's flags.
        profiler: Returns the bytes of the profile run for given flags.
        gpu: The device.
        model: The repository of the model, for the command.
        want: (concurrent requests, tokens of each) to check, or None.
        with_levers: False to skip the suggested changes, each of which needs a plan.
    """

    def planner(other: Flags) -> Plan:
        return make_plan(architecture, other, profiler, gpu_with(gpu, flags, other))

    def outcome(other: Flags) -> Outcome:
        found = planner(other)
        held = wanted(found, architecture, want) if want is not None else None
        return Outcome(
            starts=found.starts,
            fits=both(found.starts, held),
            kv_cache_bytes=found.kv_cache_bytes,
            requests_at_once=found.cache.requests_at_once * other.dp,
        )

    plan = planner(flags)
    copies = flags.dp
    longest = longest_of(replace(plan, cache=plan.low), architecture, flags.max_model_len) if plan.starts is not True else 0
    changes = [*vllm_changes(architecture, flags, plan.free_bytes, want, longest)] if with_levers else []

    def at_once(requests: float) -> float:
        return round(requests * copies, 2)

    return Served(
        engine="vllm",
        engine_version=format_release(flags.release),
        flags=flags.shown(),
        gpus=flags.gpus,
        budget_bytes=plan.budget_bytes,
        weights_bytes=plan.weights_bytes,
        lora_bytes=plan.lora_bytes,
        draft_bytes=plan.draft_bytes,
        drafting_bytes=plan.drafting_bytes,
        offloaded_bytes=plan.offloaded_bytes,
        profile_peak_bytes=plan.profile_peak_bytes,
        forward_bytes=plan.forward_bytes,
        sampler_bytes=plan.sampler_bytes,
        encoder_bytes=plan.encoder_bytes,
        compiling_bytes=plan.compiling_bytes,
        outside_torch_bytes=plan.outside_torch_bytes,
        graphs_bytes=plan.graphs_bytes,
        graphs_in_budget=flags.graphs_in_budget,
        kv_cache_bytes=Difference(plan.kv_cache_bytes),
        kv_cache_low_bytes=Difference(plan.kv_cache_bytes - plan.band_bytes),
        kv_cache_high_bytes=Difference(plan.kv_cache_bytes + plan.band_bytes),
        blocks=plan.cache.blocks,
        block_tokens=plan.cache.block_tokens,
        kv_tokens=plan.cache.kv_tokens,
        kv_tokens_low=plan.low.kv_tokens,
        kv_tokens_high=plan.high.kv_tokens,
        requests_at_once=at_once(plan.cache.requests_at_once),
        requests_at_once_low=at_once(plan.low.requests_at_once),
        requests_at_once_high=at_once(plan.high.requests_at_once),
        longest=longest_of(plan, architecture, max(architecture.positions, flags.max_model_len)),
        starts=plan.starts,
        command=vllm_command(
            model,
            flags,
            quantizes=flags.layout != architecture.quantization,
            caches_prefixes=caches_prefixes(flags.rules, architecture),
        ),
        message=server_message(plan, architecture),
        want=wanted(plan, architecture, want) if want is not None else None,
        levers=find_levers(changes, flags, outcome),
        contexts=tuple(_contexts(plan, architecture, want)),
        reasons=plan.reasons,
    )


def contexts_of(lengths: Sequence[int], longest: int, want: tuple[int, int] | None) -> list[int]:
    """Return the request lengths to list: those given, the longest allowed one, and the wanted one."""
    asked = () if want is None else want[1:]
    return sorted({longest, *(one for one in (*lengths, *asked) if one < longest)})


def _contexts(plan: Plan, architecture: Architecture, want: tuple[int, int] | None) -> Iterator[ContextRow]:
    """Yield the number of concurrent requests that the cache holds, for each context length."""
    flags = plan.flags
    for context in contexts_of(CONTEXTS, flags.max_model_len, want):
        each = blocks_of_request(plan.cache.groups, flags, context, architecture.encoder_tokens)
        held = plan.cache.usable // each * flags.dp if each else 0
        yield ContextRow(context=context, requests=min(held, flags.max_num_seqs * flags.dp))

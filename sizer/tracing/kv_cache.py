"""What the cache of one sequence holds by its length, read from transformers' own cache as it generates a few tokens."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from sizer.architecture.blueprint import Blueprint
from sizer.architecture.generation import check_cache, is_text
from sizer.catalogue.modes import OFFLOADED, QUANTIZED
from sizer.memory.kv_cache import KvSegment
from sizer.tracing.device import Device
from sizer.tracing.loading import Loading
from sizer.tracing.steps import Work, weight_dtype
from sizer.tracing.tokens import TokenTrace, trace_tokens

SHORT_PROMPT, TOKENS_OF_A_LINE = 8, 3  # tokens; the cache's bytes at the last two give a line
SHORT_QUANTIZED = 64  # tokens, which are whole groups whatever a token's keys are


def trace_kv_cache(
    blueprint: Blueprint, module: nn.Module, work: Work, *, device: Device, loading: Loading | None = None
) -> tuple[KvSegment, ...]:
    """What one sequence's cache holds by its length, and has on the host, read from transformers' own dynamic cache: a line for
    what comes before each window that fills, and one beyond the last. Of a quantised cache what a prompt of that length is
    quantised to.

    Empty for models whose prompt is more than text, or read by an encoder. Raises TraceError where PyTorch gives up.
    """
    if loading is None and blueprint.replace_layers is None:
        module.to("meta").to(weight_dtype(work.dtype))
    example = blueprint.example(1, False)
    if module.config.is_encoder_decoder or not is_text(example):
        return ()
    prompt = example.kwargs["input_ids"].shape[1]
    if work.cache == QUANTIZED:
        check_cache(module, work.cache)
        return (_quantized_line(blueprint, module, work, loading, prompt=prompt, device=device),)
    kind = OFFLOADED[0] if work.cache in OFFLOADED else "dynamic"
    plain = replace(work, cache=kind, new=TOKENS_OF_A_LINE + 1)

    def line(length: int) -> tuple[TokenTrace, KvSegment]:
        """The line from a number of tokens on."""
        run = trace_tokens(
            blueprint, module, plain, loading, batch=1, device=device, tokens=TOKENS_OF_A_LINE, after=length - prompt
        )
        before, after = run.cache_bytes[-2:]
        context = length + TOKENS_OF_A_LINE - 1  # the last token is not in the cache yet
        slope = after - before
        there_before, there = run.host_bytes[-2:]
        return run, KvSegment(
            start=0,
            constant_bytes=after - slope * context,
            token_bytes=slope,
            host_constant_bytes=there - (there - there_before) * context,
            host_token_bytes=there - there_before,
        )

    run, first = line(SHORT_PROMPT)
    windows = [window + SHORT_PROMPT for window in run.windows]
    later = [(window, line(window + 2)[1]) for window in windows if window > SHORT_PROMPT + TOKENS_OF_A_LINE]
    return (first, *(replace(segment, start=window) for window, segment in later))


def _quantized_line(
    blueprint: Blueprint, module: nn.Module, work: Work, loading: Loading | None, *, prompt: int, device: Device
) -> KvSegment:
    """The line through two prompts."""
    lengths = SHORT_QUANTIZED, 2 * SHORT_QUANTIZED
    first, second = (
        trace_tokens(
            blueprint, module, replace(work, new=1), loading, batch=1, device=device, tokens=1, after=length - prompt
        ).cache_bytes[-1]
        for length in lengths
    )
    slope = (second - first) // SHORT_QUANTIZED
    return KvSegment(start=0, constant_bytes=first - slope * SHORT_QUANTIZED, token_bytes=slope)

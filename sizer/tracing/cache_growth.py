"""Size of the cache of one sequence by its length, read from transformers' own cache as it generates a few tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from sizer.architecture.blueprint import Blueprint
from sizer.architecture.greedy_generation import check_cache, compress_rates, empty_cache, is_text, window_lengths
from sizer.catalogue.modes import OFFLOADED, QUANTIZED
from sizer.report.kv_cache import KvSegment
from sizer.tracing.depth import Repeated, shortened
from sizer.tracing.device import Device
from sizer.tracing.modules import Loading
from sizer.tracing.steps import Work, weight_dtype
from sizer.tracing.token_trace import TokenTrace, trace_tokens

SHORT_PROMPT, TOKENS_OF_A_LINE = 8, 3  # tokens; the cache's bytes at the last two give a line
_MADE = TOKENS_OF_A_LINE - 1  # the last token is not in the cache yet
SHORT_QUANTIZED = 64  # tokens; a multiple of the group size for any size of keys


def trace_kv_cache(
    blueprint: Blueprint,
    module: nn.Module,
    work: Work,
    *,
    device: Device,
    loading: Loading | None = None,
    repeated: Sequence[tuple[Repeated, ...]] = (),
) -> tuple[KvSegment, ...]:
    """Return the bytes of one sequence's cache by its length, and the bytes on the host, from transformers' own dynamic cache.

    There is a line up to each window that fills, and one beyond the last. For a quantized cache, the bytes are those of a
    quantized prompt of that length. If the cache grows in steps of several tokens, its bytes follow from models with fewer of
    the `repeated` layers. A model with images or sound gets text only. Empty for models with an encoder for the prompt, or
    other prompts than text. Raises TraceError if PyTorch fails.
    """
    if loading is None and blueprint.replace_layers is None:
        module.to("meta").to(weight_dtype(work.dtype))
    example = blueprint.example(1, False)
    if blueprint.text_example is not None:
        blueprint = replace(blueprint, example=blueprint.text_example)
        example = blueprint.example(1, False)
    if module.config.is_encoder_decoder or not is_text(example):
        return ()
    prompt = example.kwargs["input_ids"].shape[1]
    if work.cache == QUANTIZED:
        check_cache(module, work.cache)
        return (_quantized_line(blueprint, module, work, loading, prompt=prompt, device=device),)
    kind = OFFLOADED[0] if work.cache in OFFLOADED else "dynamic"
    plain = replace(work, cache=kind, new=TOKENS_OF_A_LINE + 1)

    def traced(context: int) -> TokenTrace:
        settings = {"batch": 1, "device": device, "tokens": TOKENS_OF_A_LINE, "after": context - _MADE - prompt}
        return trace_tokens(blueprint, module, plain, loading, **settings)

    def held(context: int) -> tuple[TokenTrace, dict[int, tuple[int, int]]]:
        """Return the bytes of the cache, and those on the host, by its length: with `context` tokens and with one less."""
        run = traced(context)
        lengths = context - 1, context
        return run, dict(zip(lengths, zip(run.cache_bytes[-2:], run.host_bytes[-2:], strict=True), strict=True))

    made = empty_cache(module, kind)
    if rates := compress_rates(made):
        starts = [window for window in window_lengths(made) if window > SHORT_PROMPT + TOKENS_OF_A_LINE]

        def last(context: int) -> tuple[int, int]:
            run = traced(context)
            return run.cache_bytes[-1], run.host_bytes[-1]

        return _periodic_lines(_DeepBytes(last, module, repeated), starts, math.lcm(*rates))
    run, first = held(SHORT_PROMPT + _MADE)
    windows = [window + SHORT_PROMPT for window in run.windows]
    starts = [window for window in windows if window > SHORT_PROMPT + TOKENS_OF_A_LINE]
    return (
        _line(0, first),
        *(_line(window, held(window + 2 + _MADE)[1]) for window in starts),
    )


class _DeepBytes:
    """Bytes of a cache by its length, from models with fewer layers: two models, once a third was on their line.

    Args:
        held: Returns the bytes of the cache, and those on the host, with a number of tokens, for the module's current layers.
        module: The model.
        repeated: The lists of its repeated layers, as `find_repeated` returns them.
    """

    def __init__(
        self, held: Callable[[int], tuple[int, int]], module: nn.Module, repeated: Sequence[tuple[Repeated, ...]]
    ) -> None:
        self._held, self._module = held, module
        self._candidates = [one for one, *others in repeated if not others and not one.kinds]
        self._checked = False

    def __call__(self, context: int) -> tuple[int, int]:
        while self._candidates:
            layers = self._candidates[0]
            first, second, *third = (self._at(layers, more, context) for more in range(2 if self._checked else 3))
            grown = [after - before for before, after in zip(first, second, strict=True)]
            if not third or [after - before for before, after in zip(second, third[0], strict=True)] == grown:
                self._checked = True
                sizes = [size + growth * layers.periods for size, growth in zip(first, grown, strict=True)]
                return sizes[0], sizes[1]
            del self._candidates[0]
        return self._held(context)

    def _at(self, layers: Repeated, more: int, context: int) -> tuple[int, int]:
        with shortened(self._module, [layers], [more]):
            return self._held(context)


def _periodic_lines(
    held: Callable[[int], tuple[int, int]], windows: Sequence[int], period: int
) -> tuple[KvSegment, ...]:
    """Return the lines of a cache that grows by the same bytes in each `period` tokens.

    They go through lengths that are a multiple of the period. If fewer than two such lengths are before the first window, the
    first line goes from a short prompt to the window's end.
    """
    found = []
    for start, end in zip((0, *windows), (*windows, None), strict=True):
        first = -(-(start + SHORT_PROMPT + _MADE) // period) * period
        ends = first, first + period
        if end is not None and ends[-1] >= end:
            ends = start + SHORT_PROMPT + _MADE, end - 1
        found.append(_line(start, {context: held(context) for context in ends}))
    return tuple(found)


def _line(start: int, held: Mapping[int, tuple[int, int]]) -> KvSegment:
    """Return the line from `start` tokens on through the bytes of two lengths, in total and on the host."""
    (before, (first, first_there)), (context, (last, last_there)) = held.items()
    slope, slope_there = (last - first) // (context - before), (last_there - first_there) // (context - before)
    return KvSegment(
        start=start,
        constant_bytes=last - slope * context,
        token_bytes=slope,
        host_constant_bytes=last_there - slope_there * context,
        host_token_bytes=slope_there,
    )


def _quantized_line(
    blueprint: Blueprint, module: nn.Module, work: Work, loading: Loading | None, *, prompt: int, device: Device
) -> KvSegment:
    """Return the line through two prompts."""
    lengths = SHORT_QUANTIZED, 2 * SHORT_QUANTIZED
    first, second = (
        trace_tokens(
            blueprint, module, replace(work, new=1), loading, batch=1, device=device, tokens=1, after=length - prompt
        ).cache_bytes[-1]
        for length in lengths
    )
    slope = (second - first) // SHORT_QUANTIZED
    return KvSegment(start=0, constant_bytes=first - slope * SHORT_QUANTIZED, token_bytes=slope)

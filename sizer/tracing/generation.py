"""From a Blueprint to the Tape of a generation: a few tokens are traced, the others follow from them.

The steps of a generation are the same but for sizes that grow by as many bytes each time, the cache's above all. Where layers
keep a window of tokens, that ends when the window is full: there a second generation is traced, whose prompt is nearly as long as
the window, and its steps stand in the tape from there on. A cache that is quantised anew after so many tokens does so at three such
times, and what stands around the third comes again as often as needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch import nn

from sizer.architecture.blueprint import Blueprint
from sizer.architecture.generation import check_cache, compress_rates, empty_cache
from sizer.errors import RequestError, TraceError
from sizer.memory.allocator import replay
from sizer.memory.block_notes import BlockNotes
from sizer.memory.loops import (
    DEPTH,
    NotRepeatedError,
    append_step,
    check_affine,
    check_follows,
    repeated_events,
    written,
)
from sizer.memory.tape import KV_CACHE, Loop, Tape
from sizer.memory.windows import ALIKE as WINDOWS_ALIKE
from sizer.memory.windows import append_windows, kept_blocks
from sizer.tracing.depth import DeepTraces
from sizer.tracing.device import Device
from sizer.tracing.loading import Loading
from sizer.tracing.steps import Work, weight_dtype
from sizer.tracing.tokens import TokenTrace, trace_deep_tokens, trace_tokens

UNUSUAL = 2 + DEPTH  # the first tokens: the prompt makes one, the steps after it release what it has left
ALIKE = 3  # steps that show a line: two growths, which must be the same
AROUND_WINDOW = 6  # steps before and after the one that fills a window
AROUND_QUANTIZED = (
    1,
    2 + ALIKE,
)  # likewise of the step that quantises the cache: what it leaves is released in the two after it
AROUND = 1 + sum(AROUND_QUANTIZED)
PERIODS = (1, 8)  # steps after which the same comes again: attention pads masks to multiples of 8 keys

TRACED_AT_MOST = 256  # tokens, where steps follow no rule
WRITTEN_AT_MOST = 8_000_000  # events of steps that no loop holds


def trace_generation(
    blueprint: Blueprint,
    module: nn.Module,
    work: Work,
    *,
    batch: int,
    device: Device,
    loading: Loading | None = None,
    deep: DeepTraces | None = None,
) -> Tape:
    """The tape (bytes as requested) of a generation at one batch size, by the rules of `device`.

    Its phases are "prefill", which ends with the first token, and "decode". Steps that follow from those that were traced are
    the tape's loops. `deep` traces fewer layers if the cache grows in steps of several tokens: many steps are traced then.
    Raises TraceError where PyTorch gives up, and where steps follow no rule and are too many to be traced.
    """
    check_cache(module, work.cache)
    _check_positions(blueprint, module, work)
    if loading is None and blueprint.replace_layers is None:
        module.to("meta").to(weight_dtype(work.dtype))

    rates = compress_rates(empty_cache(module, work.cache))

    def run(tokens: int, after: int = 0, quantized: int | None = None) -> TokenTrace:
        def trace(count: int) -> TokenTrace:
            told = {"batch": batch, "device": device, "tokens": count, "after": after, "quantized": quantized}
            return trace_tokens(blueprint, module, work, loading, **told)

        return trace(tokens) if deep is None or not rates else trace_deep_tokens(deep, module, device, trace, tokens)

    prompt = blueprint.sequence_length or 1
    whole = _growth_period([(rate, rate - prompt % rate) for rate in rates], work.new)
    refusal = None
    for period in dict.fromkeys(math.lcm(whole, usual) for usual in PERIODS):
        # the first entry that a cache makes releases what the prompt has left
        lead = UNUSUAL if period in PERIODS else UNUSUAL + period
        first = lead + period * ALIKE + (work.new - lead) % period
        if first >= work.new:
            break
        try:
            return _of_one_stream(_extended(run, first, work.new, period))
        except NotRepeatedError as error:
            refusal = refusal or error
    if work.new > TRACED_AT_MOST:
        raise TraceError(
            f"the steps of this generation follow no rule that is known ({refusal})",
            todo=f"ask for at most {TRACED_AT_MOST} new tokens, which are then traced one by one",
        )
    return run(work.new).tape


def trace_noted_generation(
    blueprint: Blueprint,
    module: nn.Module,
    work: Work,
    *,
    batch: int,
    device: Device,
    loading: Loading | None,
    block_notes: BlockNotes,
) -> Tape:
    """The tape of a generation that is traced token by token, with what it does not hold of its blocks in `block_notes`; of its
    first tokens alone where there are many and its peak is in the prompt.

    Raises what `trace_generation` raises, and TraceError where the peak of many tokens is at a later one.
    """
    tokens, told = work.new, {"batch": batch, "device": device}
    if tokens > TRACED_AT_MOST:
        tokens = UNUSUAL
        whole = trace_generation(blueprint, module, work, loading=loading, **told)
        if replay(whole, backend=device.kind).peak_phase != "prefill":
            raise TraceError(
                f"the peak of this generation is among {work.new:,} tokens, which are not traced one by one",
                todo=f"ask for at most {TRACED_AT_MOST} new tokens",
            )
    check_cache(module, work.cache)
    _check_positions(blueprint, module, work)
    if loading is None and blueprint.replace_layers is None:
        module.to("meta").to(weight_dtype(work.dtype))
    return trace_tokens(blueprint, module, work, loading, **told, tokens=tokens, after=0, block_notes=block_notes).tape


def _of_one_stream(tape: Tape) -> Tape:
    """The tape; one of several streams, which has no loops, with every step written out. Raises TraceError for too many."""
    if not (tape.streams and tape.loops):
        return tape
    if (events := repeated_events(tape)) > WRITTEN_AT_MOST:
        raise TraceError(
            f"the steps of this generation are of two streams, and {events:,} events to be written out",
            allowed=f"{WRITTEN_AT_MOST:,}",
            todo="ask for fewer new tokens, or cache=dynamic",
        )
    return written(tape)


def _check_positions(blueprint: Blueprint, module: nn.Module, work: Work) -> None:
    """Raise RequestError where the last token has no place in the model's table of positions."""
    prompt = 1 if module.config.is_encoder_decoder else blueprint.sequence_length or 1
    if blueprint.positions is not None and prompt + work.new - 1 > blueprint.positions:
        raise RequestError(
            f"new: {blueprint.class_name} has a table of positions",
            given=f"{work.new} tokens after a prompt of {prompt}",
            allowed=f"{blueprint.positions} positions",
            todo="ask for fewer new tokens, or a shorter prompt",
        )


def _extended(run: Callable[..., TokenTrace], first: int, new: int, period: int) -> Tape:
    """The tape of `new` tokens from a run over the first ones, and others over the steps in which windows fill.

    Raises NotRepeatedError where steps do not follow from those before.
    """
    traced = run(first)
    if (every := traced.requantized) is not None and every <= AROUND + UNUSUAL:
        raise NotRepeatedError(
            f"the cache is quantised anew after {every} tokens, in the midst of the steps around that"
        )
    windows = traced.windows if every is None else range(every, every * (WINDOWS_ALIKE + 1), every)
    around = (AROUND_WINDOW, AROUND_WINDOW) if every is None else AROUND_QUANTIZED
    (_, done), *others = _plan(first, new, windows, around)
    if period > 1 and (others or done > first):
        raise NotRepeatedError("a window fills among steps that are not all alike")
    if done > first:
        traced = run(done)
    tape, ends = traced.tape, [*traced.ends]
    begins = []
    for begin, end in others:
        tape = _with_loop(tape, ends, begin - 1 - done)
        after = begin - UNUSUAL - 1
        quantized = None if every is None else after // every * every
        traced, done = run(end - after, after=after, quantized=quantized), end
        begins.append(len(tape.order))
        kept = _kept(tape, ends, traced) if every else {}
        for token in range(UNUSUAL, len(traced.ends)):
            bounds = traced.ends[token - DEPTH - 1 : token + 1]
            tape = append_step(tape, traced.tape, bounds, follows=ends[-DEPTH - 1 : -1], kept=kept)
            ends.append(len(tape.order))
            if token == UNUSUAL:
                check_follows(tape, (ends[-2], ends[-1]))
    if every is not None and len(begins) == WINDOWS_ALIKE:
        return _with_windows(tape, ends, begins, new - done, every)
    return _with_loop(tape, ends[::-period][::-1], (new - done) // period)


def _growth_period(rates: Iterable[tuple[int, int]], new: int) -> int:
    """Return the number of tokens in which the cache grows by the same bytes, as far as a generation of `new` tokens goes.

    Args:
        rates: How many tokens make one entry, and how many are left of them after the prompt.
    """
    return math.lcm(*(rate for rate, left in rates if left < new))


def _kept(tape: Tape, ends: Sequence[int], traced: TokenTrace) -> dict[int, int]:
    """What of the cache the tape and a trace that goes on with it have quantised before."""
    begin = traced.ends[UNUSUAL - DEPTH - 1], traced.ends[UNUSUAL - 1]
    mine = ends[-DEPTH - 1], ends[-1]
    before, at = zip(mine, begin, strict=True)
    return kept_blocks(tape, traced.tape, of=KV_CACHE, before=before, at=at)


def _with_windows(tape: Tape, ends: Sequence[int], begins: Sequence[int], left: int, every: int) -> Tape:
    """The tape, whose last steps are those around a time that the cache is quantised anew, with `left` tokens more: the windows
    that begin where `begins` says come again, each of `every` tokens.

    Raises NotRepeatedError where they do not follow from each other, TraceError where they are too many to be written.
    """
    tape = _with_loop(tape, ends, min(left, every - AROUND))
    left -= every - AROUND
    if left <= 0:
        return tape
    held = len(tape.order) - begins[-1]
    count, rest = divmod(left, every)
    if (events := held * (count + 1)) > WRITTEN_AT_MOST:
        raise TraceError(
            f"the cache of this generation is quantised {count + len(begins) + 1} times, each time a few steps are written: "
            f"{events:,} events",
            allowed=f"{WRITTEN_AT_MOST:,}",
            todo="ask for fewer new tokens",
        )
    part = ends[-AROUND - 1 :][min(rest, AROUND)] - begins[-1]
    return append_windows(tape, begins, count, rest=part, rest_count=max(0, rest - AROUND))


def _plan(first: int, new: int, windows: Sequence[int], around: tuple[int, int]) -> list[tuple[int, int]]:
    """The tokens, from the one to the other, whose steps are to be traced: the first ones, and so many before and after each full
    window."""
    before, behind = around
    runs = [(1, first)]
    for window in windows:
        begin, end = window - before, min(new, window + behind)
        if begin >= new or end <= runs[-1][1]:
            continue
        if begin <= runs[-1][1] + UNUSUAL:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((begin, end))
    return runs


def _with_loop(tape: Tape, ends: Sequence[int], count: int) -> Tape:
    """The tape, whose steps end as `ends` says, with its last one once more `count` times.

    Raises NotRepeatedError where that is not like those before it.
    """
    if not count:
        return tape
    loop = Loop(begin=ends[-2], end=ends[-1], count=count)
    check_affine(tape, loop)
    return replace(tape, loops=(*tape.loops, loop))

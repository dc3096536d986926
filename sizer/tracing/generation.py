"""From a Blueprint to the Tape of a generation: a few tokens are traced, the others follow from them.

The steps of a generation are the same except for sizes that grow by equal amounts, mainly the cache's. If layers keep a window
of tokens, the growth ends when the window is full. Then a second generation is traced, with a prompt nearly as long as the
window, and its steps follow in the tape. A cache that is quantized again after a number of tokens is traced around three such
steps, and the steps around the third are repeated as often as needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from sizer.allocator.allocator import replay
from sizer.architecture.blueprint import Blueprint
from sizer.architecture.greedy_generation import check_cache, compress_rates, empty_cache
from sizer.base.errors import RequestError, TraceError
from sizer.tape.loops import ALIKE as WINDOWS_ALIKE
from sizer.tape.loops import (
    DEPTH,
    NotRepeatedError,
    append_steps,
    append_windows,
    check_affine,
    check_follows,
    kept_blocks,
    repeated_events,
    written,
)
from sizer.tape.tape import KV_CACHE, BlockNotes, Loop, Tape
from sizer.tracing.depth import DeepTraces
from sizer.tracing.device import Device
from sizer.tracing.modules import Loading
from sizer.tracing.steps import Work, weight_dtype
from sizer.tracing.token_trace import TokenTrace, trace_deep_tokens, trace_tokens

UNUSUAL = 2 + DEPTH  # the first tokens: the prompt makes one, the steps after it release its remaining tensors
ALIKE = 3  # steps that show a line: two growths, which must be the same
AROUND_WINDOW = 6  # steps before and after a step that fills a window
AROUND_QUANTIZED = (
    1,
    2 + ALIKE,
)  # the same for a step that quantizes the cache: its remaining tensors are released in the two steps after it
AROUND = 1 + sum(AROUND_QUANTIZED)
RELEASED = 3  # steps from an entry of many tokens until the tensors of those tokens are released
PERIODS = (1, 8)  # steps after which the steps repeat: attention pads masks to multiples of 8 keys

TRACED_AT_MOST = 256  # tokens, if steps follow no rule
WRITTEN_AT_MOST = 8_000_000  # events of steps outside of loops


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """Period of a generation's steps, and the exceptional steps.

    Attributes:
        period: Number of steps after which the steps repeat.
        first: Number of steps that are traced from the prompt on.
        every: Distance between exceptional steps; None if they are not regular.
        windows: Exceptional steps that are traced, with the steps around them: `before` and `behind` each.
    """

    period: int = 1
    first: int
    every: int | None = None
    windows: tuple[int, ...] = ()
    before: int = AROUND_WINDOW
    behind: int = AROUND_WINDOW

    @property
    def around(self) -> int:
        """Return the number of steps that are traced around an exceptional step, including it."""
        return self.before + 1 + self.behind

    @property
    def lead(self) -> int:
        """Return the number of first steps of a trace with a longer prompt that are left out, as they depend on the prompt."""
        return UNUSUAL + self.period - 1

    @property
    def depth(self) -> int:
        """Number of steps for which a block may stay alive."""
        return DEPTH + self.period - 1


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
    """Return the tape (bytes as requested) of a generation at one batch size, by the rules of `device`.

    Its phases are "prefill", which ends with the first token, and "decode". Steps that follow from traced steps are the tape's
    loops. If the cache grows in steps of several tokens, many steps are traced, so `deep` traces fewer layers.

    Raises TraceError if PyTorch fails, or if steps follow no rule and are too many to be traced.
    """
    _prepare(blueprint, module, work, loading)
    rates = compress_rates(empty_cache(module, work.cache))

    def run(tokens: int, after: int = 0, quantized: int | None = None) -> TokenTrace:
        def trace(count: int) -> TokenTrace:
            return trace_tokens(
                blueprint,
                module,
                work,
                loading,
                batch=batch,
                device=device,
                tokens=count,
                after=after,
                quantized=quantized,
            )

        return trace(tokens) if deep is None or not rates else trace_deep_tokens(deep, module, device, trace, tokens)

    refusal = None
    for rhythm in _rhythms(rates, blueprint.sequence_length or 1, work.new):
        try:
            return _of_one_stream(_extended(run, work.new, rhythm))
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
    """Return the tape of a generation that is traced token by token, and write further facts about its blocks to `block_notes`.

    With many tokens and a peak in the prompt, only the first tokens are traced.
    Raises what `trace_generation` raises, and TraceError if the peak of many tokens is at a later one.
    """
    tokens = work.new
    if tokens > TRACED_AT_MOST:
        tokens = UNUSUAL
        whole = trace_generation(blueprint, module, work, batch=batch, device=device, loading=loading)
        if replay(whole, backend=device.kind).peak_phase != "prefill":
            raise TraceError(
                f"the peak of this generation is among {work.new:,} tokens, which are not traced one by one",
                todo=f"ask for at most {TRACED_AT_MOST} new tokens",
            )
    _prepare(blueprint, module, work, loading)
    return trace_tokens(
        blueprint,
        module,
        work,
        loading,
        batch=batch,
        device=device,
        tokens=tokens,
        after=0,
        block_notes=block_notes,
    ).tape


def _prepare(blueprint: Blueprint, module: nn.Module, work: Work, loading: Loading | None) -> None:
    """Check the cache and the positions, and move the module to meta in its dtype, unless it is loaded in the trace."""
    check_cache(module, work.cache)
    _check_positions(blueprint, module, work)
    if loading is None and blueprint.replace_layers is None:
        module.to("meta").to(weight_dtype(work.dtype))


def _of_one_stream(tape: Tape) -> Tape:
    """Return the tape; a tape of several streams, which cannot have loops, with every step written out.

    Raises TraceError if there are too many steps.
    """
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
    """Raise RequestError if the model's table of positions is too short for the last token."""
    prompt = 1 if module.config.is_encoder_decoder else blueprint.sequence_length or 1
    if blueprint.positions is not None and prompt + work.new - 1 > blueprint.positions:
        raise RequestError(
            f"new: {blueprint.class_name} has a table of positions",
            given=f"{work.new} tokens after a prompt of {prompt}",
            allowed=f"{blueprint.positions} positions",
            todo="ask for fewer new tokens, or a shorter prompt",
        )


def _rhythms(rates: Sequence[int], prompt: int, new: int) -> Iterator[Rhythm]:
    """Yield the possible rhythms of a generation, the one with the fewest steps to trace first.

    Args:
        rates: Numbers of tokens that layers of the cache combine into one entry.
        prompt: Tokens of the prompt.
        new: Tokens to generate.
    """
    reached = [(rate, rate - prompt % rate) for rate in rates if rate - prompt % rate < new]
    windowed = False
    if reached:
        every, window = reached[-1]
        for usual in PERIODS:
            period = math.lcm(usual, *(rate for rate, _ in reached[:-1]))
            if every % period == 0 and every > period and (found := _windowed(period, every, window, new)) is not None:
                windowed = True
                yield found
    whole = math.lcm(*(rate for rate, _ in reached))
    for period in dict.fromkeys(math.lcm(whole, usual) for usual in PERIODS):
        # the first entry of a cache releases the prompt's remaining tensors
        lead = UNUSUAL if period in PERIODS else UNUSUAL + period
        first = lead + period * ALIKE + (new - lead) % period
        if first < new and (first <= TRACED_AT_MOST or not windowed):
            yield Rhythm(period=period, first=first)


def _windowed(period: int, every: int, window: int, new: int) -> Rhythm | None:
    """Return the rhythm of a cache that gets an entry of `every` tokens at step number `window` and each `every` steps later.

    Other steps repeat after `period`. The numbers of steps before and behind are chosen so that whole periods fill the rest.
    None if no steps would remain.
    """
    behind = RELEASED + period * (ALIKE + 1)  # the same
    behind += (new - window - behind) % period
    before = period - 1 + -(period + behind) % period
    usual = UNUSUAL + period * (ALIKE + 1)  # the first entry of a cache releases the prompt's remaining tensors
    first = usual + (window - before - 1 - usual) % period
    with_first = window - before <= first + UNUSUAL
    windows = tuple(range(window, new, every)[: WINDOWS_ALIKE + with_first])
    found = Rhythm(period=period, first=first, every=every, windows=windows, before=before, behind=behind)
    return found if found.lead + found.around < every else None


def _extended(run: Callable[..., TokenTrace], new: int, rhythm: Rhythm) -> Tape:
    """Return the tape of `new` tokens from a run over the first ones, and others over the exceptional steps.

    Raises NotRepeatedError if steps do not follow from earlier ones.
    """
    traced = run(rhythm.first)
    rhythm = _with_quantized(_with_full(rhythm, traced.windows, new), traced.requantized)
    period, every, lead, depth = rhythm.period, rhythm.every, rhythm.lead, rhythm.depth
    (_, done), *others = _plan(rhythm, new)
    if period > 1 and every is None and (others or done > rhythm.first):
        raise NotRepeatedError("a window fills among steps that are not all alike")
    if done > rhythm.first:
        traced = run(done)
    tape, ends = traced.tape, [*traced.ends]
    begins = []
    for begin, end in others:
        tape = with_loop(tape, ends, begin - 1 - done, period)
        after = begin - lead - 1
        quantized = None if traced.requantized is None or every is None else after // every * every
        traced, done = run(end - after, after=after, quantized=quantized), end
        begins.append(len(tape.order))
        kept = _kept(tape, ends, traced, rhythm) if every else {}
        follows, new_ends = ends[-depth - 1 :], traced.ends[lead - depth - 1 :]
        tape, more = append_steps(tape, traced.tape, new_ends, follows=follows, kept=kept)
        check_follows(tape, (ends[-1], more[period - 1]))
        ends += more
    if every is not None and len(begins) >= WINDOWS_ALIKE:
        return _with_windows(tape, ends, begins[-WINDOWS_ALIKE:], new - done, rhythm)
    return with_loop(tape, ends, new - done, period)


def _with_full(rhythm: Rhythm, full: Sequence[int], new: int) -> Rhythm:
    """Return the rhythm of a cache with layers that keep windows, which are `full` at these tokens.

    Raises NotRepeatedError if a window fills at another step than the exceptional ones.
    """
    if rhythm.every is None:
        return replace(rhythm, windows=tuple(full))
    reached = [window for window in full if 0 < window < new]
    if not {*reached} <= {*rhythm.windows}:
        raise NotRepeatedError("a window fills among steps that are not all alike")
    if not reached:
        return rhythm
    all_windows = range(rhythm.windows[0], new, rhythm.every)
    last = rhythm.windows.index(max(reached)) + 1 + WINDOWS_ALIKE  # of repeated windows
    return replace(rhythm, windows=tuple(all_windows[: max(last, len(rhythm.windows))]))


def _with_quantized(rhythm: Rhythm, every: int | None) -> Rhythm:
    """Return the rhythm of a cache that is quantized again after `every` tokens; None means never."""
    if every is None:
        return rhythm
    if every <= AROUND + UNUSUAL:
        raise NotRepeatedError(
            f"the cache is quantized anew after {every} tokens, in the midst of the steps around that"
        )
    before, behind = AROUND_QUANTIZED
    windows = tuple(range(every, every * (WINDOWS_ALIKE + 1), every))
    return replace(rhythm, every=every if rhythm.period == 1 else None, windows=windows, before=before, behind=behind)


def _kept(tape: Tape, ends: Sequence[int], traced: TokenTrace, rhythm: Rhythm) -> dict[int, int]:
    """Return the cache's blocks that the tape and its continuation have held for longer."""
    begin = traced.ends[rhythm.lead - rhythm.depth - 1], traced.ends[rhythm.lead - 1]
    mine = ends[-rhythm.depth - 1], ends[-1]
    before, at = zip(mine, begin, strict=True)
    return kept_blocks(tape, traced.tape, of=KV_CACHE, before=before, at=at)


def _with_windows(tape: Tape, ends: Sequence[int], begins: Sequence[int], left: int, rhythm: Rhythm) -> Tape:
    """Return the tape extended by `left` tokens: its last windows are repeated, each of `rhythm.every` tokens.

    The last steps of the tape are those around an exceptional step. The windows begin at `begins`. Raises NotRepeatedError if
    they do not follow from each other, TraceError if they are too many to be written.
    """
    every, around = rhythm.every, rhythm.around
    assert every is not None, "windows begin every so many tokens"
    tape = with_loop(tape, ends, min(left, every - around), rhythm.period)
    left -= every - around
    if left <= 0:
        return tape
    held = len(tape.order) - begins[-1]
    count, rest = divmod(left, every)
    if (events := held * (count + 1)) > WRITTEN_AT_MOST:
        raise TraceError(
            f"this generation has {count + len(begins) + 1} steps that stand apart, each of which is written with a few around it: "
            f"{events:,} events",
            allowed=f"{WRITTEN_AT_MOST:,}",
            todo="ask for fewer new tokens",
        )
    part = ends[-around - 1 :][min(rest, around)] - begins[-1]
    return append_windows(tape, begins, count, rest=part, rest_count=max(0, rest - around) // rhythm.period)


def _plan(rhythm: Rhythm, new: int) -> list[tuple[int, int]]:
    """Return the ranges of tokens with steps to be traced: the first ones, and those around each exceptional step."""
    runs = [(1, rhythm.first)]
    for window in rhythm.windows:
        begin, end = window - rhythm.before, min(new, window + rhythm.behind)
        if begin >= new or end <= runs[-1][1]:
            continue
        if begin <= runs[-1][1] + UNUSUAL:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((begin, end))
    return runs


def with_loop(tape: Tape, ends: Sequence[int], steps: int, period: int) -> Tape:
    """Return the tape extended by `steps` more steps: its last `period` steps are repeated. `ends` are the ends of its steps.

    Raises NotRepeatedError if those steps differ from earlier ones.
    """
    count, ends = steps // period, ends[::-period][::-1]
    if not count:
        return tape
    loop = Loop(begin=ends[-2], end=ends[-1], count=count)
    check_affine(tape, loop)
    return replace(tape, loops=(*tape.loops, loop))

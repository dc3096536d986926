"""From a Blueprint to the Tape of a generation: a few tokens are traced, the others follow from them.

The steps of a generation are the same but for sizes that grow by as many bytes each time, the cache's above all. Where layers
keep a window of tokens, that ends when the window is full: there a second generation is traced, whose prompt is nearly as long as
the window, and its steps stand in the tape from there on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from unittest import mock

import torch
from torch import Tensor, nn

from sizer.architecture.blueprint import Blueprint
from sizer.architecture.generation import cache_tensors, generate, is_text, lengthened, window_lengths
from sizer.catalogue.modes import OFFLOADED
from sizer.errors import RequestError, TraceError
from sizer.memory.allocator import replay
from sizer.memory.block_notes import BlockNotes, PhaseOfStep
from sizer.memory.kv_cache import KvSegment
from sizer.memory.loops import (
    DEPTH,
    NotRepeatedError,
    append_step,
    check_affine,
    check_follows,
    repeated_events,
    written,
)
from sizer.memory.tape import Loop, Tape
from sizer.tracing.device import Device
from sizer.tracing.loading import Loading
from sizer.tracing.meta.offloading import is_on_host, layers_offloaded
from sizer.tracing.recorder import Recorder
from sizer.tracing.steps import Work, autocast, place, weight_dtype
from sizer.tracing.trace import bring, explained, recording, repeatable, unchanged

_META = torch.device("meta")
UNUSUAL = 2 + DEPTH  # the first tokens: the prompt makes one, the steps after it release what it has left
ALIKE = 3  # steps that show a line: two growths, which must be the same
AROUND_WINDOW = 6  # steps before and after the one that fills a window
PERIODS = (1, 8)  # steps after which the same comes again: attention pads masks to multiples of 8 keys
SHORT_PROMPT, TOKENS_OF_A_LINE = 8, 3  # tokens; the cache's bytes at the last two give a line
TRACED_AT_MOST = 256  # tokens, where steps follow no rule
WRITTEN_AT_MOST = 8_000_000  # events of steps that no loop holds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A generation that was traced: its tape, how far the tape goes with each token, and the windows that its layers keep, as
    the numbers of tokens after which they are full, counted from the first token that is made. `cache_bytes` are what the cache
    holds with each token, `host_bytes` what of that is on the host."""

    tape: Tape
    ends: tuple[int, ...]
    windows: tuple[int, ...]
    cache_bytes: tuple[int, ...]
    host_bytes: tuple[int, ...]


def trace_generation(
    blueprint: Blueprint, module: nn.Module, work: Work, *, batch: int, device: Device, loading: Loading | None = None
) -> Tape:
    """The tape (bytes as requested) of a generation at one batch size, by the rules of `device`.

    Its phases are "prefill", which ends with the first token, and "decode". Steps that follow from those that were traced are
    the tape's loops. Raises TraceError where PyTorch gives up, and where steps follow no rule and are too many to be traced.
    """
    _check_positions(blueprint, module, work)
    if loading is None:
        module.to("meta").to(weight_dtype(work.dtype))

    def run(tokens: int, after: int = 0) -> _Run:
        return _run(blueprint, module, work, loading, batch=batch, device=device, tokens=tokens, after=after)

    refusal = None
    for period in PERIODS:
        first = UNUSUAL + period * ALIKE + (work.new - UNUSUAL) % period
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
    _check_positions(blueprint, module, work)
    if loading is None:
        module.to("meta").to(weight_dtype(work.dtype))
    return _run(blueprint, module, work, loading, **told, tokens=tokens, after=0, block_notes=block_notes).tape


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


def _extended(run: Callable[..., _Run], first: int, new: int, period: int) -> Tape:
    """The tape of `new` tokens from a run over the first ones, and others over the steps in which windows fill.

    Raises NotRepeatedError where steps do not follow from those before.
    """
    traced = run(first)
    (_, done), *others = _plan(first, new, traced.windows)
    if period > 1 and (others or done > first):
        raise NotRepeatedError("a window fills among steps that are not all alike")
    if done > first:
        traced = run(done)
    tape, ends = traced.tape, [*traced.ends]
    for begin, end in others:
        tape = _with_loop(tape, ends, begin - 1 - done)
        after = begin - UNUSUAL - 1
        traced, done = run(end - after, after=after), end
        for token in range(UNUSUAL, len(traced.ends)):
            bounds = traced.ends[token - DEPTH - 1 : token + 1]
            tape = append_step(tape, traced.tape, bounds, follows=ends[-DEPTH - 1 : -1])
            ends.append(len(tape.order))
            if token == UNUSUAL:
                check_follows(tape, (ends[-2], ends[-1]))
    return _with_loop(tape, ends[::-period][::-1], (new - done) // period)


def _plan(first: int, new: int, windows: tuple[int, ...]) -> list[tuple[int, int]]:
    """The tokens, from the one to the other, whose steps are to be traced: the first ones, and those around each full window."""
    runs = [(1, first)]
    for window in windows:
        begin, end = window - AROUND_WINDOW, min(new, window + AROUND_WINDOW)
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


def _run(
    blueprint: Blueprint,
    module: nn.Module,
    work: Work,
    loading: Loading | None = None,
    *,
    batch: int,
    device: Device,
    tokens: int,
    after: int,
    block_notes: BlockNotes | None = None,
) -> _Run:
    """A generation of `tokens` tokens, of which the first would be the token number `after` + 1 of the one asked for.

    `module` is what `build` returned, cast to the work's dtype.
    """
    if after and module.config.is_encoder_decoder:
        raise NotRepeatedError("a window fills in a decoder, whose prompt cannot be made longer")
    example = lengthened(blueprint.example(batch, False), after)
    device.dtype = work.dtype
    recorder = Recorder(device)
    recorder.batch_size = batch
    recorder.block_notes = block_notes
    bring(recorder, module, loading)
    _end_phase(recorder, "load")
    ends: list[int] = []
    cache_bytes: list[int] = []
    host_bytes: list[int] = []
    windows: tuple[int, ...] = ()

    def on_token(number: int, cache: object) -> bool:
        nonlocal windows
        held = cache_tensors(cache)
        recorder.classify(held, "kv cache")
        if number:
            cache_bytes.append(_storage_bytes(held))
            host_bytes.append(_storage_bytes(filter(is_on_host, held)))
            ends.append(len(recorder.log.order))
        else:
            windows = window_lengths(cache)
        if number == 1:
            _end_phase(recorder, "prefill")
        return number < tokens

    on_cpu = mock.patch.object(
        module, "_optimize_model_for_decode", nullcontext
    )  # experts: the device is not "cpu" on meta
    with unchanged(module), repeatable(), recording(recorder), layers_offloaded(), explained(recorder, module):
        placed = place(example, weight_dtype(work.dtype), recorder.place)
        with torch.no_grad(), autocast(device.kind, work.dtype)(), on_cpu if device.kind == "cpu" else nullcontext():
            generate(module.eval(), placed, new=max(tokens, work.new - after), cache=work.cache, on_token=on_token)
        recorder.log.marks.append((ends[-1], "decode"))
        if block_notes is not None:
            block_notes.ends.append((ends[-1], PhaseOfStep(step=0, phase="decode")))
        tape = recorder.log.tape(batch=batch, stand_ins=tuple(recorder.notes))
    prompt = 1 if module.config.is_encoder_decoder else example.kwargs["input_ids"].shape[1]
    return _Run(
        tape=tape,
        ends=tuple(ends),
        windows=tuple(window - prompt for window in windows),
        cache_bytes=tuple(cache_bytes),
        host_bytes=tuple(host_bytes),
    )


def _end_phase(recorder: Recorder, phase: str) -> None:
    recorder.log.mark(phase)
    if recorder.block_notes is not None:
        recorder.block_notes.ends.append((len(recorder.log.order), PhaseOfStep(step=0, phase=phase)))


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def trace_kv_cache(
    blueprint: Blueprint, module: nn.Module, work: Work, *, device: Device, loading: Loading | None = None
) -> tuple[KvSegment, ...]:
    """What one sequence's cache holds by its length, and has on the host, read from transformers' own dynamic cache: a line for
    what comes before each window that fills, and one beyond the last.

    Empty for models whose prompt is more than text, or read by an encoder. Raises TraceError where PyTorch gives up.
    """
    if loading is None:
        module.to("meta").to(weight_dtype(work.dtype))
    example = blueprint.example(1, False)
    if module.config.is_encoder_decoder or not is_text(example):
        return ()
    prompt = example.kwargs["input_ids"].shape[1]
    kind = OFFLOADED[0] if work.cache in OFFLOADED else "dynamic"
    plain = replace(work, cache=kind, new=TOKENS_OF_A_LINE + 1)

    def line(length: int) -> tuple[_Run, KvSegment]:
        """The line from a number of tokens on."""
        run = _run(
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

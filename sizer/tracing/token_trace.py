"""Generation traced token by token: its tape, and the contents of its cache after each token.

Offloaded layers of transformers' caches are on the host, except the current layer; here they are meta tensors.
transformers/cache_utils.py (Cache.update, CacheLayerMixin.offload and .prefetch, 5.23) copies the previous layer to the host, and
the next one to the device, on a second stream. A copy on the host is a meta tensor that no trace has seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers.cache_utils import CacheLayerMixin

from sizer.architecture.blueprint import Blueprint
from sizer.architecture.greedy_generation import (
    compress_rates,
    generate,
    indexed_lengths,
    lengthened,
    residual_length,
    window_lengths,
)
from sizer.architecture.inner_tensors import cache_tensors
from sizer.tape.affine import beginning
from sizer.tape.loops import NotRepeatedError
from sizer.tape.tape import KV_CACHE, BlockNotes, PhaseOfStep, Tape
from sizer.tracing.depth import DeepTraces
from sizer.tracing.device import Device
from sizer.tracing.modules import Loading
from sizer.tracing.recorder import Recorder
from sizer.tracing.steps import Work, autocast, place, weight_dtype
from sizer.tracing.trace import bring, explain_errors, on_rank, recording, repeatable, unchanged
from sizer.tracing.traced_rank import world_of_work

_TOKEN = "token"  # mark of a token's end in an unfolded tape


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTrace:
    """A traced generation.

    Attributes:
        tape: The tape.
        ends: The position in the tape at which each token ends.
        windows: The numbers of tokens after which windows of layers are full, counted from the first generated token.
        requantized: The number of tokens after which the cache is quantized again, repeatedly; None for never.
        cache_bytes: The bytes of the cache after each token.
        host_bytes: The part of these bytes on the host.
    """

    tape: Tape
    ends: tuple[int, ...]
    windows: tuple[int, ...]
    requantized: int | None
    cache_bytes: tuple[int, ...]
    host_bytes: tuple[int, ...]
    rates: tuple[tuple[int, int], ...] = ()


def trace_tokens(
    blueprint: Blueprint,
    module: nn.Module,
    work: Work,
    loading: Loading | None = None,
    *,
    batch: int,
    device: Device,
    tokens: int,
    after: int,
    quantized: int | None = None,
    block_notes: BlockNotes | None = None,
) -> TokenTrace:
    """Trace a generation of `tokens` tokens; the first would be token number `after` + 1 of the requested generation.

    The earlier `after` tokens are read with the prompt. A quantized cache has quantized the first `quantized` of them (None:
    all). `module` is the result of `build`, cast to the work's dtype.
    """
    if after and module.config.is_encoder_decoder:
        raise NotRepeatedError("a window fills in a decoder, whose prompt cannot be made longer")
    example = lengthened(blueprint.example(batch, False), after)
    prompt = 1 if module.config.is_encoder_decoder else example.kwargs["input_ids"].shape[1]
    read_first = None if quantized is None else prompt - after + quantized
    device.dtype = work.dtype
    recorder = Recorder(device)
    recorder.batch_size = batch
    recorder.block_notes = block_notes
    if work.plan is None:
        bring(recorder, module, loading)
    ends: list[int] = []
    cache_bytes: list[int] = []
    host_bytes: list[int] = []
    windows: tuple[int, ...] = ()
    requantized: int | None = None
    rates: tuple[int, ...] = ()

    def on_token(number: int, cache: object) -> bool:
        nonlocal windows, requantized, rates
        held = cache_tensors(cache)
        recorder.classify(held, KV_CACHE)
        if number:
            cache_bytes.append(_storage_bytes(held))
            host_bytes.append(_storage_bytes(filter(is_on_host, held)))
            ends.append(len(recorder.log.order))
        else:
            windows = tuple(sorted({*window_lengths(cache), *indexed_lengths(module)}))
            requantized, rates = residual_length(cache), compress_rates(cache)
        if number == 1:
            _end_phase(recorder, "prefill")
        return number < tokens

    with (
        world_of_work(work, module, device),
        unchanged(module),
        repeatable(),
        recording(recorder),
        layers_offloaded(),
        explain_errors(recorder, module),
    ):
        if work.plan is not None:
            module = on_rank(recorder, module, work, loading)
        _end_phase(recorder, "load")
        on_cpu = mock.patch.object(
            module, "_optimize_model_for_decode", nullcontext
        )  # experts: the device is not "cpu" on meta
        placed = place(example, weight_dtype(work.dtype), recorder.place)
        with torch.no_grad(), autocast(device.kind, work.dtype)(), on_cpu if device.kind == "cpu" else nullcontext():
            new = max(tokens, work.new - after)
            generate(module.eval(), placed, new=new, cache=work.cache, read_first=read_first, on_token=on_token)
        recorder.log.marks.append((ends[-1], "decode"))
        if block_notes is not None:
            block_notes.ends.append((ends[-1], PhaseOfStep(step=0, phase="decode")))
        tape = recorder.log.tape(batch=batch, stand_ins=tuple(recorder.notes))
    tape = replace(tape, collectives=())  # communication is recorded for steps, and some tokens are not steps
    return TokenTrace(
        tape=tape,
        ends=tuple(ends),
        windows=tuple(window - prompt for window in windows),
        requantized=requantized,
        cache_bytes=tuple(cache_bytes),
        host_bytes=tuple(host_bytes),
        rates=tuple((rate, rate - prompt % rate) for rate in rates),
    )


def trace_deep_tokens(
    deep: DeepTraces, module: nn.Module, device: Device, trace: Callable[[int], TokenTrace], tokens: int
) -> TokenTrace:
    """Return `trace(tokens)`, with a tape unfolded from models with fewer layers if their tapes repeat each other.

    Args:
        deep: The repeated lists of layers of the module.
        module: The model that generates.
        device: The device of the trace.
        trace: Returns the generation of a number of tokens by the current module.
        tokens: The number of tokens.

    Returns:
        The trace. The bytes of its cache are those of a model with fewer layers if the tape is unfolded.
    """
    found: list[TokenTrace] = []

    def trace_tape(*, forward_alone: bool = False, first_step: bool = False) -> Tape:
        found.append(traced := trace(1 if forward_alone else tokens))
        load, prefill, decode = traced.tape.marks
        if forward_alone:
            return beginning(traced.tape, replace(traced.tape, marks=(load, prefill)))
        return replace(traced.tape, marks=(load, prefill, *((end, _TOKEN) for end in traced.ends[1:]), decode))

    tape = deep.trace(module, trace_tape, device)
    load, prefill, *later, decode = tape.marks
    ends = (prefill[0], *(end for end, _ in later))
    return replace(found[-1], tape=replace(tape, marks=(load, prefill, decode)), ends=ends)


def _end_phase(recorder: Recorder, phase: str) -> None:
    recorder.log.mark(phase)
    if recorder.block_notes is not None:
        recorder.block_notes.ends.append((len(recorder.log.order), PhaseOfStep(step=0, phase=phase)))


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


# ---------------------------------------------------------------------------------------------------------- offloading


def is_on_host(tensor: Tensor) -> bool:
    """Return whether a tensor of a cache is on the host."""
    return getattr(tensor, "is_on_host", False)


@contextmanager
def layers_offloaded() -> Iterator[None]:
    """Move the layers of an offloaded cache to the host and back within the context."""
    with mock.patch.multiple(CacheLayerMixin, offload=_offload, prefetch=_prefetch):
        yield


def _offload(layer: CacheLayerMixin) -> None:
    if layer.is_initialized:
        layer.keys, layer.values = _to_host(layer.keys), _to_host(layer.values)


def _prefetch(layer: CacheLayerMixin) -> None:
    if layer.is_initialized and is_on_host(layer.keys):
        layer.keys = torch.empty_like(layer.keys)
        layer.values = torch.empty_like(layer.values)


def _to_host(tensor: Tensor) -> Tensor:
    with _disable_current_modes():
        out = torch.empty_like(tensor)
    out.is_on_host = True
    return out

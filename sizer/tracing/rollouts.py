"""Training steps that generate completions: a few tokens of each rollout are traced, the others follow from them."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from sizer.allocator.allocator import replay
from sizer.architecture.greedy_generation import compress_rates, indexed_lengths, window_lengths
from sizer.architecture.inner_tensors import cache_tensors
from sizer.base.errors import TraceError
from sizer.catalogue.gpus import Backend
from sizer.tape.loops import NotRepeatedError
from sizer.tape.tape import KV_CACHE, Tape
from sizer.tracing.generation import ALIKE, PERIODS, TRACED_AT_MOST, UNUSUAL, with_loop
from sizer.tracing.recorder import Recorder


def trace_rollouts(
    at: Callable[..., Tape], module: nn.Module, prompt: int, new: int, *, backend: Backend, noted: bool = False
) -> Tape:
    """Return the tape of steps that first generate `new` tokens after prompts of `prompt` tokens.

    Args:
        at: Traces the steps, as `sizer.tracing.trace.trace` with `on_token`.
        module: The model that generates.
        prompt: The tokens of a prompt.
        new: The tokens of a completion.
        backend: The kind of device with the allocator that determines a peak.
        noted: Whether `at` notes the blocks of its traces, so that no token may follow from others.

    Returns:
        The tape; its loops are the tokens that follow from others. With `noted` and many tokens, the tape of a few of them,
            with the
        same peak.

    Raises:
        TraceError: The steps of a rollout follow no rule and are too many to be traced, or with `noted` the peak is among them.
    """
    if noted and new > TRACED_AT_MOST:
        found = replay(trace_rollouts(at, module, prompt, new, backend=backend), backend=backend)
        if found.at_peak.get(KV_CACHE):
            raise TraceError(
                f"the peak is in a rollout of {new:,} tokens, which are not traced one by one",
                todo=f"ask for at most {TRACED_AT_MOST} new tokens",
            )
        return at(on_token=_Tokens(UNUSUAL))
    refusal: object = "a cache makes one entry of several tokens, or keeps a window that fills in the rollout"
    for period in () if noted else PERIODS:
        tokens = _Tokens(UNUSUAL + period * ALIKE + (new - UNUSUAL) % period)
        if tokens.most >= new:
            break
        tape = at(on_token=tokens)
        windows = {*tokens.windows, *indexed_lengths(module)}
        if tokens.rates or any(prompt <= window < prompt + new for window in windows):
            break
        try:
            for ends in tokens.ends:
                tape = with_loop(tape, ends, new - tokens.most, period)
            return tape
        except NotRepeatedError as error:
            refusal = error
    if new > TRACED_AT_MOST:
        raise TraceError(
            f"the steps of this rollout follow no rule that is known ({refusal})",
            todo=f"ask for at most {TRACED_AT_MOST} new tokens, which are then traced one by one, or for rollout=colocated:0.3",
        )
    return at(on_token=_Tokens(new))


class _Tokens:
    """Tokens of rollouts; `most` of them are traced.

    Attributes:
        ends: By rollout, the position in the log at which each token ends.
        windows: The numbers of tokens at which layers of the cache are full.
        rates: The numbers of tokens that layers of the cache combine into one entry.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.ends: list[list[int]] = []
        self.windows: tuple[int, ...] = ()
        self.rates: tuple[int, ...] = ()

    def __call__(self, recorder: Recorder, number: int, cache: object) -> bool:
        """Return True if a rollout continues after this token, counted from 1; 0 is before the first."""
        recorder.classify(cache_tensors(cache), KV_CACHE)
        if number:
            self.ends[-1].append(len(recorder.log.order))
        else:
            self.ends.append([])
            self.windows, self.rates = window_lengths(cache), compress_rates(cache)
        return number < self.most

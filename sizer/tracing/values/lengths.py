"""Predicted lengths that depend on weights: bytes of a patch of text, frames of a phoneme.

Some models of transformers predict from their weights the lengths of later tensors. The functions themselves run. Their
predictions get values, so that all later tensors have a size. Both values are typical of ordinary data.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from sizer.tracing.values.known import Assume

FRAMES = 2  # of a phoneme or a blank: VITS' tokenizers put a blank between all letters, about 30 tokens in 62 frames a second
PATCHES = "the bytes of a text were taken to fall into patches of {}, the size in the config"
DURATIONS = f"every token was taken to last {FRAMES} frames"

Wrap = Callable[[Assume, Callable[..., Any]], Callable[..., Any]]


@contextmanager
def lengths_assumed(module: str, assume: Assume) -> Iterator[None]:
    """Give the lengths that models of an imported module predict (`PREDICTED`) values within the context."""
    with ExitStack() as stack:
        for name, method, wrap in PREDICTED[module]:
            cls = getattr(sys.modules[module], name)
            function = wrap(assume, getattr(cls, method))
            static = isinstance(vars(cls).get(method), staticmethod)
            stack.enter_context(mock.patch.object(cls, method, staticmethod(function) if static else function))
        yield


def _even_patches(assume: Assume, cut: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return BLT's `cut` with entropies [samples, bytes] that start patches of equal size.

    A patch begins where the next byte's entropy is above the threshold.
    """

    def lengths(entropies: Tensor, sequence_length: int, patch_size: int, threshold: float) -> Tensor:
        place = torch.arange(entropies.shape[1], device="cpu")
        real = torch.where(place % patch_size == 0, threshold + 1, threshold - 1).to(entropies.dtype)
        assume(entropies, real.expand(entropies.shape), PATCHES.format(patch_size))
        return cut(entropies, sequence_length, patch_size=patch_size, threshold=threshold)

    return lengths


def _even_durations(assume: Assume, predict: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return VITS' `predict` with assumed logarithms of durations [samples, 1, tokens].

    `VitsModel.forward` rounds the durations up (modeling_vits.py).
    """

    def durations(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        out = predict(self, *args, **kwargs)
        assume(out, torch.full(out.shape, FRAMES - 0.5, device="cpu").log().to(out.dtype), DURATIONS)
        return out

    return durations


def _whole_durations(assume: Assume, predict: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return FastSpeech 2's `predict` with assumed durations in frames [samples, tokens].

    In training they are logarithms, on which no length depends.
    """

    def durations(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        out = predict(self, *args, **kwargs)
        if not out.is_floating_point():
            assume(out, torch.full(out.shape, FRAMES, device="cpu"), DURATIONS)
        return out

    return durations


PREDICTED: dict[str, tuple[tuple[str, str, Wrap], ...]] = {
    "transformers.models.blt.modeling_blt": (("BltPatcher", "patch_lengths_from_entropies", _even_patches),),
    "transformers.models.fastspeech2_conformer.modeling_fastspeech2_conformer": (
        ("FastSpeech2ConformerDurationPredictor", "forward", _whole_durations),
    ),
    "transformers.models.vits.modeling_vits": (
        ("VitsStochasticDurationPredictor", "forward", _even_durations),
        ("VitsDurationPredictor", "forward", _even_durations),
    ),
}

"""Predicted lengths, which depend on weights: how many bytes a patch of text holds, how many frames a phoneme lasts.

Some models of transformers predict from their weights how long what they go on with will be. The functions themselves run; what
they predict gets values, so that everything after them has a size. Both are what such models come to on ordinary data.
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

FRAMES = 2  # of a phoneme or a blank beside it: VITS' tokenizers put one between all letters, about 30 tokens in 62 frames a second
PATCHES = "the bytes of a text were taken to fall into patches of {}, the size in the config"
DURATIONS = f"every token was taken to last {FRAMES} frames"

Wrap = Callable[[Assume, Callable[..., Any]], Callable[..., Any]]


@contextmanager
def lengths_assumed(module: str, assume: Assume) -> Iterator[None]:
    """Within the context, the lengths that models of an imported module predict (`PREDICTED`) have values."""
    with ExitStack() as stack:
        for name, method, wrap in PREDICTED[module]:
            cls = getattr(sys.modules[module], name)
            function = wrap(assume, getattr(cls, method))
            static = isinstance(vars(cls).get(method), staticmethod)
            stack.enter_context(mock.patch.object(cls, method, staticmethod(function) if static else function))
        yield


def _even_patches(assume: Assume, cut: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """BLT: a patch begins where the next byte is hard to tell, its entropy [samples, bytes] above the threshold.

    `patch_lengths_from_entropies` (modeling_blt.py) begins patches at 0 and 1 and after them at c + 1 for each such c from 1 on.
    """

    def lengths(entropies: Tensor, sequence_length: int, patch_size: int, threshold: float) -> Tensor:
        place = torch.arange(entropies.shape[1], device="cpu")
        real = torch.where(place % patch_size == 0, threshold + 1, threshold - 1).to(entropies.dtype)
        assume(entropies, real.expand(entropies.shape), PATCHES.format(patch_size))
        return cut(entropies, sequence_length, patch_size=patch_size, threshold=threshold)

    return lengths


def _even_durations(assume: Assume, predict: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """VITS: logarithms of durations [samples, 1, tokens], which `VitsModel.forward` rounds up (modeling_vits.py)."""

    def durations(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        out = predict(self, *args, **kwargs)
        assume(out, torch.full(out.shape, FRAMES - 0.5, device="cpu").log().to(out.dtype), DURATIONS)
        return out

    return durations


def _whole_durations(assume: Assume, predict: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """FastSpeech 2: durations in frames [samples, tokens]; in training their logarithms, on which no length depends."""

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

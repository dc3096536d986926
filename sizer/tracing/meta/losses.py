"""Losses that are computed into their result and then reduced there: a scalar over the storage of all elements.

`resize_` never shrinks a storage (native/BinaryOps.cpp, native/Loss.cpp; PyTorch 2.15, on the CPU as the profiler tells).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sizer.tracing.tables import Results, listed

_NONE = 0  # at::Reduction::None


def is_reduced(args: tuple, kwargs: dict, at: int) -> bool:
    """Return True if a loss is reduced to its mean or sum; `at` is the position of the reduction argument."""
    return (args[at] if len(args) > at else kwargs.get("reduction", 1)) != _NONE


def elements_of(args: tuple) -> torch.Size:
    """Return the shape of a loss's elements."""
    return torch.broadcast_shapes(*(arg.shape for arg in args if isinstance(arg, Tensor)))


def over_elements(at: int) -> Any:
    """Return a correction: a loss that is reduced, over the storage of all elements; `at` is the place of the reduction."""

    def correct(args: tuple, out: Tensor) -> Tensor:
        if not is_reduced(args, {}, at):
            return out
        return torch.empty(elements_of(args[:at]), dtype=out.dtype, device=out.device).resize_(())

    return correct


RESULTS: Results = {
    **listed("mse_loss smooth_l1_loss soft_margin_loss", over_elements(2)),
    **listed("binary_cross_entropy", over_elements(3)),
}

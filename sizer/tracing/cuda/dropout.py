"""Dropout on CUDA: the fused kernel, whose mask comes before its output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sizer.tracing.allocations import Held, Steps
from sizer.tracing.device import Device

_aten = torch.ops.aten


def dropout(device: Device, input: Tensor, p: float, train: bool) -> Tensor:
    """aten.dropout: native_dropout with a mask of 1 byte an element (Dropout.cpp, is_fused_kernel_acceptable)."""
    if not train or p == 0 or input.numel() == 0:
        return input
    if p == 1:
        return input.mul(torch.zeros((), dtype=input.dtype, device=input.device))
    return _aten.native_dropout.default(input, p, True)[0]


def mask_first(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Dropout's mask is made before its output (cuda/Dropout.cu, dropout_cuda)."""
    yield out[1]
    yield out[0]


KERNELS = {_aten.dropout.default: dropout}
HELD: dict[Any, Held] = {_aten.native_dropout.default: mask_first}

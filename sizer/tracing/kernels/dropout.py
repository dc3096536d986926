"""Dropout: the fused kernel of CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sizer.tracing.device import Device

_aten = torch.ops.aten


def on_cuda(device: Device, input: Tensor, p: float, train: bool) -> Tensor:
    """aten.dropout: native_dropout with a mask of 1 byte an element (Dropout.cpp, is_fused_kernel_acceptable)."""
    if not train or p == 0 or input.numel() == 0:
        return input
    if p == 1:
        return input.mul(torch.zeros((), dtype=input.dtype, device=input.device))
    return _aten.native_dropout.default(input, p, True)[0]

"""Operators whose generic path differs from every device's own: linear layers and the gradients of activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sizer.tracing.device import Device

_aten = torch.ops.aten


def linear(device: Device, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """aten.linear (aten/src/ATen/native/Linear.cpp): the bias is added in place, which meta tensors would switch off."""
    if bias is None or input.dim() <= 2 or input.is_contiguous():
        return _aten.linear.default.decompose(input, weight, bias)
    out = torch.matmul(input, weight.t())
    return out.add_(bias)


def activation_backward(device: Device, grad_output: Tensor, input: Tensor) -> Tensor:
    """silu_backward and mish_backward: one kernel on every device, a chain of operators elsewhere (math_silu_backward and
    math_mish_backward in aten/src/ATen/native/Activation.cpp)."""
    return torch.mul(grad_output, input)


EVERYWHERE = {"linear": linear, "silu_backward": activation_backward, "mish_backward": activation_backward}

"""Composite operators whose generic path differs from every device's own kernel: linear layers, gradients of activations,
one-hot vectors."""

from __future__ import annotations

import torch
from torch import Tensor

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


def one_hot(device: Device, input: Tensor, num_classes: int = -1) -> Tensor:
    """aten.one_hot (aten/src/ATen/native/Onehot.cpp): zeros written to; on meta a comparison with every class instead.

    The CPU looks at the smallest and the largest class first (aten.aminmax).
    """
    if device.kind == "cpu" and input.numel():
        torch.aminmax(input)
    classes = int(input.max()) + 1 if num_classes == -1 else num_classes
    return input.new_zeros(*input.shape, classes).scatter_(-1, input.unsqueeze(-1), 1)


KERNELS = {
    _aten.linear.default: linear,
    _aten.silu_backward.default: activation_backward,
    _aten.mish_backward.default: activation_backward,
    _aten.one_hot.default: one_hot,
}

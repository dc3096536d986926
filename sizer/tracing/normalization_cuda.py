"""Layer and RMS norm on CUDA: copies of strided operands, in the order in which the kernels make them beside their results.

As of PyTorch 2.11 to 2.15: aten/src/ATen/native/cuda/layer_norm_kernel.cu (layer_norm_cuda, layer_norm_backward_cuda).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sizer.tracing.steps import Steps
from sizer.tracing.values import tensors_of

_aten = torch.ops.aten


def forward(device: Any, args: tuple, kwargs: dict, out: Any) -> Steps:
    """The input made contiguous (cuda/layer_norm_kernel.cu)."""
    yield tuple(_copies(args[0]))
    yield from tensors_of(out)


def backward(device: Any, args: tuple, kwargs: dict, out: Any) -> Steps:
    """The input made contiguous, then beside the results the gradient (cuda/layer_norm_kernel.cu).

    *Known limitations*: partial sums for more than 65,536 narrow rows (two of a 32nd of the input) are not counted.
    """
    yield tuple(_copies(args[1]))
    yield from tensors_of(out)
    yield _copies(args[0])


def _copies(tensor: Tensor) -> list[int]:
    return [] if tensor.is_contiguous() else [tensor.numel() * tensor.itemsize]


INNER = {
    _aten.native_layer_norm.default: forward,
    _aten.native_layer_norm_backward.default: backward,
    _aten._fused_rms_norm.default: forward,
    _aten._fused_rms_norm_backward.default: backward,
}

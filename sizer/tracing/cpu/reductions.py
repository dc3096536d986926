"""Reductions on the CPU: copies in another dtype, and intermediate results. As of PyTorch 2.11 to 2.15."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from sizer.tracing.allocations import AllocationRule, Steps
from sizer.tracing.device import Device
from sizer.tracing.meta.strides import elements_of, is_reduced

_aten = torch.ops.aten


def safe_softmax(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add the softmax and masks of minus infinity [.., N] and of rows with no other element [.., 1] (native/SoftMax.cpp).

    Operator: _safe_softmax. A mask has one byte per element. Rows with no other element are overwritten in place.
    """
    rows = out.numel() // max(1, out.shape[args[1]])
    return [out, [args[0].numel(), rows, out.itemsize]]


def logsumexp(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add the maxima, and the exponentials of the differences (ReduceOps.cpp, logsumexp_out_impl)."""
    return [out, [out.nbytes, args[0].nbytes]]


def converted_sum(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add the input in the output's dtype, for sum, cumsum and cumprod in another dtype than the input's (ReduceOps.cpp)."""
    return [out, [args[0].numel() * out.itemsize if args[0].dtype != out.dtype else 0]]


def half_mean(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add input and result in float32, for mean of half precision (ReduceOps.cpp, mean_kernel_impl)."""
    return [[4 * args[0].numel(), 4 * out.numel()] if out.itemsize == 2 else [], out]


def loss_elements(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add the elements of mse_loss or smooth_l1_loss if they are reduced (native/BinaryOps.cpp)."""
    return [out, [prod(elements_of(args)) * out.itemsize if is_reduced(args, kwargs, 2) else 0]]


ALLOCATIONS: dict[Any, AllocationRule] = {
    _aten.mse_loss.default: loss_elements,
    _aten.smooth_l1_loss.default: loss_elements,
    _aten._safe_softmax.default: safe_softmax,
    _aten.logsumexp.default: logsumexp,
    _aten.cumsum.default: converted_sum,
    _aten.cumprod.default: converted_sum,
    _aten.sum.default: converted_sum,
    _aten.sum.dim_IntList: converted_sum,
    _aten.mean.default: half_mean,
    _aten.mean.dim: half_mean,
}

"""Reductions on the CPU: copies in another dtype, and what comes in between. As of PyTorch 2.11 to 2.15."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from sizer.tracing.allocations import Held, Steps
from sizer.tracing.device import Device
from sizer.tracing.meta.strides import elements_of, is_reduced

_aten = torch.ops.aten


def safe_softmax(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """_safe_softmax (native/SoftMax.cpp): the softmax [.., N], then where the input is minus infinity [.., N] and which rows are
    so altogether [.., 1], in one byte an element; such rows are overwritten in place."""
    rows = out.numel() // max(1, out.shape[args[1]])
    return [out, [args[0].numel(), rows, out.itemsize]]


def logsumexp(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """logsumexp (ReduceOps.cpp, logsumexp_out_impl): the maxima, and the exponentials of the differences."""
    return [out, [out.nbytes, args[0].nbytes]]


def converted_sum(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """sum, cumsum and cumprod (ReduceOps.cpp) in another dtype than the input's: first the input in the output's dtype."""
    return [out, [args[0].numel() * out.itemsize if args[0].dtype != out.dtype else 0]]


def half_mean(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """mean (ReduceOps.cpp, mean_kernel_impl) of half precision: the input and the result in float32."""
    return [[4 * args[0].numel(), 4 * out.numel()] if out.itemsize == 2 else [], out]


def loss_elements(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """mse_loss, smooth_l1_loss (native/BinaryOps.cpp): the elements once more, if they are reduced."""
    return [out, [prod(elements_of(args)) * out.itemsize if is_reduced(args, kwargs, 2) else 0]]


HELD: dict[Any, Held] = {
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

"""Gradients whose C++ formula takes another way for meta tensors: those of products, which ask first whether a factor is zero.

Source: prod_backward in torch/csrc/autograd/FunctionsManual.cpp and cumprod_backward in aten/src/ATen/native/ReduceOps.cpp, 2.11 to
2.15. For meta tensors the first takes the way for products with zeros, under a dispatch mode the second does, too. Values are
taken to have no zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sizer.tracing.device import Device

_aten = torch.ops.aten


class _Product(torch.autograd.Function):
    """A product over one dimension, or over all, and its gradient for factors that are not zero."""

    @staticmethod
    def forward(ctx: Any, device: Device, operator: Any, input: Tensor, args: tuple, dtype: torch.dtype | None) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            result = operator(input, *args, dtype=dtype)
        ctx.save_for_backward(input, result)
        ctx.device, ctx.args = device, args
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        (grad,), (input, result) = grads, ctx.saved_tensors
        if not input.dim():
            return None, None, grad, None, None
        input = input.to(grad.dtype)
        zeros = input == 0
        if not ctx.args:
            if ctx.device.kind == "cuda":  # nonzero: a count and CUB's scratch (native/cuda/Nonzero.cu)
                scratch = [torch.empty(size, dtype=torch.uint8, device=input.device) for size in (4, 1023)]
                del scratch
            del zeros
            return None, None, grad * (result / input), None, None
        dim, keeps = ctx.args
        if not keeps and input.dim() > 1:
            grad, result = grad.unsqueeze(dim), result.unsqueeze(dim)
        in_slices = zeros.sum(dim, True)
        in_slices.sum()
        return None, None, grad * (result / input), None, None


def product(device: Device, input: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """aten.prod of all elements."""
    return _Product.apply(device, _aten.prod.default, input, (), dtype)


def product_over(
    device: Device, input: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """aten.prod over one dimension."""
    return _Product.apply(device, _aten.prod.dim_int, input, (dim, keepdim), dtype)


def cumprod_backward(device: Device, grad: Tensor, input: Tensor, dim: int, output: Tensor) -> Tensor:
    """aten.cumprod_backward: the reversed sum of output times gradient, divided by the input."""
    if input.numel() <= 1 or input.shape[dim] == 1:
        return grad
    weighted = output * grad
    zeros = input == 0
    torch.any(zeros)
    flipped = weighted.flip(dim)
    summed = flipped.cumsum(dim)
    reversed_sum = summed.flip(dim)
    del flipped, summed
    return reversed_sum / input


KERNELS = {_aten.cumprod_backward.default: cumprod_backward}
FORMULAS = {_aten.prod.default: product, _aten.prod.dim_int: product_over}

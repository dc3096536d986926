"""Products on meta tensors: output shapes of grouped matrix products, and gradients of products.

Grouped matrix products: PyTorch's meta kernel refuses all dtypes except bfloat16 before 2.12, and pads rows in builds with CUDA
only. Here the shape is the same for every dtype and build.

Gradients of products: their C++ formula first checks for zero factors, and uses another path for meta tensors.
Source: prod_backward in torch/csrc/autograd/FunctionsManual.cpp and cumprod_backward in aten/src/ATen/native/ReduceOps.cpp,
2.11 to 2.15. For meta tensors prod_backward uses the path for products with zeros; under a dispatch mode cumprod_backward does
too. Values are assumed to have no zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sizer.tracing.device import Device
from sizer.tracing.values.handler import HandlerContext


def grouped_mm(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the output of aten._grouped_mm (torch/_meta_registrations.py, _create_grouped_mm_output_tensor).

    [M, K] or [G, M, K] is multiplied by [G, K, N] or [K, N], with groups that end at `offs` [G]. On a GPU each row is padded to
    16 bytes.
    """
    first, second = args[0], args[1]
    if first.device.type != "meta":
        return NotImplemented
    groups = args[2] if len(args) > 2 else kwargs.get("offs")
    dtype = (args[4] if len(args) > 4 else kwargs.get("out_dtype")) or first.dtype
    shape = _shape(first, second, groups)
    multiple = 16 // dtype.itemsize if recorder.device.kind != "cpu" else 1
    row = -(-shape[-1] // multiple) * multiple
    strides = [row, 1] if len(shape) == 2 else [shape[1] * row, row, 1]
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _shape(first: Tensor, second: Tensor, groups: Tensor | None) -> list[int]:
    rows, columns = first.shape[-2], second.shape[-1]
    if first.dim() == second.dim():
        count = groups.shape[0] if first.dim() == 2 and groups is not None else first.shape[0]
        return [count, rows, columns]
    return [rows, columns]


HANDLERS = {torch.ops.aten._grouped_mm.default: grouped_mm}


# ------------------------------------------------------------------------------------------------------------ formulas


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
    """Return aten.prod of all elements."""
    return _Product.apply(device, _aten.prod.default, input, (), dtype)


def product_over(
    device: Device, input: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Return aten.prod over one dimension."""
    return _Product.apply(device, _aten.prod.dim_int, input, (dim, keepdim), dtype)


def cumprod_backward(device: Device, grad: Tensor, input: Tensor, dim: int, output: Tensor) -> Tensor:
    """Return the reversed sum of output times gradient, divided by the input, for aten.cumprod_backward."""
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

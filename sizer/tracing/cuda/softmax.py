"""Softmax on CUDA: float16 (not bfloat16) is converted to float32 within the kernel, without a copy.

Source: softmax and log_softmax in aten/src/ATen/native/SoftMax.cpp; the gradient in cuda/SoftMax.cu (half_to_float).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sizer.tracing.allocations import AllocationRule, Steps, after_results, copies
from sizer.tracing.device import Device
from sizer.tracing.operator_tables import Results

_aten = torch.ops.aten


def _converting(kernel: Any) -> Callable[..., Tensor]:
    def softmax(device: Device, input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        to_float32 = dtype == torch.float32
        if to_float32 and input.dtype == torch.float16:
            return kernel(input, dim, True)
        device.halves_differ |= to_float32 and input.dtype == torch.bfloat16
        return kernel(input if dtype is None else input.to(dtype), dim, False)

    return softmax


def _gradient_in_input_dtype(args: tuple, out: Tensor) -> Tensor:
    """Return _softmax_backward_data's gradient in the input's dtype; meta kernels return the gradient's dtype.

    Arguments: gradient, output, dim, input_dtype.
    """
    return out if out.dtype == args[3] else out.to(args[3])


def softmax(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add a contiguous copy of a strided input (cuda/SoftMax.cu, host_softmax)."""
    return [copies(args[0])]


def softmax_backward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add the product of gradient and output, and contiguous copies of both (cuda/SoftMax.cu, softmax_backward_cuda_out).

    The copies are those of the product and of the output.
    """
    product = torch.mul(args[0], args[1])
    return [[product.nbytes, *copies(product, args[1])]]


def log_softmax_backward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add contiguous copies of strided gradients and outputs (cuda/SoftMax.cu, host_softmax_backward)."""
    return [copies(args[0], args[1])]


def safe_softmax(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add masks of elements that are minus infinity [.., N] and of rows with no other element [.., 1] (native/SoftMax.cpp).

    Operator: _safe_softmax. A mask has one byte per element. Rows with no other element are overwritten in place.
    """
    return [[args[0].numel(), out.numel() // max(1, out.shape[args[1]])]]


KERNELS = {
    _aten.softmax.int: _converting(_aten._softmax.default),
    _aten.log_softmax.int: _converting(_aten._log_softmax.default),
}
RESULTS: Results = {
    _aten._softmax_backward_data.default: _gradient_in_input_dtype,
    _aten._log_softmax_backward_data.default: _gradient_in_input_dtype,
}
ALLOCATIONS: dict[Any, AllocationRule] = {
    _aten._safe_softmax.default: after_results(safe_softmax),
    _aten._softmax.default: after_results(softmax),
    _aten._log_softmax.default: after_results(softmax),
    _aten._softmax_backward_data.default: after_results(softmax_backward),
    _aten._log_softmax_backward_data.default: after_results(log_softmax_backward),
}

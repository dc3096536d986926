"""Softmax to float32: CUDA fuses the conversion of float16 (not of bfloat16) into the kernel, without a float32 copy.

Source: softmax and log_softmax in aten/src/ATen/native/SoftMax.cpp; the gradient in cuda/SoftMax.cu (half_to_float).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sizer.tracing.device import Device

_aten = torch.ops.aten


def _on_cuda(kernel: Any) -> Callable[..., Tensor]:
    def softmax(device: Device, input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        to_float32 = dtype == torch.float32
        if to_float32 and input.dtype == torch.float16:
            return kernel(input, dim, True)
        device.halves_differ |= to_float32 and input.dtype == torch.bfloat16
        return kernel(input if dtype is None else input.to(dtype), dim, False)

    return softmax


def _gradient_in_input_dtype(args: tuple, out: Tensor) -> Tensor:
    """_softmax_backward_data(gradient, output, dim, input_dtype): meta returns the gradient's dtype, CUDA the input's."""
    return out if out.dtype == args[3] else out.to(args[3])


ON_CUDA = {"softmax.int": _on_cuda(_aten._softmax.default), "log_softmax.int": _on_cuda(_aten._log_softmax.default)}
RESULTS_ON_CUDA = {
    _aten._softmax_backward_data.default: _gradient_in_input_dtype,
    _aten._log_softmax_backward_data.default: _gradient_in_input_dtype,
}

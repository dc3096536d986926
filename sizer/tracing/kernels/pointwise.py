"""Dropout and batch normalization: the fused kernels of CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sizer.tracing.device import Device

_aten = torch.ops.aten


def dropout_on_cuda(device: Device, input: Tensor, p: float, train: bool) -> Tensor:
    """aten.dropout: native_dropout with a mask of 1 byte an element (Dropout.cpp, is_fused_kernel_acceptable)."""
    if not train or p == 0 or input.numel() == 0:
        return input
    if p == 1:
        return input.mul(torch.zeros((), dtype=input.dtype, device=input.device))
    return _aten.native_dropout.default(input, p, True)[0]


def batch_norm_on_cuda(
    device: Device, input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled
):
    """aten.batch_norm: cuDNN or PyTorch's own kernel (Normalization.cpp, _batch_norm_impl_index)."""
    if cudnn_enabled and _uses_cudnn(input, weight, bias, running_mean, running_var, training, eps):
        return _aten.cudnn_batch_norm.default(
            input.contiguous(), weight, bias, running_mean, running_var, training, momentum, eps
        )[0]
    return _aten.native_batch_norm.default(input, weight, bias, running_mean, running_var, training, momentum, eps)[0]


def _uses_cudnn(input, weight, bias, running_mean, running_var, training, eps) -> bool:
    if weight is None or bias is None or (running_mean is None) != (running_var is None):
        return False
    if running_mean is None and not training:
        return False
    if torch.bfloat16 in (input.dtype, weight.dtype) or (
        input.dtype == torch.float16 and weight.dtype != torch.float32
    ):
        return False
    batches = 880801 if training else 65535
    return input.dim() >= 3 and input.shape[0] <= batches and eps >= 0.0 and input.numel() > 0

"""Normalization: which library runs it, and the dtype of the statistics that it keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sizer.tracing.device import Device

_aten = torch.ops.aten


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


def _statistics_on_cpu(args: tuple, out: Any) -> Any:
    """native_{layer,group,batch}_norm on the CPU keep mean and variance in the input's dtype, where meta and CUDA keep float32.

    Source: param_scalar_type in aten/src/ATen/native/cpu/mixed_data_type.h: float32 only if the weights are.
    """
    input, weights = args[0], [a for a in args[1:5] if isinstance(a, torch.Tensor)]
    if input.dtype == torch.float32 or any(w.dtype == torch.float32 for w in weights):
        return out
    return (out[0], *(t.to(input.dtype) for t in out[1:]))


RESULTS_ON_CPU = {
    _aten.native_layer_norm.default: _statistics_on_cpu,
    _aten.native_group_norm.default: _statistics_on_cpu,
    _aten.native_batch_norm.default: _statistics_on_cpu,
    _aten._native_batch_norm_legit.default: _statistics_on_cpu,
}

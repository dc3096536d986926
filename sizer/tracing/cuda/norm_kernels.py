"""Batch norm and RMS norm on CUDA: which kernel runs, PyTorch's own or cuDNN's, fused or not."""

from __future__ import annotations

import warnings

import torch
from torch._prims_common import suggest_memory_format

from sizer.tracing.device import Device
from sizer.versions import version_followed

_aten = torch.ops.aten


def batch_norm(device: Device, input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled):
    """aten.batch_norm: cuDNN or PyTorch's own kernel (Normalization.cpp, _batch_norm_impl_index)."""
    if cudnn_enabled and _uses_cudnn(input, weight, bias, running_mean, running_var, training, eps):
        device.note_choice("batch norm", "cuDNN", f"{str(input.dtype)[6:]}, {'training' if training else 'evaluation'}")
        kept = input.contiguous(memory_format=suggest_memory_format(input))
        return _aten.cudnn_batch_norm.default(kept, weight, bias, running_mean, running_var, training, momentum, eps)[0]
    device.note_choice(
        "batch norm", "PyTorch's own", f"{str(input.dtype)[6:]}, {'training' if training else 'evaluation'}"
    )
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
    indexed = 0 < input.numel() < 2**31 - 1  # some of its kernels count in 32 bits
    return input.dim() >= 3 and input.shape[0] <= batches and eps >= 0.0 and indexed


def rms_norm(device: Device, input, normalized_shape, weight=None, eps=None):
    """aten.rms_norm: one fused kernel that saves its input and the inverse root [.., 1] (layer_norm.cpp, rms_norm_symint).

    Not for weights of another dtype or images in channels-last order, nor in 2.6: then a chain of operators.
    """
    if version_followed(device.version) < (2, 11):
        return _rms_norm_of_2_6(input, len(normalized_shape), weight, eps)
    channels_last = suggest_memory_format(input) not in (torch.contiguous_format, torch.preserve_format)
    if channels_last or (weight is not None and weight.dtype != input.dtype):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the fused kernel is not for it: the user's own run will say so
            return _aten.rms_norm.default.decompose(input, normalized_shape, weight, eps)
    device.note_choice("RMS norm", "fused", str(input.dtype)[6:])
    return _FusedRmsNorm.apply(input, list(normalized_shape), weight, eps)


def _rms_norm_of_2_6(input, rank, weight, eps):
    """rms_norm_symint as 2.6 has it: halves in float32, back in the input's dtype before the weight is multiplied."""
    wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    root = wide.pow(2).mean(tuple(range(-rank, 0)), keepdim=True).add_(eps).rsqrt()
    out = wide.mul(root).to(input.dtype)
    return out if weight is None else out.mul(weight)


class _FusedRmsNorm(torch.autograd.Function):
    """_fused_rms_norm and its backward pass: on meta the former is a chain of operators."""

    @staticmethod
    def forward(ctx, input, shape, weight, eps):
        rows = [*input.shape[: input.dim() - len(shape)], *[1] * len(shape)]
        root = torch.empty(rows, dtype=torch.float32, device=input.device)
        ctx.save_for_backward(input, weight, root)
        ctx.shape = shape
        return torch.empty(input.shape, dtype=input.dtype, device=input.device)

    @staticmethod
    def backward(ctx, grad):
        input, weight, root = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2] and weight is not None]
        grads = _aten._fused_rms_norm_backward.default(grad, input, ctx.shape, root, weight, wanted)
        return grads[0], None, grads[1], None


KERNELS = {_aten.batch_norm.default: batch_norm, _aten.rms_norm.default: rms_norm}

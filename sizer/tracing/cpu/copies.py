"""Kernels of the CPU that begin with copies of their operands: contiguous, in channels last, or in the dtype of the computation.

As of PyTorch 2.11 to 2.15.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from sizer.tracing.allocations import Held, Steps
from sizer.tracing.device import Device
from sizer.tracing.meta.strides import in_format, memory_format
from sizer.tracing.tables import Results, listed
from sizer.tracing.values.known import tensors_of

_aten = torch.ops.aten


def copying(*positions: int, last: bool = False) -> Held:
    """Kernels that begin with `.contiguous()` of the arguments at these positions, with `last` in the format of the first of
    them: softmax (cpu/SoftMaxKernel.cpp), group norm, pooling, padding, index_select and their gradients."""

    def inner(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
        tensors = [args[i] for i in positions]
        wanted = memory_format(tensors[0]) if last else torch.contiguous_format
        return [*tensors_of((out,)), [0 if t.is_contiguous(memory_format=wanted) else t.nbytes for t in tensors]]

    return inner


def upsample(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """upsample_nearest2d and upsample_bilinear2d (cpu/UpSampleKernel.cpp, _use_vectorized_kernel_cond_2d): small images and
    those with channels last are computed with channels last, from a copy and into one where the tensors are not."""
    input = args[0]
    last = input.is_contiguous(memory_format=torch.channels_last) and input.shape[1] > 3
    if not last and out.shape[-2] + out.shape[-1] > 128:
        return [out]
    return [out, [0 if t.is_contiguous(memory_format=torch.channels_last) else t.nbytes for t in (input, out)]]


def promoted(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Pointwise operators of tensors of different dtypes (TensorIterator.cpp, compute_types): on the CPU each is first copied
    to the dtype of the computation; a GPU converts in registers."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    if len(tensors) < 2 or all(t.dtype == tensors[0].dtype for t in tensors):
        return [out]
    wide = functools.reduce(
        torch.promote_types, (t.dtype for t in tensors if t.dim() or len(tensors) == 1), tensors[0].dtype
    )
    copies = [t.numel() * wide.itemsize for t in tensors if t.dtype != wide and t.dtype != torch.bool and t.dim()]
    return [copies, out, copies]


def like_input(args: tuple, out: Tensor) -> Tensor:
    """Channels last where they are in the input, contiguous on meta."""
    return in_format(out, memory_format(args[0])) if out.dim() == 4 else out


_PROMOTED = """
    add.Tensor add_.Tensor sub.Tensor sub_.Tensor mul.Tensor mul_.Tensor div.Tensor div_.Tensor maximum.default minimum.default
    pow.Tensor_Tensor addcmul.default addcdiv.default addcmul_.default addcdiv_.default eq.Tensor ne.Tensor lt.Tensor le.Tensor
    gt.Tensor ge.Tensor
"""

HELD: dict[Any, Held] = {
    **listed(_PROMOTED, promoted),
    **listed("_softmax _log_softmax index_select", copying(0)),
    **listed("_softmax_backward_data _log_softmax_backward_data", copying(0, 1)),
    **listed("max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d", copying(0, last=True)),
    **listed("upsample_bilinear2d_backward upsample_nearest2d_backward reflection_pad2d", copying(0, last=True)),
    **listed("upsample_bilinear2d upsample_nearest2d", upsample),
}
RESULTS: Results = {_aten.roll.default: like_input, _aten.reflection_pad2d.default: like_input}

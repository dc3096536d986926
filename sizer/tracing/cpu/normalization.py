"""Normalization on the CPU: dtype of its statistics, strides of its results, and memory inside its kernels.

As of PyTorch 2.11 to 2.15.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from sizer.tracing.allocations import AllocationRule, Steps, after_results, copies
from sizer.tracing.cpu.copies import copying
from sizer.tracing.device import Device
from sizer.tracing.meta.strides import in_format, memory_format
from sizer.tracing.operator_tables import Results
from sizer.tracing.values.known import tensors_of

_aten = torch.ops.aten


def statistics(args: tuple, out: Any) -> Any:
    """Return native_{layer,group,batch}_norm's mean and variance in the input's dtype; meta and CUDA return float32."""
    input, weights = args[0], [a for a in args[1:5] if isinstance(a, torch.Tensor)]
    wanted = torch.float32 if any(w.dtype == torch.float32 for w in weights) else input.dtype
    return (out[0], *(t if t.dtype == wanted else t.to(wanted) for t in out[1:]))


def batch_norm_result(args: tuple, out: tuple) -> tuple:
    """Return native_batch_norm's result contiguous or in channels last; on meta it has the input's strides (Normalization.cpp).

    Arguments: input [N, C, ..], ...
    """
    if len(args) > 5 and args[5] is False:  # training
        return batch_norm_of_fixed_statistics(args, out)
    return statistics(args, (in_format(out[0], memory_format(args[0])), *out[1:]))


def batch_norm_of_fixed_statistics(args: tuple, out: tuple) -> tuple:
    """Return native_batch_norm's results in evaluation: only the output is kept (Normalization.cpp, batch_norm_cpu)."""
    return (
        in_format(out[0], memory_format(args[0])),
        *(torch.empty(0, dtype=t.dtype, device=t.device) for t in out[1:]),
    )


def batch_norm_gradient(args: tuple, out: tuple) -> tuple:
    """Return native_batch_norm_backward's results with the input's gradient in the input's format."""
    return (in_format(out[0], memory_format(args[1])), *out[1:])


def batch_norm(device: Device, args: tuple, kwargs: dict, out: tuple) -> Steps:
    """Add scale and shift of every channel in the accumulation dtype, for native_batch_norm (cpu/batch_norm_kernel.cpp)."""
    return [*tensors_of(out), [args[0].shape[1] * 4] * 2]


def batch_norm_backward(device: Device, args: tuple, kwargs: dict, out: tuple) -> Steps:
    """Add a second gradient of the input, for native_batch_norm_backward (Normalization.cpp, batch_norm_backward_cpu).

    It is needed if gradient and input are both contiguous or both in channels last.
    """
    grad, input = args[0], args[1]
    wanted = memory_format(input)
    contiguous = all(t.is_contiguous(memory_format=wanted) for t in (grad, input))
    return [*tensors_of(out), [input.nbytes if contiguous else 0]]


def layer_norm(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add a contiguous input, for native_layer_norm (layer_norm.cpp, cuda/layer_norm_kernel.cu)."""
    return [copies(args[0])]


def layer_norm_backward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add contiguous copies of gradient and input, then partial sums [2, threads, N] (cpu/layer_norm_kernel.cpp).

    Operator: native_layer_norm_backward. The sums are those of weight and bias.
    """
    grad, input, shape = args[0], args[1], args[2]
    partial = 2 * torch.get_num_threads() * prod(shape) * input.itemsize
    return [[*copies(grad, input), partial]]


RESULTS: Results = {
    _aten.native_layer_norm.default: statistics,
    _aten.native_group_norm.default: statistics,
    _aten.native_batch_norm.default: batch_norm_result,
    _aten._native_batch_norm_legit.default: batch_norm_result,
    _aten._native_batch_norm_legit_no_training.default: batch_norm_of_fixed_statistics,
    _aten.native_batch_norm_backward.default: batch_norm_gradient,
}
ALLOCATIONS: dict[Any, AllocationRule] = {
    _aten.native_layer_norm.default: after_results(layer_norm),
    _aten.native_layer_norm_backward.default: after_results(layer_norm_backward),
    _aten.native_group_norm.default: copying(0, last=True),
    _aten.native_group_norm_backward.default: copying(1, 0, last=True),
    _aten._native_batch_norm_legit.default: batch_norm,
    _aten._native_batch_norm_legit_no_training.default: batch_norm,
    _aten.native_batch_norm_backward.default: batch_norm_backward,
}

"""Kernels of CUDA that begin with copies of operands: contiguous, or in the input's own memory format.

Each row names the C++ file. Checked against PyTorch's host code over the null driver (tests/null_driver/test_operators.py),
PyTorch 2.15.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sizer.tracing.allocations import AllocationRule, Steps, after_results, copies
from sizer.tracing.device import Device
from sizer.tracing.meta.strides import in_format, suggest_memory_format
from sizer.tracing.operator_tables import Results, listed
from sizer.tracing.values.known import tensors_of


def _described(when: str, formatted: bool) -> str:
    kind = "in the memory format of the input" if formatted else "contiguous"
    return f"Operands that are not {kind} are copied {when} the results (the operator's host code, as DilatedMaxPool2d.cu)."


def after(*positions: int, formatted: bool = False) -> AllocationRule:
    """Return a rule for kernels that make their results, then copies of the arguments at these positions.

    With `formatted` a copy has the memory format that the first argument's strides suggest, otherwise it is contiguous.
    """

    def rule(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
        tensors = [args[position] for position in positions]
        layout = suggest_memory_format(tensors[0]) if formatted else torch.contiguous_format
        yield from tensors_of((out,))
        yield copies(*tensors, layout=layout)

    rule.__doc__ = _described("after", formatted)
    return rule


def before(*positions: int, formatted: bool = False) -> AllocationRule:
    """Return a rule for kernels that make copies of the arguments at these positions, then their results."""

    def rule(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
        tensors = [args[position] for position in positions]
        layout = suggest_memory_format(tensors[0]) if formatted else torch.contiguous_format
        yield tuple(copies(*tensors, layout=layout))
        yield from tensors_of((out,))

    rule.__doc__ = _described("before", formatted)
    return rule


def through_contiguous(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add a contiguous result, if the result is not contiguous, and a contiguous input (AdaptiveMaxPooling2d.cu).

    Sources: AdaptiveMaxPooling2d.cu, UpSampleBilinear2d.cu with antialiasing, UpSampleNearest3d.cu.
    """
    results = tensors_of((out,))
    yield from results
    yield [*copies(*results), *copies(args[0])]


def gradient_through_contiguous(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add a contiguous gradient of the input, a contiguous gradient and contiguous indices (AdaptiveMaxPooling2d.cu).

    Sources: AdaptiveMaxPooling2d.cu, UpSampleTrilinear3d.cu.
    """
    places = [arg for arg in args[2:] if isinstance(arg, Tensor)]
    yield out
    yield [*copies(out), *copies(args[0], *places)]


def adaptive_average_backward(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add a copy of a strided gradient, except for an input in channels last (cuda/AdaptiveAveragePooling.cu).

    Operator: _adaptive_avg_pool2d_backward, with arguments gradient and input.
    """
    grad, input = args
    last = suggest_memory_format(input) == torch.channels_last
    return [out, [] if last else copies(grad, layout=suggest_memory_format(grad))]


def largest_backward(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add a gradient in the input's format, for max_pool3d_with_indices_backward (cuda/DilatedMaxPool3d.cu)."""
    return [out, copies(args[0], layout=suggest_memory_format(args[1]))]


def over_input(args: tuple, out: Tensor) -> Tensor:
    """Return im2col's or col2im's result in a storage as large as the input, if that is larger (native/cuda/Im2Col.cu).

    The result is allocated in the input's size and then resized, which never shrinks a storage (Im2Col.cu, Col2Im.cu).
    """
    input = args[0]
    if out.nbytes >= input.nbytes:
        return out
    return torch.empty(input.numel(), dtype=out.dtype, device=out.device).resize_(out.shape)


def col2im(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add a second result if it is larger than the columns, and a copy of strided columns (native/cuda/Col2Im.cu)."""
    columns = args[0]
    if out.nbytes > columns.nbytes:
        yield [columns.nbytes, out.nbytes]
    yield out
    yield copies(columns)


def dropout_backward_in_format(args: tuple, out: Tensor) -> Tensor:
    """Return native_dropout_backward's result in the format that the gradient's strides suggest (native/cuda/Dropout.cu)."""
    return in_format(out, suggest_memory_format(args[0]))


def glu_backward(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add a separate gradient of an input in channels last (cuda/ActivationGluKernel.cu)."""
    input = args[1]
    return [out, [input.nbytes] if not input.is_contiguous() and input.dim() > 2 and input.stride(1) == 1 else []]


def im2col(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add a contiguous input and, for columns larger than it, a first result of the input's size (native/cuda/Im2Col.cu)."""
    grows = out.nbytes > args[0].nbytes
    yield (*([args[0].nbytes] if grows else []), *copies(args[0]))
    yield out


def between_devices(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add buffers of a copy from or to the host (cuda/Copy.cu, copy_kernel_cuda).

    Operator: _to_copy. A non-blocking copy is converted on the device, and a strided tensor is made contiguous there.
    """
    if not isinstance(args[0], Tensor):  # a number
        return []
    return _between(device, args[0], out, kwargs.get("non_blocking", False))


def into_other_device(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add buffers of aten.copy_ from or to the host (cuda/Copy.cu, copy_kernel_cuda).

    Arguments: target, source, non_blocking.
    """
    return _between(device, args[1], args[0], args[2] if len(args) > 2 else kwargs.get("non_blocking", False))


def _between(device: Device, source: Tensor, target: Tensor, non_blocking: bool) -> Steps:
    to_host = device.is_on_host(target)
    if to_host == device.is_on_host(source):
        return []
    same = source.dtype == target.dtype
    if same and source.stride() == target.stride() and _is_dense(source):
        return []
    if to_host:
        elements = target.numel()  # the source is broadcast to it
        if not non_blocking or same:
            strided = not source.is_contiguous() or source.numel() != elements
            return [[elements * source.itemsize] if strided else []]
        strided = (_is_dense(source) and not source.is_contiguous()) or source.numel() != elements
        return [[elements * target.itemsize] * (2 if strided else 1)]
    if non_blocking and not same:
        return [[target.numel() * source.itemsize]]
    return [copies(target)]


def complex_first(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add a complex result before the real result of complex numbers (UnaryOps.cpp, unary_op_impl_with_complex_to_float_out)."""
    return [[args[0].nbytes]] if args[0].is_complex() and not out.is_complex() else []


_is_dense = torch.ops.aten.is_non_overlapping_and_dense.default


# Pooling/*.cu, UpSample*.cu, ReflectionPad.cu, TensorTopK.cpp, Sorting.cpp, TensorModeKernel.cpp, ScanKernels.cpp
RESULTS: Results = {
    **listed("im2col col2im", over_input),
    **listed("native_dropout_backward", dropout_backward_in_format),
}
ALLOCATIONS: dict[Any, AllocationRule] = {
    **listed(
        "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d max_pool3d_with_indices", after(0, formatted=True)
    ),
    **listed(
        "upsample_nearest1d upsample_nearest2d _upsample_nearest_exact1d _upsample_nearest_exact2d",
        after(0, formatted=True),
    ),
    **listed("avg_pool3d _adaptive_avg_pool3d", after(0)),
    **listed(
        "reflection_pad1d reflection_pad2d reflection_pad3d cummax cummin _cummax_helper _cummin_helper", after(0)
    ),
    **listed(
        "adaptive_max_pool2d adaptive_max_pool3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa", through_contiguous
    ),
    **listed("upsample_nearest3d _upsample_nearest_exact3d", through_contiguous),
    **listed("abs angle", after_results(complex_first)),
    **listed("_to_copy", after_results(between_devices)),
    **listed("copy_", after_results(into_other_device)),
    **listed("max_unpool2d max_unpool3d", after(0, 1)),
    **listed("kthvalue median.dim nanmedian.dim", before(0)),
    **listed("im2col", im2col),
    **listed("col2im", col2im),
    **listed("glu_backward", glu_backward),
    **listed("max_pool2d_with_indices_backward avg_pool2d_backward", after(1, 0, formatted=True)),
    **listed("upsample_bicubic2d_backward _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward", after(0)),
    **listed("upsample_nearest3d_backward _upsample_nearest_exact3d_backward", after(0)),
    **listed(
        "upsample_nearest1d_backward _upsample_nearest_exact1d_backward upsample_linear1d_backward upsample_nearest2d_backward "
        "_upsample_nearest_exact2d_backward upsample_bilinear2d_backward",
        after(0, formatted=True),
    ),
    **listed("max_pool3d_with_indices_backward", largest_backward),
    **listed("avg_pool3d_backward", after(0)),
    **listed("multilabel_margin_loss_backward", after(0)),
    **listed("multi_margin_loss_backward", after(0, 1)),
    **listed("nll_loss_backward", after(1, 2)),
    **listed("reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward", after(0)),
    **listed("fractional_max_pool2d_backward", before(0)),
    **listed("_adaptive_avg_pool2d_backward", adaptive_average_backward),
    **listed("adaptive_max_pool2d_backward upsample_trilinear3d_backward", gradient_through_contiguous),
}

"""Normalization on CUDA: choice between cuDNN's and PyTorch's kernels, fused or not, and the memory inside them.

Layer, RMS and group norm hold copies of strided operands, in the kernels' order, and partial sums of the weights' gradients. As
of PyTorch 2.6 and 2.11 to 2.15: aten/src/ATen/native/cuda/layer_norm_kernel.cu (layer_norm_cuda, layer_norm_backward_cuda,
LaunchGammaBetaBackwardCUDAKernel). 2.6 has no partial sums: they came with pull request 150773, in 2.8. They depend on the
GPU's multiprocessors: a size query (sizer.tape.size_queries) of the kind NORM.
"""

from __future__ import annotations

import warnings
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sizer.base.versions import rules_version
from sizer.catalogue.hardware import HARDWARE
from sizer.tracing.allocations import AllocationRule, Steps, after_results, copies
from sizer.tracing.cuda.by_hardware import NORM, PARTIAL, SEMAPHORES, SUM, SUMS, WARP
from sizer.tracing.cuda.reductions import of_variance
from sizer.tracing.device import Device
from sizer.tracing.log import DeferredSize
from sizer.tracing.meta import refusals
from sizer.tracing.meta.strides import in_format, suggest_memory_format
from sizer.tracing.operator_tables import Results
from sizer.tracing.values.handler import Handler, HandlerContext
from sizer.tracing.values.known import tensors_of

_PROCESSORS = max(hardware.processors for hardware in HARDWARE.values())

_THREADS = 512  # of a block (MAX_BLOCK_SIZE of cuda/Normalization.cuh)

_aten = torch.ops.aten


def batch_norm(device: Device, input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled):
    """Run aten.batch_norm with cuDNN or PyTorch's own kernel (Normalization.cpp, _batch_norm_impl_index)."""
    if not input.numel():  # native/Normalization.cpp, batch_norm
        out = input.clone()
        out = out if weight is None else out * weight[0]
        return out if bias is None else out + bias[0]
    by_cudnn = cudnn_enabled and _uses_cudnn(input, weight, bias, running_mean, running_var, training, eps)
    why = f"{str(input.dtype)[6:]}, {'training' if training else 'evaluation'}"
    device.note_choice("batch norm", "cuDNN" if by_cudnn else "PyTorch's own", why)
    if by_cudnn:
        kept = input.contiguous(memory_format=suggest_memory_format(input))
        return _aten.cudnn_batch_norm.default(kept, weight, bias, running_mean, running_var, training, momentum, eps)[0]
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
    """Run aten.rms_norm: one fused kernel that saves its input and the inverse root [.., 1] (layer_norm.cpp, rms_norm_symint).

    Complex numbers, weights of another dtype and images in channels-last order use a chain of operators, as does 2.6.
    """
    refusals.rms_norm(device.kind, (input, normalized_shape, weight))
    if rules_version(device.version) < (2, 11):
        return _rms_norm_of_2_6(input, len(normalized_shape), weight, eps)
    channels_last = suggest_memory_format(input) not in (torch.contiguous_format, torch.preserve_format)
    if channels_last or input.is_complex() or (weight is not None and weight.dtype != input.dtype):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warning about the missing fused kernel appears in the user's own run
            return _aten.rms_norm.default.decompose(input, normalized_shape, weight, eps)
    device.note_choice("RMS norm", "fused", str(input.dtype)[6:])
    return _FusedRmsNorm.apply(input, list(normalized_shape), weight, eps)[0]


def _rms_norm_of_2_6(input, rank, weight, eps):
    """Run rms_norm_symint of 2.6: halves in float32, converted to the input's dtype before multiplication with the weight."""
    wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    root = wide.pow(2).mean(tuple(range(-rank, 0)), keepdim=True).add_(eps).rsqrt()
    out = wide.mul(root).to(input.dtype)
    return out if weight is None else out.mul(weight)


class _FusedRmsNorm(torch.autograd.Function):
    """Run _fused_rms_norm and its backward pass; on meta the forward pass is a chain of operators."""

    @staticmethod
    def forward(ctx, input, shape, weight, eps):
        if is_traceable_wrapper_subclass(input):  # such as a DTensor, which runs the operator on its local tensor
            with torch._C._AutoDispatchBelowAutograd():
                out, root = _aten._fused_rms_norm.default(input, shape, weight, eps)
        else:
            kept = input.contiguous()  # a copy for the time of the call (layer_norm_kernel.cu, maybe_contiguous)
            root, out = _new_root(kept, shape), torch.empty(input.shape, dtype=input.dtype, device=input.device)
        ctx.save_for_backward(input, weight, root)
        ctx.set_materialize_grads(False)
        ctx.shape = shape
        return out, root

    @staticmethod
    def backward(ctx, grad, root_grad):
        input, weight, root = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2] and weight is not None]
        if torch.is_grad_enabled() or root_grad is not None:
            dx, dw = _differentiable_rms_norm_backward(grad, root_grad, input, ctx.shape, root, weight, wanted)
            return dx, None, dw, None
        grads = _aten._fused_rms_norm_backward.default(grad, input, ctx.shape, root, weight, wanted)
        return grads[0], None, grads[1], None


def _new_root(input, shape):
    rows = [*input.shape[: input.dim() - len(shape)], *[1] * len(shape)]
    return torch.empty(rows, dtype=torch.promote_types(input.dtype, torch.float32), device=input.device)


def fused_rms_norm(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return results as the kernel's, for _fused_rms_norm below autograd: without it, meta runs a chain of operators."""
    input, shape, *_ = args
    return torch.empty_like(input, memory_format=torch.contiguous_format), _new_root(input, shape)


def _differentiable_rms_norm_backward(grad, root_grad, input, shape, root, weight, wanted):
    """Return the gradients of input and weight for a second derivative.

    Source: FunctionsManual.cpp, infinitely_differentiable_native_rms_norm_backward.
    """
    inner = tuple(range(input.dim() - len(shape), input.dim()))
    outer = tuple(range(input.dim() - len(shape)))
    cubed = root.pow(3)
    scaled = grad if grad is None or weight is None else grad * weight
    dx = dw = None
    if wanted[0]:
        if scaled is not None:
            summed = (input * scaled).sum(inner, True)
            product = input * cubed  # stays until the end of the expression in C++
            dx = root * scaled - (product / prod(shape)) * summed
            del product
        if root_grad is not None:
            through_root = -(input * cubed / prod(shape)) * root_grad
            dx = through_root if dx is None else dx + through_root
    if wanted[1] and grad is not None:
        dw = grad * (input * root)
        dw = dw.sum(outer) if outer else dw
    return dx, dw


def batch_norm_of_strided(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add a number for a missing weight or bias of native_batch_norm, for a strided input (cuda/Normalization.cu).

    Arguments: input, weight, bias, mean, variance, training, ... In training, its variance is that of a float32 copy of bfloat16.
    In channels last there are partial results of many blocks. Source: batch_norm_choose_impl.
    """
    input, training = args[0], args[5]
    if training and _channels_last(input):
        yield from _partial(input, 4)
        return
    last = input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last)
    if input.is_contiguous() or last:
        return
    if training:
        copied = torch.empty_like(input, dtype=torch.float32) if input.dtype == torch.bfloat16 else None
        varied = of_variance(input if copied is None else copied, (0, *range(2, input.dim())))
        yield varied if copied is None else [copied.nbytes, *varied]
    yield [4 for one in args[1:3] if one is None]


def norm(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add a contiguous copy of a strided input (cuda/layer_norm_kernel.cu)."""
    yield tuple(copies(args[0]))
    yield from tensors_of(out)


def fused_rms(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add a contiguous copy of a strided input, then the root, then the result (cuda/layer_norm_kernel.cu)."""
    yield tuple(copies(args[0]))
    yield from reversed(tensors_of(out))


def norm_backward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add contiguous copies of input and gradient, and partial sums of the weight's and bias' gradients (layer_norm_kernel.cu).

    The gradient is copied after the results. Partial sums exist since 2.8, for matrices with many narrow rows: one row for 32
    rows, their sum, and the memory of summing them. Source: cuda/layer_norm_kernel.cu.
    """
    yield tuple(copies(args[1]))
    yield from tensors_of(out)
    yield copies(args[0])
    gradients = tensors_of(out[1:])
    columns = prod(args[2])
    rows = args[1].numel() // columns if columns else 0
    if device.version < (2, 8) or columns // WARP >= _PROCESSORS // 2 or not gradients:
        return  # none on any GPU, for any number of rows
    itemsize = gradients[0].itemsize
    yield tuple(_deferred(SUMS, rows, columns, itemsize) for _ in gradients)
    for _ in gradients:
        yield [_deferred(which, rows, columns, itemsize) for which in (SUM, PARTIAL, SEMAPHORES)]


def _deferred(which: str, rows: int, columns: int, itemsize: int) -> DeferredSize:
    return DeferredSize(0, NORM, (which, str(itemsize)), (rows, columns))


def group_norm(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add mean and deviation of half-precision inputs in float32, and scales and shifts (group_norm_kernel.cu).

    There are a scale and a shift per sample and channel, with weights or in channels last. The input is copied unless it is
    contiguous in its own memory format.
    """
    input, weight, bias, samples, channels, pixels, groups = args[:7]
    layout = suggest_memory_format(input)
    wide = [samples * groups * 4] * 2 if input.dtype in (torch.float16, torch.bfloat16) else []
    scaled = pixels > 1 and (weight is not None or bias is not None or layout != torch.contiguous_format)
    yield tuple(copies(input, layout=layout))
    yield from tensors_of(out)
    yield [*wide, *([samples * channels * _summed(input)] * 2 if scaled else [])]


def group_norm_backward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add two sums for each sample and channel, and two for each group (group_norm_kernel.cu).

    With weights, contiguous images also need a factor for each sample and channel. Input and gradient are copied unless they
    have the input's memory format. Images of one pixel need no sums.
    """
    grad, input, weight, samples, channels, pixels, groups = (
        args[0],
        args[1],
        args[4],
        args[5],
        args[6],
        args[7],
        args[8],
    )
    layout = suggest_memory_format(input)
    yield tuple(copies(input, grad, layout=layout))
    yield from tensors_of(out)
    each = _summed(input)
    sums = [] if pixels == 1 else [samples * channels * each] * 2
    factor = [samples * channels * each] if sums and weight is not None and layout == torch.contiguous_format else []
    yield [*sums, *[samples * groups * each] * 2, *factor]


def _summed(input: Tensor) -> int:
    """Return the bytes of a sum of the input's elements: 8 in double precision, else 4."""
    return max(4, input.itemsize)


def batch_norm_backward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add the memory of native_batch_norm_backward (cuda/Normalization.cu, batch_norm_backward_cuda).

    Arguments: gradient, input, weight, .., training, .., mask. Gradient and input become [N, C, pixels]. With channels last,
    two float32 sums for each channel are made. Without weights, a gradient in another format needs one more number
    (batch_norm_elementwise_backward_train).
    """
    grad, input, weight, training, wanted = args[0], args[1], args[2], args[7], args[9]
    if not (training or wanted[1] or wanted[2]):
        yield from tensors_of(out)
        return
    if _channels_last(input):
        yield (input.shape[1] * 4,) * 2
        yield (4,) if weight is None and not _channels_last(grad) else ()
    else:
        yield tuple(tensor.nbytes for tensor in (input, grad) if _is_copied(tensor))
    yield from tensors_of(out)


def _is_copied(tensor: Tensor) -> bool:
    """Return True if `reshape` to [N, C, pixels] copies a tensor."""
    shaped = tensor.reshape(*tensor.shape[:2], -1)
    return shaped.untyped_storage()._cdata != tensor.untyped_storage()._cdata


def batch_norm_gradient(args: tuple, out: tuple) -> tuple:
    """Return native_batch_norm_backward's results with a contiguous gradient of the input.

    Arguments: gradient, input, .., training, ... In training, a gradient in channels last stays so.
    """
    input, training = args[1], args[7]
    last = training and _channels_last(input)
    return (in_format(out[0], suggest_memory_format(input) if last else torch.contiguous_format), *out[1:])


def _channels_last(input: Tensor) -> bool:
    """Return True if channels-last kernels support the input (batch_norm_use_channels_last_kernels)."""
    if input.is_contiguous():
        return input.dim() > 1 and input.stride(1) == 1
    return suggest_memory_format(input) != torch.contiguous_format


def group_norm_in_format(args: tuple, out: tuple) -> tuple:
    """Return native_group_norm's result in the memory format that the input's strides suggest (group_norm.cpp)."""
    layout = suggest_memory_format(args[0])
    if layout == torch.contiguous_format:
        return out
    made = torch.empty(out[0].shape, dtype=out[0].dtype, device=out[0].device, memory_format=layout)
    return (made, *out[1:])


# ----------------------------------------------------------------------------------------------------------- over ranks


def batch_norm_stats(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the mean and the deviation of each channel, for batch_norm_stats (cuda/Normalization.cu)."""
    input = args[0]
    if not input.is_meta:
        return NotImplemented
    return tuple(_per_channel(input.shape[1], _accumulated(input.dtype)) for _ in range(2))


def batch_norm_gather_stats(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the mean and the deviation over all ranks, for batch_norm_gather_stats_with_counts.

    Arguments: input, mean [ranks, C], ...
    """
    mean = args[1]
    if not mean.is_meta:
        return NotImplemented
    return tuple(_per_channel(mean.shape[1], _accumulated(mean.dtype)) for _ in range(2))


def batch_norm_elements(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return a result like the input, for batch_norm_elemt."""
    return torch.empty_like(args[0], memory_format=suggest_memory_format(args[0])) if args[0].is_meta else NotImplemented


def batch_norm_backward_reduce(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return two sums of each channel, and the gradients of weight and bias, for batch_norm_backward_reduce.

    Arguments: gradient, input, mean, deviation, weight, input_g, weight_g, bias_g. With channels last all four are returned.
    """
    grad, input, mean, weight, wanted = args[0], args[1], args[2], args[4], args[5:8]
    if not input.is_meta:
        return NotImplemented
    if _channels_last(grad) and _channels_last(input):
        like = mean.dtype if weight is None else weight.dtype
        channels = 0 if weight is None else input.shape[1]
        return (*(_per_channel(len(mean), mean.dtype) for _ in range(2)), *(_per_channel(channels, like) for _ in range(2)))
    sums = tuple(torch.empty_like(mean) if wanted[0] else None for _ in range(2))
    return (*sums, *(_per_channel(input.shape[1], weight.dtype) if one else None for one in wanted[1:]))


def batch_norm_backward_elements(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the input's gradient, for batch_norm_backward_elemt."""
    grad, input = args[0], args[1]
    if not input.is_meta:
        return NotImplemented
    kept = torch.preserve_format if _channels_last(grad) else torch.contiguous_format
    return torch.empty_like(input, memory_format=kept)


def stats_of_channels_last(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add partial results of many blocks in channels last (cuda/Normalization.cuh, flexible_launch_configs).

    Operator: batch_norm_stats.
    """
    return _partial(args[0], 4) if _channels_last(args[0]) else []


def reduce_of_channels_last(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add partial results of two numbers, as for batch_norm_stats (cuda/Normalization.cuh).

    Operator: batch_norm_backward_reduce.
    """
    return _partial(args[1], 2) if _channels_last(args[0]) and _channels_last(args[1]) else []


def _partial(input: Tensor, numbers: int) -> Steps:
    channels = input.shape[1]
    rows = input.numel() // channels
    width = min(_power(channels), 32)
    height = min(_power(-(-rows // 16)), _THREADS // width)
    if width * height != _THREADS:
        width = min(_power(channels), _THREADS // height)
    blocks = min(-(-rows // (height * 16)), 128)
    return [] if blocks < 8 else [[numbers * channels * blocks * 4, -(-channels // width) * 4]]


def _power(number: int) -> int:
    return 1 << (number.bit_length() - 1)


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _per_channel(channels: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(channels, dtype=dtype, device="meta")


KERNELS = {_aten.batch_norm.default: batch_norm, _aten.rms_norm.default: rms_norm}
RESULTS: Results = {
    _aten.native_batch_norm_backward.default: batch_norm_gradient,
    _aten.native_group_norm.default: group_norm_in_format,
}
HANDLERS: dict[Any, Handler] = {
    _aten.batch_norm_stats.default: batch_norm_stats,
    _aten.batch_norm_gather_stats_with_counts.default: batch_norm_gather_stats,
    _aten.batch_norm_elemt.default: batch_norm_elements,
    _aten.batch_norm_backward_reduce.default: batch_norm_backward_reduce,
    _aten.batch_norm_backward_elemt.default: batch_norm_backward_elements,
    _aten._fused_rms_norm.default: fused_rms_norm,
}
ALLOCATIONS: dict[Any, AllocationRule] = {
    _aten.batch_norm_stats.default: after_results(stats_of_channels_last),
    _aten.batch_norm_backward_reduce.default: after_results(reduce_of_channels_last),
    _aten.native_batch_norm.default: after_results(batch_norm_of_strided),
    _aten.native_layer_norm.default: norm,
    _aten.native_layer_norm_backward.default: norm_backward,
    _aten._fused_rms_norm.default: fused_rms,
    _aten._fused_rms_norm_backward.default: norm_backward,
    _aten.native_group_norm.default: group_norm,
    _aten.native_group_norm_backward.default: group_norm_backward,
    _aten.native_batch_norm_backward.default: batch_norm_backward,
}

"""Convolutions on the CPU: choice of library, and memory inside oneDNN's and PyTorch's own kernels, in the order of allocation.

As of PyTorch 2.11 to 2.15. Memory from PyTorch's allocator is counted. Libraries that allocate for themselves (MKL's buffers)
are not counted; the profiler does not see them either. oneDNN's layouts are in `onednn`.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from sizer.tracing.allocations import AllocationRule, Step, Steps
from sizer.tracing.cpu import onednn, processor
from sizer.tracing.cpu.onednn import Convolution, Layout
from sizer.tracing.device import Device
from sizer.tracing.meta.strides import memory_format

_LIBRARY_AT = 16  # ConvParams::use_mkldnn
_aten = torch.ops.aten


class _Call:
    """Call of aten.convolution as in ConvParams; one dimension is viewed as two (view1d_as_2d)."""

    def __init__(self, input: Tensor, weight: Tensor, options: tuple, result: tuple[int, ...], bias: bool) -> None:
        stride, padding, dilation, self.transposed, output_padding, self.groups = options
        self.input, self.weight, self.bias = input, weight, bias
        dimensions = input.dim() - 2
        stride, padding, dilation, output_padding = (
            tuple(v) * (dimensions if len(v) == 1 else 1) for v in (stride, padding, dilation, output_padding)
        )
        sizes = tuple(input.shape[2:]), tuple(weight.shape[2:]), tuple(result[2:])
        self.image, self.kernel, self.result = ((1, *s) if dimensions == 1 else s for s in sizes)
        one, zero = ((1,), (0,)) if dimensions == 1 else ((), ())
        self.stride, self.padding, self.dilation = (*one, *stride), (*zero, *padding), (*one, *dilation)
        self.big_output_padding = any(o >= s for o, s in zip(output_padding, stride, strict=True))

    @property
    def plain(self) -> bool:
        """Return whether the kernel has one pixel, unstrided and unpadded: its columns are the image itself."""
        return prod(self.kernel) == 1 and prod(self.stride) == 1 and not any(self.padding)

    def uses_library(self) -> bool:
        """Return whether oneDNN is used (ConvParams::use_mkldnn of aten/src/ATen/native/Convolution.cpp)."""
        if not torch.backends.mkldnn.is_available() or not torch._C._get_mkldnn_enabled():
            return False
        if self.transposed and self.big_output_padding:
            return False
        if self.input.dtype != torch.float32:
            return processor.onednn_takes(self.input.dtype)
        batch = self.input.shape[0]
        height, width = self.kernel[-2:]
        if self.library_waits_for_batch() and batch < _LIBRARY_AT:
            return False
        pixels = prod((*self.input.shape[:2], *self.image)[:4])
        return self.groups > 1 or (height > 3 and width > 3) or batch > 1 or pixels > 20480

    def library_waits_for_batch(self) -> bool:
        """Return whether oneDNN is used for large batches only: a kernel of one pixel on a single thread."""
        several = prod(self.stride) > 1 or prod(self.dilation) > 1 or self.kernel[-2:] != (1, 1)
        return self.input.dtype == torch.float32 and not several and torch.get_num_threads() == 1

    def channels_last(self) -> bool:
        """Return whether oneDNN's tensors are in channels last.

        Source: mkldnn_conv_use_channels_last (aten/src/ATen/native/ConvUtils.h).
        """
        return self.input.dim() > 3 and memory_format(self.input, self.weight) != torch.contiguous_format

    def convolution(self) -> Convolution:
        """Return the call for oneDNN; a transposed convolution becomes the convolution of which it computes the gradient."""
        outputs, inputs = self.weight.shape[:2]
        image, result = (self.result, self.image) if self.transposed else (self.image, self.result)
        return Convolution(
            batch=self.input.shape[0],
            groups=self.groups,
            inputs=inputs,
            outputs=outputs // self.groups,
            image=image,
            result=result,
            kernel=self.kernel,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            itemsize=self.input.itemsize,
            simd=processor.floats_per_register(),
            threads=torch.get_num_threads(),
            bias=self.bias,
            emulated=self.input.dtype == torch.bfloat16 and not processor.multiplies_bfloat16(),
        )


def _contiguous(tensor: Tensor, last: bool) -> int:
    """Return the bytes of the copy by `tensor.contiguous(format)`; 0 if the tensor is in that format."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = formats.get(tensor.dim(), torch.contiguous_format) if last else torch.contiguous_format
    return 0 if tensor.is_contiguous(memory_format=wanted) else tensor.nbytes


def convolution(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add the memory of aten.convolution (mkldnn/Conv.cpp, ConvolutionMM2d.cpp).

    Sources: mkldnn/Conv.cpp, ConvolutionMM2d.cpp, ConvolutionMM3d.cpp, NaiveDilatedConvolution.cpp.
    """
    input, weight, bias, *options = args
    call = _Call(input, weight, tuple(options), tuple(out.shape), bias is not None)
    if out.numel() == 0:
        return [out]
    if not call.uses_library():
        if call.library_waits_for_batch():
            device.changes_at = _LIBRARY_AT
        return _slow_forward(call, out)
    c, last = call.convolution(), call.channels_last()
    copies = [_contiguous(input, last), _contiguous(weight, last)]
    if last:
        layout = onednn.backward_data_last(c) if call.transposed else onednn.forward_last(c)
        return [out, [*copies, layout.scratch, layout.weight]]
    if call.transposed:
        return _copied(onednn.backward_data(c), copies, out, "source")
    return _copied(onednn.forward(c), copies, out, "result")


def _copied(layout: Layout, copies: list[int], out: Tensor, side: str) -> Steps:
    """Return the result in oneDNN's layout, then the tensor to which it is copied (mkldnn_to_dense)."""
    computed = getattr(layout, side)
    again = [out.nbytes] if layout.is_last and out.shape[1] > 1 else []
    before = [*copies, layout.scratch, layout.source, layout.weight, layout.result]
    return [before, out, [*copies, computed, *again]]


def convolution_backward(device: Device, args: tuple, kwargs: dict, out: tuple) -> Steps:
    """Add the memory of aten.convolution_backward: the input's gradient, then those of weight and bias (mkldnn/Conv.cpp).

    Each has its own copies.
    """
    grad, input, weight, _, *options, wanted = args
    gradients = [t for t in out if t is not None]
    call = _Call(input, weight, tuple(options), tuple(grad.shape), wanted[2])
    if grad.numel() == 0:
        return gradients
    if not call.uses_library():
        return _slow_backward(call, _contiguous(grad, False), out)
    c, last = call.convolution(), call.channels_last()
    copies = [_contiguous(t, last) for t in (grad, input, weight)]
    steps: list[Step] = []
    if wanted[0]:
        steps += _data_steps(call, c, last, copies, out[0])
    if wanted[1] or wanted[2]:
        steps += _weight_steps(c, last, copies, out)
    return steps


def _data_steps(call: _Call, c: Convolution, last: bool, copies: list[int], out: Tensor) -> Steps:
    if last:
        layout = onednn.forward_last(c) if call.transposed else onednn.backward_data_last(c)
        return [out, [*copies, layout.weight, layout.scratch]]
    if call.transposed:
        return _copied(onednn.forward(c), copies, out, "result")
    return _copied(onednn.backward_data(c), copies, out, "source")


def _weight_steps(c: Convolution, last: bool, copies: list[int], out: tuple) -> Steps:
    layout = onednn.backward_weights_last(c) if last else onednn.backward_weights(c)
    bias = [out[2]] if out[2] is not None else []
    sums = out[2].nbytes if bias else 0
    computing = [*copies, layout.source, layout.weight, layout.result, layout.scratch, sums]
    if out[1] is None:
        return [computing, *bias]
    return [
        computing,
        *bias,
        [layout.weight, sums],
        out[1],
        [*copies, layout.weight, sums, out[1].nbytes if last else 0],
    ]


def _columns(call: _Call, images: int) -> int:
    """Return the bytes of columns [images, channels * kernel, pixels] of the input.

    A transposed convolution unfolds the smaller side.
    """
    channels = call.weight.shape[1]
    pixels = call.image if call.transposed else call.result
    return images * channels * prod(call.kernel) * prod(pixels) * call.input.itemsize


def _slow_columns(call: _Call) -> int:
    """Return the bytes of the whole batch's columns; of one image's columns for dilated or transposed convolutions."""
    if call.transposed or prod(call.dilation) > 1:
        return _columns(call, 1)
    return 0 if call.plain else _columns(call, call.input.shape[0])


def _slow_forward(call: _Call, out: Tensor) -> Steps:
    copies = [_contiguous(call.input, False)]
    columns = _slow_columns(call)
    groups = [out.nbytes] if call.groups > 1 else []  # computed one group after another, then concatenated
    if call.transposed or prod(call.dilation) > 1:
        return [out, [*copies, columns, *groups]]
    return [[*copies, columns], out, [*copies, columns, *groups]]


def _slow_backward(call: _Call, copy: int, out: tuple) -> Steps:
    columns = _slow_columns(call)
    grad_input, grad_weight, grad_bias = out
    steps: list[Step] = []
    if grad_input is not None:
        steps += [grad_input, [copy, columns]]
    steps += [t for t in (grad_bias, grad_weight) if t is not None]
    return [*steps, [copy, columns]] if grad_weight is not None else steps


ALLOCATIONS: dict[Any, AllocationRule] = {
    _aten.convolution.default: convolution,
    _aten.convolution_backward.default: convolution_backward,
}

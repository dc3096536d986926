"""Memory formats: the strides of results where meta kernels return others than the device's kernels do.

What follows an operator makes a copy or not by these strides. As of PyTorch 2.11 to 2.15.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from sizer.tracing.tables import Results

_aten = torch.ops.aten
_LAST = (torch.channels_last, torch.channels_last_3d)


def memory_format(*tensors: Tensor) -> torch.memory_format:
    """Channels last if it is the format of one of the tensors [N, C, ..], in double precision never."""
    for tensor in tensors:
        if tensor.dtype != torch.float64 and (found := suggest_memory_format(tensor)) in _LAST:
            return found
    return torch.contiguous_format


def in_format(tensor: Tensor | None, wanted: torch.memory_format) -> Tensor | None:
    """The tensor itself where it is in the format, else a new one that is."""
    if tensor is None or tensor.is_contiguous(memory_format=wanted):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device, memory_format=wanted)


def _is_surely_contiguous(tensor: Tensor) -> bool:
    """Contiguous and not in channels last as well, as a tensor of one channel or one pixel may be."""
    return tensor.stride(1) != 1 and tensor.is_contiguous()


def convolution(args: tuple, out: Tensor) -> Tensor:
    """convolution(input, weight, ..): channels last where they are in the input or the weight, contiguous on meta.

    Source: mkldnn_conv_use_channels_last and cudnn_conv_suggest_memory_format (aten/src/ATen/native/ConvUtils.h); in
    torch/_meta_registrations.py, meta_conv: "Memory format is left as contiguous".
    """
    if _is_surely_contiguous(args[0]) and _is_surely_contiguous(args[1]):
        return out
    return in_format(out, memory_format(args[0], args[1]))


def convolution_backward(args: tuple, out: tuple) -> tuple:
    """convolution_backward(gradient, input, weight, ..): the gradients of input and weight likewise, whatever the gradient's
    strides, which PyTorch 2.11's meta kernel follows.

    Source: determine_backend_memory_format in aten/src/ATen/native/Convolution.cpp.
    """
    plain = _is_surely_contiguous(args[1]) and _is_surely_contiguous(args[2])
    wanted = torch.contiguous_format if plain else memory_format(args[1], args[2])
    return (in_format(out[0], wanted), in_format(out[1], wanted), out[2])


def layer_norm_backward(args: tuple, out: tuple) -> tuple:
    """native_layer_norm_backward: the input's gradient is contiguous (layer_norm.cpp), on meta it has the gradient's strides."""
    return (in_format(out[0], torch.contiguous_format), *out[1:])


def group_norm_backward(args: tuple, out: tuple) -> tuple:
    """native_group_norm_backward(gradient, input, ..): the input's gradient in its dtype, on meta in the widest of the arguments
    (group_norm.cpp)."""
    input = args[1]
    if out[0] is None or out[0].dtype == input.dtype:
        return out
    return (
        torch.empty(input.shape, dtype=input.dtype, device=input.device, memory_format=memory_format(input)),
        *out[1:],
    )


RESULTS: Results = {
    _aten.convolution.default: convolution,
    _aten.convolution_backward.default: convolution_backward,
    _aten.native_layer_norm_backward.default: layer_norm_backward,
    _aten.native_group_norm_backward.default: group_norm_backward,
}

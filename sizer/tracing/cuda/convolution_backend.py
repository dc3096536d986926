"""Which backend PyTorch picks for a convolution on CUDA: aten/src/ATen/native/Convolution.cpp, versions 2.6 and 2.11 to 2.15.

2.6 does not know the exception for the cuDNN of 9.8 to 9.14, with which it was not released.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from sizer.tracing.cuda import cudnn
from sizer.tracing.meta.strides import memory_format

_CONTIGUOUS = torch.contiguous_format


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call as ConvParams has it; one dimension is seen as two (view1d_as_2d, view4d)."""

    input: Tensor
    weight: Tensor
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @property
    def is_depthwise(self) -> bool:
        """Each channel by itself."""
        channels = self.input.shape[1]
        several = not self.transposed and self.groups > 1 and channels == self.groups
        return several and self.weight.shape[0] % channels == 0

    @property
    def is_dilated(self) -> bool:
        """Whether there are holes in the kernel."""
        return any(d != 1 for d in self.dilation)

    @property
    def is_plain(self) -> bool:
        """A kernel of one pixel, neither strided nor padded: its columns are the image itself."""
        return prod(self.weight.shape[2:]) == 1 and prod(self.stride) == 1 and not any(self.padding)

    @property
    def layout(self) -> torch.memory_format:
        """cudnn_conv_suggest_memory_format (ConvUtils.h)."""
        return memory_format(self.input, self.weight)


def as_call(input: Tensor, weight: Tensor, options: tuple) -> Call:
    """The call of aten.convolution with stride, padding, dilation, transposed, output_padding and groups."""
    stride, padding, dilation, transposed, output_padding, groups = options
    rank = weight.dim() - 2
    stride, padding, dilation, output_padding = (
        tuple(v) * (rank if len(v) == 1 else 1) for v in (stride, padding, dilation, output_padding)
    )
    if rank == 1:
        stride, padding, dilation, output_padding = (1, *stride), (0, *padding), (1, *dilation), (0, *output_padding)
        input, weight = input.contiguous().unsqueeze(2), weight.unsqueeze(2)
    return Call(
        input=input, weight=weight, stride=stride, padding=padding, dilation=dilation, transposed=transposed,
        output_padding=output_padding, groups=groups,
    )  # fmt: skip


def backend_of(call: Call, capability: tuple[int, int]) -> str:
    """ "cudnn", "depthwise", "slow", "slow dilated", "slow transposed" or "empty" (select_conv_backend)."""
    if call.input.numel() == 0 or call.weight.numel() == 0:
        return "empty"
    if call.is_depthwise:
        taken = _cudnn_takes_depthwise(call, call.input.dtype, call.input.shape[0], capability)
        return "cudnn" if taken else "depthwise"
    if _cudnn_takes(call, capability):
        return "cudnn"
    if call.transposed:
        return "slow transposed"
    return "slow dilated" if call.is_dilated or call.input.dim() == 5 else "slow"


def _cudnn_takes(call: Call, capability: tuple[int, int]) -> bool:
    """ConvParams::use_cudnn."""
    if not torch.backends.cudnn.enabled or any(o >= s for o, s in zip(call.output_padding, call.stride, strict=True)):
        return False
    half, several = call.input.dtype in (torch.float16, torch.bfloat16), prod(call.weight.shape[2:]) > 1
    volume = call.weight.dim() == 5 and call.layout == _CONTIGUOUS
    if half and several and volume and 90800 <= (cudnn.version() or 0) < 91500:
        return False
    return call.input.dtype != torch.bfloat16 or capability >= (8, 0)


def _cudnn_takes_depthwise(call: Call, dtype: torch.dtype, batch: int, capability: tuple[int, int]) -> bool:
    """ConvParams::use_cudnn_depthwise, for tensors of less than 2**31 elements."""
    if not torch.backends.cudnn.enabled:
        return False
    if call.layout != _CONTIGUOUS:
        return True
    square = call.stride[0] == call.stride[-1] or call.input.shape[2] == 1
    if capability < (7, 0) or dtype != torch.float16 or call.input.dim() != 4 or call.is_dilated or not square:
        return False
    return call.input.shape[1] >= 32 and _is_workload_for_cudnn(call, batch)


def _is_workload_for_cudnn(call: Call, batch: int) -> bool:
    """check_cudnn_depthwise_workload_with_filter."""
    (_, channels, height, width), (kernel, side), stride = call.input.shape, call.weight.shape[2:], call.stride[-1]
    if height == 1 and stride == 1:
        return True
    if kernel != side or side not in (1, 3, 5) or width < 7 or stride not in (1, 2):
        return False
    if stride == 1:
        return True
    if batch == 1:
        return side > 1 or width <= 28
    if side == 1:
        return batch <= 16 and channels >= 128 and width <= 7
    return channels >= 512 or (channels >= 256 and width >= 28)


def note_differences(device: Any, call: Call) -> None:
    """Tell the device where the other half precision or a batch of one takes another backend."""
    if not call.is_depthwise or call.input.dim() != 4 or call.layout != _CONTIGUOUS:
        return
    one, several = (_cudnn_takes_depthwise(call, torch.float16, batch, device.capability) for batch in (1, 2))
    device.halves_differ |= one or several
    device.differs_at_one |= one != several

"""Convolutions on CUDA: the backend that PyTorch picks and what it holds, in the order in which it does.

As of PyTorch 2.11 to 2.15: aten/src/ATen/native/Convolution.cpp (select_conv_backend, _convolution, convolution_backward),
cudnn/ConvShared.cpp, and for what cuDNN does not take cuda/ConvolutionMM2d.cu, NaiveDilatedConvolution.cu,
NaiveConvolutionTranspose2d.cu, NaiveConvolutionTranspose3d.cu, DepthwiseConv2d.cu and DepthwiseConv3d.cu.
What cuDNN itself works in is a question (sizer.memory.questions) of the kind CUDNN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from sizer.tracing import cudnn
from sizer.tracing.kernels.formats import memory_format
from sizer.tracing.log import Asked
from sizer.tracing.steps import PRODUCT, Steps

CUDNN = "cuDNN convolution"

_aten = torch.ops.aten
_CONTIGUOUS = torch.contiguous_format


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
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
        channels = self.input.shape[1]
        several = not self.transposed and self.groups > 1 and channels == self.groups
        return several and self.weight.shape[0] % channels == 0

    @property
    def is_dilated(self) -> bool:
        return any(d != 1 for d in self.dilation)

    @property
    def is_plain(self) -> bool:
        """A kernel of one pixel, neither strided nor padded: its columns are the image itself."""
        return prod(self.weight.shape[2:]) == 1 and prod(self.stride) == 1 and not any(self.padding)

    @property
    def layout(self) -> torch.memory_format:
        """cudnn_conv_suggest_memory_format (ConvUtils.h)."""
        return memory_format(self.input, self.weight)


def _call(input: Tensor, weight: Tensor, options: tuple) -> _Call:
    stride, padding, dilation, transposed, output_padding, groups = options
    rank = weight.dim() - 2
    stride, padding, dilation, output_padding = (
        tuple(v) * (rank if len(v) == 1 else 1) for v in (stride, padding, dilation, output_padding)
    )
    if rank == 1:
        stride, padding, dilation, output_padding = (1, *stride), (0, *padding), (1, *dilation), (0, *output_padding)
        input, weight = input.contiguous().unsqueeze(2), weight.unsqueeze(2)
    return _Call(
        input=input, weight=weight, stride=stride, padding=padding, dilation=dilation, transposed=transposed,
        output_padding=output_padding, groups=groups,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- backend


def backend_of(call: _Call, capability: tuple[int, int]) -> str:
    """ "cudnn", "depthwise", "slow", "slow dilated", "slow transposed" or "empty" (select_conv_backend)."""
    if call.input.numel() == 0 or call.weight.numel() == 0:
        return "empty"
    if call.is_depthwise:
        return (
            "cudnn" if _cudnn_takes_depthwise(call, call.input.dtype, call.input.shape[0], capability) else "depthwise"
        )
    if _cudnn_takes(call, capability):
        return "cudnn"
    if call.transposed:
        return "slow transposed"
    return "slow dilated" if call.is_dilated or call.input.dim() == 5 else "slow"


def _cudnn_takes(call: _Call, capability: tuple[int, int]) -> bool:
    """ConvParams::use_cudnn."""
    if not torch.backends.cudnn.enabled or any(o >= s for o, s in zip(call.output_padding, call.stride, strict=True)):
        return False
    half, several = call.input.dtype in (torch.float16, torch.bfloat16), prod(call.weight.shape[2:]) > 1
    if (
        half
        and several
        and call.weight.dim() == 5
        and call.layout == _CONTIGUOUS
        and 90800 <= (cudnn.version() or 0) < 91500
    ):
        return False
    return call.input.dtype != torch.bfloat16 or capability >= (8, 0)


def _cudnn_takes_depthwise(call: _Call, dtype: torch.dtype, batch: int, capability: tuple[int, int]) -> bool:
    """ConvParams::use_cudnn_depthwise, for tensors of less than 2**31 elements."""
    if not torch.backends.cudnn.enabled:
        return False
    if call.layout != _CONTIGUOUS:
        return True
    square = call.stride[0] == call.stride[-1] or call.input.shape[2] == 1
    if capability < (7, 0) or dtype != torch.float16 or call.input.dim() != 4 or call.is_dilated or not square:
        return False
    return call.input.shape[1] >= 32 and _is_workload_for_cudnn(call, batch)


def _is_workload_for_cudnn(call: _Call, batch: int) -> bool:
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


def _note_differences(device: Any, call: _Call) -> None:
    """Tells the device where the other half precision or a batch of one takes another backend."""
    if not call.is_depthwise or call.input.dim() != 4 or call.layout != _CONTIGUOUS:
        return
    one, several = (_cudnn_takes_depthwise(call, torch.float16, batch, device.capability) for batch in (1, 2))
    device.halves_differ |= one or several
    device.differs_at_one |= one != several


# ----------------------------------------------------------------------------------------------------------------- steps


def convolution(device: Any, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Copies of operands in another layout and cuDNN's workspace, taken as copies of all operands in NHWC where tensor cores
    serve NCHW tensors (cudnn/ConvShared.cpp, Conv_v8.cpp); without cuDNN columns and cuBLAS's (ConvolutionMM2d.cu)."""
    input, weight, bias, *options = args
    call = _call(input, weight, tuple(options))
    _note_differences(device, call)
    backend, result = backend_of(call, device.capability), _view4d(out)
    if input.dim() == 3 and not input.is_contiguous():
        yield (_bytes(input),)
    if backend == "cudnn":
        yield tuple(_copies(call.layout, call.input))
        yield out
        direction, x, y = ("backward data", result, call.input) if call.transposed else ("forward", call.input, result)
        yield [*_copies(call.layout, call.weight), _ask(device, direction, call, x, y, call.weight, call.layout)]
        return
    if backend == "depthwise":
        yield tuple(_copies(_CONTIGUOUS, call.input))
        yield out
        yield _copies(_CONTIGUOUS, call.weight)
        return
    if backend == "empty":
        yield out
        return
    yield (*_copies(_CONTIGUOUS, call.input), *_copies(_CONTIGUOUS, call.weight))
    columns = _columns(call, result, bias is not None)
    for _ in range(call.groups if call.groups > 1 else 0):
        yield (_bytes(out) // call.groups,)
        yield [*_narrowed(call.input, call.groups), *columns, PRODUCT]
    yield out
    if call.groups == 1:
        yield [*columns, PRODUCT]


def convolution_backward(device: Any, args: tuple, kwargs: dict, out: tuple) -> Steps:
    """The same for the gradient of the input, then for the gradient of the weight, as they come to be (cudnn/ConvShared.cpp)."""
    grad, input, weight, _, *options, wanted = args
    call = _call(input, weight, tuple(options))
    _note_differences(device, call)
    backend = backend_of(call, device.capability)
    results = [one if asked else None for one, asked in zip(out, wanted, strict=True)]
    copied = [*((_bytes(t) for t in (grad, input) if not t.is_contiguous()) if input.dim() == 3 else ())]
    yield tuple(copied)
    if backend == "cudnn":
        yield from _backward_of_cudnn(device, call, _view4d(grad), results)
    elif backend in ("depthwise", "empty"):
        yield tuple(_copies(_CONTIGUOUS, call.input, _view4d(grad)))
        first, second = (results[1], results[0]) if call.input.dim() == 4 else (results[0], results[1])
        yield from (one for one in (first, second, results[2]) if one is not None)
    else:
        yield from _backward_by_products(call, backend, _view4d(grad), results)


def _backward_of_cudnn(device: Any, call: _Call, grad: Tensor, results: list[Tensor | None]) -> Iterator:
    """convolution_backward, cudnn_convolution_backward and cudnn_convolution_transpose_backward."""
    layout = call.layout
    yield tuple(_copies(layout, grad, *([call.input] if results[1] is not None else [])))
    if results[0] is not None:
        yield results[0]
        gradient = _view4d(results[0])
        direction, x, y = ("forward", grad, gradient) if call.transposed else ("backward data", gradient, grad)
        yield [*_copies(layout, call.weight), _ask(device, direction, call, x, y, call.weight, layout)]
    if results[1] is not None:
        yield results[1]
        x, y = (grad, call.input) if call.transposed else (call.input, grad)
        yield [_ask(device, "backward filter", call, x, y, _view4d(results[1]), layout)]
    if results[2] is not None:
        yield results[2]


def _backward_by_products(call: _Call, backend: str, grad: Tensor, results: list[Tensor | None]) -> Iterator:
    """Columns and matrix products; groups one after another, put together at the end."""
    columns = _columns(call, grad, False)
    parts = [one for one in (results[0], results[1]) if one is not None]
    yield tuple(_copies(_CONTIGUOUS, call.input, grad, call.weight))
    if call.groups > 1:
        for _ in range(call.groups):
            yield tuple(_bytes(one) // call.groups for one in parts)
            yield [*_narrowed(call.input, call.groups), *_narrowed(grad, call.groups), *columns, PRODUCT]
        yield from (one for one in results if one is not None)
        return
    if backend == "slow dilated":
        yield from (one for one in results if one is not None)
        yield [*columns, PRODUCT]
    elif backend == "slow transposed":
        yield from results[:1] if results[0] is not None else ()
        yield [*columns, PRODUCT] if results[0] is not None else []
        yield from (one for one in results[1:] if one is not None)
        yield [*columns, PRODUCT] if results[1] is not None else []
    else:  # one buffer of columns serves both gradients
        yield from results[:1] if results[0] is not None else ()
        yield tuple(columns)
        yield [PRODUCT] if results[0] is not None else []
        yield from (one for one in (results[2], results[1]) if one is not None)
        yield [PRODUCT] if results[1] is not None else []


def _columns(call: _Call, result: Tensor, bias: bool) -> list[int]:
    """The buffer of columns of one sample; for a transposed convolution they are those of its result, and ones for the bias."""
    inputs, kernel, itemsize = call.input.shape[1] // call.groups, prod(call.weight.shape[2:]), call.input.itemsize
    if not call.transposed:
        return [] if call.is_plain and not call.is_dilated else [inputs * kernel * prod(result.shape[2:]) * itemsize]
    outputs = call.weight.shape[1]
    ones = [prod(result.shape[2:]) * itemsize] if bias else []
    return [outputs * kernel * prod(call.input.shape[2:]) * itemsize, *ones]


def _narrowed(tensor: Tensor, groups: int) -> list[int]:
    """A copy of one group's channels, which lie apart where there is more than one sample (subtensor)."""
    return [_bytes(tensor) // groups] if tensor.shape[0] > 1 else []


# ----------------------------------------------------------------------------------------------------------------- cuDNN


def _ask(
    device: Any, direction: str, call: _Call, x: Tensor, y: Tensor, weight: Tensor, layout: torch.memory_format
) -> int:
    """The workspace's bytes by a model, and what to ask cuDNN for the true ones; benchmarking tries every engine instead."""
    modelled = _modelled(device, call, (x, weight, y))
    if torch.backends.cudnn.benchmark:
        return modelled
    words = [direction, str(x.dtype).removeprefix("torch."), "contiguous" if layout == _CONTIGUOUS else "channels last"]
    if torch.backends.cudnn.conv.fp32_precision == "tf32":
        words.append("tf32")
    if torch.backends.cudnn.deterministic:
        words.append("deterministic")
    begins = [t.storage_offset() * t.itemsize if t.is_contiguous(memory_format=layout) else 0 for t in (x, y, weight)]
    numbers = (*x.shape, *y.shape, *weight.shape, *call.padding, *call.stride, *call.dilation, *begins)
    return Asked(modelled, CUDNN, tuple(words), numbers)


def _modelled(device: Any, call: _Call, operands: tuple[Tensor, ...]) -> int:
    """Copies of the operands in NHWC where tensor cores serve NCHW tensors."""
    tensor_cores = device.capability >= ((8, 0) if call.input.dtype == torch.float32 else (7, 0))
    if not tensor_cores or call.is_depthwise or call.layout != _CONTIGUOUS:
        return 0
    return sum(map(_bytes, operands))


def _copies(layout: torch.memory_format, *tensors: Tensor) -> list[int]:
    return [_bytes(t) for t in tensors if not t.is_contiguous(memory_format=layout)]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _view4d(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(2) if tensor.dim() == 3 else tensor


ASKED = (
    "Copies of operands in another layout and the workspace of the engine that {} (cudnn/ConvShared.cpp, "
    "Conv_v8.cpp); without cuDNN columns and cuBLAS's workspace (ConvolutionMM2d.cu)."
)
INNER = {_aten.convolution.default: convolution, _aten.convolution_backward.default: convolution_backward}

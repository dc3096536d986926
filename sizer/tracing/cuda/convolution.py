"""Convolutions on CUDA: memory inside the backend that PyTorch chooses, in the order of allocation.

As of PyTorch 2.11 to 2.15: aten/src/ATen/native/Convolution.cpp (_convolution, convolution_backward), cudnn/ConvShared.cpp, and
for calls that cuDNN does not support cuda/ConvolutionMM2d.cu, NaiveDilatedConvolution.cu, NaiveConvolutionTranspose2d.cu,
NaiveConvolutionTranspose3d.cu, DepthwiseConv2d.cu and DepthwiseConv3d.cu. cuDNN's own workspace is a size query
(sizer.tape.size_queries) of the kind CUDNN.

*Known limitations*: in channels last, backends other than cuDNN return contiguous tensors, here they are in channels last;
partial sums of bias gradients are left out if convolutions are matrix products.

The choice of backend follows aten/src/ATen/native/Convolution.cpp, versions 2.6 and 2.11 to 2.15. 2.6 does not have the
exception for cuDNN 9.8 to 9.14, as it was not released with these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from sizer.tracing.allocations import PRODUCT, AllocationRule, During, Step, Steps, copies
from sizer.tracing.cuda import cudnn
from sizer.tracing.cuda.by_capability import CUDNN, tensor_cores_from
from sizer.tracing.cuda.reductions import summing
from sizer.tracing.device import Device
from sizer.tracing.log import DeferredSize
from sizer.tracing.meta.strides import in_format, memory_format, suggest_memory_format

_CONTIGUOUS = torch.contiguous_format


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Call as in ConvParams; one dimension is viewed as two (view1d_as_2d, view4d)."""

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
        """Return True if each channel is convolved by itself."""
        channels = self.input.shape[1]
        several = not self.transposed and self.groups > 1 and channels == self.groups
        return several and self.weight.shape[0] % channels == 0

    @property
    def is_dilated(self) -> bool:
        """Return whether the kernel is dilated."""
        return any(d != 1 for d in self.dilation)

    @property
    def is_plain(self) -> bool:
        """Return True if the kernel has one pixel, unstrided and unpadded: its columns are the image itself."""
        return prod(self.weight.shape[2:]) == 1 and prod(self.stride) == 1 and not any(self.padding)

    @property
    def layout(self) -> torch.memory_format:
        """Memory format by cudnn_conv_suggest_memory_format (ConvUtils.h)."""
        return memory_format(self.input, self.weight)


def as_call(input: Tensor, weight: Tensor, options: tuple) -> Call:
    """Return aten.convolution's call with stride, padding, dilation, transposed, output_padding and groups."""
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
    """Return "cudnn", "depthwise", "slow", "slow dilated", "slow transposed" or "empty" (select_conv_backend)."""
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
    """Return whether cuDNN is used (ConvParams::use_cudnn)."""
    if not torch.backends.cudnn.enabled or any(o >= s for o, s in zip(call.output_padding, call.stride, strict=True)):
        return False
    half, several = call.input.dtype in (torch.float16, torch.bfloat16), prod(call.weight.shape[2:]) > 1
    volume = call.weight.dim() == 5 and call.layout == _CONTIGUOUS
    if half and several and volume and 90800 <= (cudnn.version() or 0) < 91500:
        return False
    return call.input.dtype != torch.bfloat16 or capability >= (8, 0)


def _cudnn_takes_depthwise(call: Call, dtype: torch.dtype, batch: int, capability: tuple[int, int]) -> bool:
    """Return whether cuDNN is used for a depthwise convolution (ConvParams::use_cudnn_depthwise).

    For tensors of less than 2**31 elements.
    """
    if not torch.backends.cudnn.enabled:
        return False
    if call.layout != _CONTIGUOUS:
        return True
    square = call.stride[0] == call.stride[-1] or call.input.shape[2] == 1
    if capability < (7, 0) or dtype != torch.float16 or call.input.dim() != 4 or call.is_dilated or not square:
        return False
    return call.input.shape[1] >= 32 and _is_workload_for_cudnn(call, batch)


def _is_workload_for_cudnn(call: Call, batch: int) -> bool:
    """Return whether check_cudnn_depthwise_workload_with_filter passes."""
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
    """Note on the device whether the other half precision, or a batch of one, uses another backend."""
    if not call.is_depthwise or call.input.dim() != 4 or call.layout != _CONTIGUOUS:
        return
    one, several = (_cudnn_takes_depthwise(call, torch.float16, batch, device.capability) for batch in (1, 2))
    device.halves_differ |= one or several
    device.differs_at_one |= one != several


# --------------------------------------------------------------------------------------------------------- convolution


_aten = torch.ops.aten


# ----------------------------------------------------------------------------------------------------------------- steps


def convolution(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add copies of operands in another layout and cuDNN's workspace (cudnn/ConvShared.cpp, Conv_v8.cpp).

    The workspace is modelled as copies of all operands in NHWC if tensor cores serve NCHW tensors. Without cuDNN, add the
    columns and cuBLAS's workspace (ConvolutionMM2d.cu).
    """
    input, weight, bias, *options = args
    call = as_call(input, weight, tuple(options))
    note_differences(device, call)
    backend, result = backend_of(call, device.capability), _view4d(out)
    if input.dim() == 3 and not input.is_contiguous():
        yield (input.nbytes,)
    if backend == "cudnn":
        yield tuple(copies(call.input, layout=call.layout))
        yield out
        direction, x, y = ("backward data", result, call.input) if call.transposed else ("forward", call.input, result)
        yield [
            *copies(call.weight, layout=call.layout),
            *_workspaces(device, direction, call, x, y, call.weight, call.layout),
        ]
        return
    if backend == "depthwise":
        yield tuple(copies(call.input))
        yield out
        yield copies(call.weight)
        return
    if backend == "empty":
        yield out
        return
    yield (*copies(call.input), *copies(call.weight))
    columns = _columns(call, result, bias is not None)
    for _ in range(call.groups if call.groups > 1 else 0):
        yield (out.nbytes // call.groups,)
        yield [*_narrowed(call.input, call.groups), *columns, PRODUCT]
    yield out
    if call.groups == 1:
        yield [*columns, PRODUCT]


def convolution_backward(device: Device, args: tuple, kwargs: dict, out: tuple) -> Steps:
    """Add the copies and workspaces of the input's gradient, then those of the weight's gradient (cudnn/ConvShared.cpp)."""
    grad, input, weight, _, *options, wanted = args
    call = as_call(input, weight, tuple(options))
    note_differences(device, call)
    backend = backend_of(call, device.capability)
    results = [one if needed else None for one, needed in zip(out, wanted, strict=True)]
    if input.dim() == 3 and not input.is_contiguous():
        yield (input.nbytes,)
    if backend == "cudnn":
        yield from _backward_of_cudnn(device, call, _view4d(grad), results)
    elif backend in ("depthwise", "empty"):
        first, second = (results[1], results[0]) if call.input.dim() == 4 else (results[0], results[1])
        yield During(copies(call.input, _view4d(grad)), [one for one in (first, second) if one is not None])
        if results[2] is not None:
            yield from _bias_gradient(_view4d(grad), results[2])
    else:
        yield from _backward_by_products(call, backend, _view4d(grad), results)


def _backward_of_cudnn(device: Device, call: Call, grad: Tensor, results: list[Tensor | None]) -> Steps:
    """Add the memory of a backward pass in cuDNN.

    Source: convolution_backward, cudnn_convolution_backward and cudnn_convolution_transpose_backward.

    The input is made contiguous for the gradient of the weight. The gradient is brought to the input's format: by `Tensor.to`,
    which leaves an expanded gradient as it is, or by `Tensor.contiguous` if the convolution is transposed. Each part makes its
    operands contiguous for itself.
    """
    copied = []
    if results[1] is not None and (input := in_format(call.input, call.layout)) is not call.input:
        copied.append(call.input.nbytes)
        call = replace(call, input=input)
    layout, given = memory_format(call.input), grad
    if call.transposed or suggest_memory_format(grad) != layout:
        given = in_format(grad, layout)
        copied += [grad.nbytes] if given is not grad else []
    yield During(copied, _gradients_of_cudnn(device, call, given, results))
    if results[2] is not None:
        yield from _bias_gradient(grad, results[2])


def _gradients_of_cudnn(device: Device, call: Call, grad: Tensor, results: list[Tensor | None]) -> Steps:
    if results[0] is not None:
        layout = memory_format(grad, call.weight)
        yield results[0]
        gradient = _view4d(results[0])
        direction, x, y = ("forward", grad, gradient) if call.transposed else ("backward data", gradient, grad)
        operands = copies(call.weight, grad, layout=layout)
        yield [*operands, *_workspaces(device, direction, call, x, y, call.weight, layout)]
    if results[1] is not None:
        layout = memory_format(call.input, grad)
        x, y = (grad, call.input) if call.transposed else (call.input, grad)
        workspaces = _workspaces(device, "backward filter", call, x, y, _view4d(results[1]), layout)
        yield During(copies(grad, call.input, layout=layout), [results[1], workspaces])


def _bias_gradient(grad: Tensor, result: Tensor) -> Iterator:
    """Add the sum over all dimensions except the channels (Convolution.cpp, convolution_backward)."""
    yield result
    yield summing(grad, (0, *range(2, grad.dim())))


def _backward_by_products(call: Call, backend: str, grad: Tensor, results: list[Tensor | None]) -> Iterator:
    """Add columns and matrix products; groups are computed one after another, then concatenated."""
    columns = _columns(call, grad, False, even_if_plain=True)
    # slow_conv_transpose2d_backward_cuda also computes the gradient of the bias (NaiveConvolutionTranspose2d.cu)
    parts = [one for one in results[: 3 if backend == "slow transposed" else 2] if one is not None]
    yield tuple(copies(call.input, grad, call.weight))
    if call.groups > 1:
        for _ in range(call.groups):
            yield tuple(one.nbytes // call.groups for one in parts)
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


def _columns(call: Call, result: Tensor, bias: bool, *, even_if_plain: bool = False) -> list[int]:
    """Return the bytes of one sample's buffer of columns.

    The forward pass needs none if the columns are the image itself. A transposed convolution unfolds its result, and needs a
    vector of ones for the bias.
    """
    inputs, kernel, itemsize = call.input.shape[1] // call.groups, prod(call.weight.shape[2:]), call.input.itemsize
    if not call.transposed:
        without = call.is_plain and not call.is_dilated and not even_if_plain
        return [] if without else [inputs * kernel * prod(result.shape[2:]) * itemsize]
    outputs = call.weight.shape[1]
    ones = [prod(result.shape[2:]) * itemsize] if bias else []
    return [outputs * kernel * prod(call.input.shape[2:]) * itemsize, *ones]


def _narrowed(tensor: Tensor, groups: int) -> list[int]:
    """Return the bytes of a copy of one group's channels, which are not contiguous if there are several samples (subtensor)."""
    return [tensor.nbytes // groups] if tensor.shape[0] > 1 else []


# ----------------------------------------------------------------------------------------------------------------- cuDNN


def _workspaces(
    device: Device, direction: str, call: Call, x: Tensor, y: Tensor, weight: Tensor, layout: torch.memory_format
) -> list[int | tuple[DeferredSize]]:
    """Return the modelled workspace in bytes, with the size query that asks cuDNN for the true size.

    If cuDNN benchmarks, the largest workspace of all plans comes first, once for each thread (get_plans_from_find). The plan
    that benchmarking prefers is unknown. The first plan of the heuristics represents it.
    """
    modelled = _modelled(device, call, (x, weight, y))
    words = [direction, _name(x.dtype), "contiguous" if layout == _CONTIGUOUS else "channels last"]
    if torch.backends.cudnn.conv.fp32_precision == "tf32":
        words.append("tf32")
    if torch.backends.cudnn.deterministic:
        words.append("deterministic")
    begins = [t.storage_offset() * t.itemsize if t.is_contiguous(memory_format=layout) else 0 for t in (x, y, weight)]
    numbers = (*x.shape, *y.shape, *weight.shape, *call.padding, *call.stride, *call.dilation, *begins)
    chosen = DeferredSize(modelled, CUDNN, tuple(words), numbers)
    if not torch.backends.cudnn.benchmark:
        return [chosen]
    return [(DeferredSize(modelled, CUDNN, (*words, "benchmark"), numbers),), chosen]


def _modelled(device: Device, call: Call, operands: tuple[Tensor, ...]) -> int:
    """Return the bytes of copies of the operands in NHWC if tensor cores serve NCHW tensors, else 0.

    A trace that devices share assumes that tensor cores serve them.
    """
    if call.is_depthwise or call.layout != _CONTIGUOUS:
        return 0
    if not device.shared and device.capability < tensor_cores_from(_name(call.input.dtype)):
        return 0
    return sum(one.nbytes for one in operands)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _view4d(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(2) if tensor.dim() == 3 else tensor


def _unfolded(input: Tensor, weight: Tensor, out: Tensor) -> tuple[int, int]:
    """Return the number of images that are unfolded at once, at most 32, and their bytes (get_greatest_divisor_below_bound)."""
    images = next(count for count in range(min(32, len(input)), 0, -1) if len(input) % count == 0)
    return images, input.shape[1] * weight.shape[2] * weight.shape[3] * images * out.shape[2] * out.shape[3] * out.itemsize


def deformable(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add contiguous inputs, two results, columns and the result with the bias (ops/cuda/deform_conv2d_kernel.cu).

    Operator: torchvision.deform_conv2d, with arguments input, weight, offset, … Both results are filled. The columns are those
    of up to 32 images at once. Source: torchvision/csrc/ops/cuda/deform_conv2d_kernel.cu, 0.26.
    """
    _, columns = _unfolded(args[0], args[1], out)
    yield (*copies(*args[:5]), out.nbytes, out.nbytes, columns)
    yield [PRODUCT]
    yield out


def deformable_backward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add copies, columns and products of the inputs' gradients, then of the parameters' (cuda/deform_conv2d_kernel.cu).

    Operator: torchvision._deform_conv2d_backward, with arguments grad, input, weight, offset, … Both parts unfold up to 32
    images at once. With several such chunks, the gradient of the result is copied chunk by chunk, then as a whole. A product
    with the columns is made for each chunk and group. Another product adds the gradient of the weight to it. Source:
    torchvision/csrc/ops/cuda/deform_conv2d_kernel.cu, 0.29.
    """
    grad, input, weight = args[:3]
    of_input, of_weight, of_offset, of_mask, of_bias = out
    images, columns = _unfolded(input, weight, grad)
    groups = input.shape[1] // weight.shape[1]
    chunks = len(input) // images * groups
    copied = [grad.nbytes] if images > 1 else []
    yield tuple(copies(*args[:6]))
    yield of_input
    yield of_offset
    yield of_mask
    chunk: list[Step] = [During([size // chunks for size in copied], [[PRODUCT]])]
    yield During([columns], chunk * chunks)
    yield of_weight
    product = weight.nbytes // groups
    added: list[Step] = [During([product], [[PRODUCT], [product]])]
    yield During([*copied, columns], added * chunks)
    yield During([of_bias.nbytes, of_bias.nbytes], [of_bias])


ALLOCATIONS: dict[Any, AllocationRule] = {
    "torchvision.deform_conv2d.default": deformable,
    "torchvision._deform_conv2d_backward.default": deformable_backward,
    _aten.convolution.default: convolution,
    _aten.convolution_backward.default: convolution_backward,
}

"""What layer, RMS and group norm hold inside on CUDA: copies of strided operands, in the order in which the kernels make them
beside their results, and partial sums of the weights' gradients.

As of PyTorch 2.6 and 2.11 to 2.15: aten/src/ATen/native/cuda/layer_norm_kernel.cu (layer_norm_cuda, layer_norm_backward_cuda,
LaunchGammaBetaBackwardCUDAKernel). 2.6 has no partial sums: they came with pull request 150773, in 2.8. Whether there are any
depends on the GPU's multiprocessors: a question (sizer.memory.size_queries) of the kind NORM.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from sizer.catalogue.hardware import HARDWARE
from sizer.tracing.allocations import Held, Steps, after_results, copies
from sizer.tracing.cuda.reductions import PARTIAL, SEMAPHORES, summed_rows
from sizer.tracing.device import Device
from sizer.tracing.log import DeferredSize
from sizer.tracing.values.known import tensors_of

NORM = "gradients of a norm's weights on CUDA"
_MANY, _WARP, _ROWS = 64 * 1024, 32, 32  # more rows than these; columns and rows of a block
_SUMS = "partial sums"
_PROCESSORS = max(hardware.processors for hardware in HARDWARE.values())

_aten = torch.ops.aten


def norm(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """The input made contiguous (cuda/layer_norm_kernel.cu)."""
    yield tuple(copies(args[0]))
    yield from tensors_of(out)


def norm_backward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """The input made contiguous, beside the results the gradient, then, since 2.8, where rows are many and narrow a weight's and a
    bias' partial sums, a row for 32, and what summing them holds (cuda/layer_norm_kernel.cu)."""
    yield tuple(copies(args[1]))
    yield from tensors_of(out)
    yield copies(args[0])
    gradients = tensors_of(out[1:])
    columns = prod(args[2])
    rows = args[1].numel() // columns if columns else 0
    if device.version < (2, 8) or columns // _WARP >= _PROCESSORS // 2 or not gradients:
        return  # on no GPU, however many rows
    itemsize = gradients[0].itemsize
    yield tuple(_ask(_SUMS, rows, columns, itemsize) for _ in gradients)
    for _ in gradients:
        yield [_ask(which, rows, columns, itemsize) for which in (PARTIAL, SEMAPHORES)]


def _ask(which: str, rows: int, columns: int, itemsize: int) -> DeferredSize:
    return DeferredSize(0, NORM, (which, str(itemsize)), (rows, columns))


def answer(key: str, words: tuple[str, ...], numbers: tuple[int, ...]) -> int:
    """The bytes of one block on a GPU: partial sums, or what their sum holds."""
    (which, itemsize), (rows, columns) = words, numbers
    if rows <= _MANY or columns // _WARP >= HARDWARE[key].processors // 2:
        return 0
    sums = -(-rows // _ROWS)
    if which == _SUMS:
        return sums * columns * int(itemsize)
    return summed_rows(key, which, sums, columns, int(itemsize))


def group_norm(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """A scale and a shift per sample and channel in the accumulation dtype (group_norm_kernel.cu); the input made contiguous."""
    return [[*copies(args[0]), *[args[3] * args[4] * 4] * 2]]


def group_norm_backward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """In the accumulation dtype two sums per sample and channel, a factor likewise and two per group (group_norm_kernel.cu)."""
    samples, channels, groups = args[5], args[6], args[8]
    return [[*copies(args[0]), *[samples * channels * 4] * 3, *[samples * groups * 4] * 2]]


HELD: dict[Any, Held] = {
    _aten.native_layer_norm.default: norm,
    _aten.native_layer_norm_backward.default: norm_backward,
    _aten._fused_rms_norm.default: norm,
    _aten._fused_rms_norm_backward.default: norm_backward,
    _aten.native_group_norm.default: after_results(group_norm),
    _aten.native_group_norm_backward.default: after_results(group_norm_backward),
}

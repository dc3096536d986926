"""The gradient of an embedding on CUDA: indices are sorted, so that each row of the gradient is summed by one block of threads.

As of PyTorch 2.6 and 2.11 to 2.15: aten/src/ATen/native/cuda/Embedding.cu (embedding_dense_backward_cuda),
EmbeddingBackwardKernel.cu (embedding_backward_cuda_kernel), and CUB's temporary storage for sorting and scanning
(dispatch_radix_sort.cuh, dispatch_scan.cuh), fitted to its own answers in CUDA 13, which 2.6 is taken to get, too; the scans' are
off by a few hundred bytes.
"""

from __future__ import annotations

from typing import Any

import torch

from sizer.base.versions import format_version
from sizer.tracing.allocations import Held, Steps, copies
from sizer.tracing.cuda.by_hardware import ALWAYS, EMBEDDING
from sizer.tracing.cuda.scans import sorted_rows
from sizer.tracing.device import Device
from sizer.tracing.log import DeferredSize

_aten = torch.ops.aten
_MAX = 2  # EmbeddingBagMode
_HALVES = (torch.float16, torch.bfloat16)


def forward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Strided indices made contiguous (native/Embedding.cpp, index_select)."""
    yield tuple(copies(args[1]))
    yield out


def dense_backward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Above 3,072 indices: they are sorted through copies, counted into segments, and partial sums of rows kept in float32; strided
    operands copied (cuda/Embedding.cu, EmbeddingBackwardKernel.cu)."""
    grad, indices, rows, scales = args[0], args[1], args[2], args[4]
    yield tuple(copies(grad, indices))
    yield from _summed_rows(device, grad, indices, rows, out, scales=scales, always=scales)


def bag_backward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """_embedding_bag_backward(gradient, indices, .., rows, scales, mode, ..): as an embedding's gradient, however few the indices
    (cuda/EmbeddingBag.cu); the largest of a bag are added where they came from."""
    grad, indices, rows, scales, mode = args[0], args[1], args[6], args[7], args[8]
    if mode == _MAX or not indices.numel():
        return [out]
    return [tuple(copies(grad)), *_summed_rows(device, grad, indices, rows, out, scales=scales, always=True)]


def _summed_rows(
    device: Device, grad: torch.Tensor, indices: torch.Tensor, rows: int, out: Any, *, scales: bool, always: bool
) -> Steps:
    """Rows of a gradient summed by their sorted indices; with `scales` indices are counted, too."""
    width = grad.shape[-1] * (4 if grad.dtype in _HALVES else grad.itemsize)
    numbers = indices.numel(), rows, width, indices.itemsize

    def blocks(*names: str) -> list[int]:
        words = (format_version(device.version), *([ALWAYS] if always else []))
        return [DeferredSize(0, EMBEDDING, (name, *words), numbers) for name in names]

    yield tuple(blocks("indices", "indices"))
    yield blocks("indices", "sort")
    if scales:
        yield tuple(blocks("indices"))
        yield blocks("scan")
    yield out
    yield tuple(blocks("indices", "count"))
    yield blocks("indices", "scan")
    yield tuple(blocks("segments", "segments"))
    yield blocks("scan")
    yield tuple(blocks("count", "parts"))
    yield blocks("sums")


def renorm(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """embedding_renorm_(weight, indices, ..): indices, sorted, then without duplicates, with CUB's scratch (cuda/Embedding.cu)."""
    indices = args[1]
    count, size = indices.numel(), indices.nbytes
    if not count:
        return
    yield (size, size)
    for step in sorted_rows(1, count, indices.itemsize):
        yield [count * 8, *step]
    yield (size,)
    yield [8, 1023]


HELD: dict[Any, Held] = {
    _aten.embedding.default: forward,
    _aten.embedding_renorm_.default: renorm,
    _aten.embedding_dense_backward.default: dense_backward,
    _aten._embedding_bag_backward.default: bag_backward,
}

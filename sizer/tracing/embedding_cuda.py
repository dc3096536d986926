"""The gradient of an embedding on CUDA: indices are sorted, so that each row of the gradient is summed by one block of threads.

As of PyTorch 2.11 to 2.15: aten/src/ATen/native/cuda/Embedding.cu (embedding_dense_backward_cuda), EmbeddingBackwardKernel.cu
(embedding_backward_cuda_kernel), and CUB's temporary storage for sorting and scanning (dispatch_radix_sort.cuh, dispatch_scan.cuh),
fitted to its own answers; the scans' are off by a few hundred bytes.
"""

from __future__ import annotations

from typing import Any

import torch

from sizer.memory.hardware import HARDWARE
from sizer.tracing.libraries import installed_version
from sizer.tracing.log import Asked
from sizer.tracing.steps import Steps

EMBEDDING = "CUDA embedding's gradient"

_aten = torch.ops.aten
_UNSORTED = 3072  # indices up to which one kernel adds rows without sorting
_ROWS_PER_THREAD = 10  # NROWS_PER_THREAD
_HALVES = (torch.float16, torch.bfloat16)


def dense_backward(device: Any, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Above 3,072 indices: they are sorted through copies, counted into segments, and partial sums of rows kept in float32; strided
    operands copied (cuda/Embedding.cu, EmbeddingBackwardKernel.cu)."""
    grad, indices, rows = args[0], args[1], args[2]
    yield tuple(t.numel() * t.itemsize for t in (grad, indices) if not t.is_contiguous())
    width = grad.shape[-1] * (4 if grad.dtype in _HALVES else grad.itemsize)
    numbers = indices.numel(), rows, width, indices.itemsize

    def blocks(*names: str) -> list[int]:
        return [Asked(0, EMBEDDING, (name,), numbers) for name in names]

    yield tuple(blocks("indices", "indices"))
    yield blocks("indices", "sort")
    yield out
    yield tuple(blocks("indices", "count"))
    yield blocks("indices", "scan")
    yield tuple(blocks("segments", "segments"))
    yield blocks("scan")
    yield tuple(blocks("count", "parts"))
    yield blocks("sums")


def answer(key: str, words: tuple[str, ...], numbers: tuple[int, ...]) -> int:
    """The bytes of one block by its name and (indices, rows of the embedding, bytes of a row as summed, bytes of an index)."""
    (name,) = words
    indices, rows, width, itemsize = numbers
    if indices <= _UNSORTED:
        return 0
    segments = min(indices, rows)
    parts = segments + indices // _ROWS_PER_THREAD
    return {
        "indices": indices * itemsize,
        "sort": _sort_bytes(HARDWARE[key].capability, indices, itemsize, installed_version()),
        "count": 8,
        "scan": 256 * (2 + -(-16 * (-(-indices // 4864) + 32) // 256)) - 1,
        "segments": segments * itemsize,
        "parts": parts * itemsize,
        "sums": parts * width,
    }[name]


def _sort_bytes(capability: tuple[int, int], count: int, itemsize: int, version: tuple[int, int]) -> int:
    """CUB's storage to sort pairs of integers: keys and values once more, and per tile a counter for each of 256 digits."""
    tile = 2816 if capability < (8, 0) else 4608 if capability == (9, 0) else 3840
    histograms = 18 * 256 + (48 * 256 if version < (2, 12) else 0)
    copies = 2 * (-(-count * itemsize // 256) * 256)
    return copies + histograms + 1024 * -(-count // tile) - 1


INNER = {_aten.embedding_dense_backward.default: dense_backward}

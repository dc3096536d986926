"""The gradient of an embedding on CUDA: indices are sorted, so that each row of the gradient is summed by one block of threads.

As of PyTorch 2.6 and 2.11 to 2.15: aten/src/ATen/native/cuda/Embedding.cu (embedding_dense_backward_cuda),
EmbeddingBackwardKernel.cu (embedding_backward_cuda_kernel), and CUB's temporary storage for sorting and scanning
(dispatch_radix_sort.cuh, dispatch_scan.cuh), fitted to its own answers in CUDA 13, which 2.6 is taken to get, too; the scans' are
off by a few hundred bytes.
"""

from __future__ import annotations

from typing import Any

import torch

from sizer.catalogue.hardware import HARDWARE
from sizer.tracing.allocations import Held, Steps, copies, round_up
from sizer.tracing.device import Device
from sizer.tracing.log import DeferredSize
from sizer.versions import Version, format_version, parse_version

EMBEDDING = "CUDA embedding's gradient"

_aten = torch.ops.aten
_UNSORTED = 3072  # indices up to which one kernel adds rows without sorting
_ROWS_PER_THREAD = 10  # NROWS_PER_THREAD
_HALVES = (torch.float16, torch.bfloat16)


def forward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Strided indices made contiguous (native/Embedding.cpp, index_select)."""
    yield tuple(copies(args[1]))
    yield out


def dense_backward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Above 3,072 indices: they are sorted through copies, counted into segments, and partial sums of rows kept in float32; strided
    operands copied (cuda/Embedding.cu, EmbeddingBackwardKernel.cu)."""
    grad, indices, rows = args[0], args[1], args[2]
    yield tuple(copies(grad, indices))
    width = grad.shape[-1] * (4 if grad.dtype in _HALVES else grad.itemsize)
    numbers = indices.numel(), rows, width, indices.itemsize

    def blocks(*names: str) -> list[int]:
        return [DeferredSize(0, EMBEDDING, (name, format_version(device.version)), numbers) for name in names]

    yield tuple(blocks("indices", "indices"))
    yield blocks("indices", "sort")
    yield out
    yield tuple(blocks("indices", "count"))
    yield blocks("indices", "scan")
    yield tuple(blocks("segments", "segments"))
    yield blocks("scan")
    yield tuple(blocks("count", "parts"))
    yield blocks("sums")


def resolve(key: str, words: tuple[str, ...], numbers: tuple[int, ...]) -> int:
    """The bytes of one block by its name and PyTorch's version, and by (indices, rows of the embedding, bytes of a row as
    summed, bytes of an index)."""
    name, version = words
    indices, rows, width, itemsize = numbers
    if indices <= _UNSORTED:
        return 0
    segments = min(indices, rows)
    parts = segments + indices // _ROWS_PER_THREAD
    return {
        "indices": indices * itemsize,
        "sort": _sort_bytes(HARDWARE[key].capability, indices, rows, itemsize, parse_version(version)),
        "count": 8,
        "scan": 511 + round_up(16 * (-(-indices // 4864) + 32), 256),
        "segments": segments * itemsize,
        "parts": parts * itemsize,
        "sums": parts * width,
    }[name]


def _sort_bytes(capability: tuple[int, int], count: int, rows: int, itemsize: int, version: Version) -> int:
    """CUB's storage to sort pairs of integers by their lowest bits, 8 in a pass, or by all 64 up to PyTorch 2.11.

    Counts of digits for every pass and for each tile; for several passes keys and values once more.
    """
    tile = 2816 if capability < (8, 0) else 4608 if capability == (9, 0) else 3840
    passes = 8 if version < (2, 12) else -(-rows.bit_length() // 8)
    copies = 2 * round_up(count * itemsize, 256) if passes > 1 else 0
    return copies + (2 + 8 * passes) * 256 + 1024 * -(-count // tile) - 1


HELD: dict[Any, Held] = {_aten.embedding.default: forward, _aten.embedding_dense_backward.default: dense_backward}

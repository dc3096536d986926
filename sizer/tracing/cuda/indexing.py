"""Indexing and rolling on CUDA: what their kernels hold inside (PyTorch 2.6 and 2.11 to 2.15).

Where a kernel counts distinct rows, a batch is taken to share none, so that sizes stay linear in the leading dimension.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from sizer.tracing.allocations import Held, Steps, after_results, copies
from sizer.tracing.cuda.scans import sorted_pairs
from sizer.tracing.device import Device

_aten = torch.ops.aten


def accumulating_index_put(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Adding at indices: they are made linear and sorted, four vectors of int64 (five before 2.15) and the sort's own; strided
    values are copied
    (cuda/Indexing.cu, index_put_with_sort_kernel)."""
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    indices = [index for index in args[1] if index is not None]
    if not accumulate or not indices or any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        return []
    places = prod(torch.broadcast_shapes(*[index.shape for index in indices]))
    if device.version < (2, 15):
        return [[*[places * 8] * 5, *copies(args[2])]]
    rows = prod(args[0].shape[: len(args[1])])
    return [[*[places * 8] * 4, sorted_pairs(places, rows), *copies(args[2])]]


def indexing(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Indices of one stride only: where several are broadcast to different strides, those that are not contiguous are copied
    (native/TensorAdvancedIndexing.cpp, AdvancedIndex: "force all index tensors to have the same striding")."""
    yield tuple(copied_indices(args[1]))
    yield out


def copied_indices(given: Any) -> list[int]:
    """Return the bytes of the copies of indices that broadcasting leaves with different strides."""
    indices = [index for index in given if index is not None]
    if len(indices) < 2 or any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        return []
    spread = torch.broadcast_tensors(*indices)
    if all(index.stride() == spread[0].stride() for index in spread):
        return []
    return [index.numel() * index.itemsize for index in spread if not index.is_contiguous()]


def roll(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Rolled along one dimension after another, each into a tensor of its own (native/TensorTransformations.h, roll_common), from a
    contiguous input."""
    dims = args[2] if len(args) > 2 else kwargs.get("dims", ())
    copied = tuple(copies(args[0]))
    if len(dims) > 1:
        yield [*copied, out.nbytes]
        yield (out.nbytes,)
        yield out
    else:
        yield out
        yield [*copied]


HELD: dict[Any, Held] = {
    _aten.roll.default: roll,
    _aten.index.Tensor: indexing,
    _aten._unsafe_index.Tensor: indexing,
    _aten.index_put.default: after_results(accumulating_index_put),
    _aten.index_put_.default: after_results(accumulating_index_put),
    _aten._index_put_impl_.default: after_results(accumulating_index_put),
}

"""Indexing and rolling on CUDA: what their kernels hold inside (PyTorch 2.6 and 2.11 to 2.15).

Where a kernel counts distinct rows, a batch is taken to share none, so that sizes stay linear in the leading dimension.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from sizer.tracing.allocations import Held, Steps, after_results, copies
from sizer.tracing.device import Device

_aten = torch.ops.aten


def accumulating_index_put(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Adding at indices: they are made linear and sorted, five vectors of int64 and the sort's own; strided values are copied
    (cuda/Indexing.cu, index_put_with_sort_kernel)."""
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    indices = [index for index in args[1] if index is not None]
    if not accumulate or not indices or any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        return []
    places = torch.broadcast_shapes(*[index.shape for index in indices])
    return [[*[prod(places) * 8] * 5, *copies(args[2])]]


def roll(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Rolled along one dimension after another, each into a tensor of its own (native/TensorTransformations.h, roll_common), from a contiguous input."""
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
    _aten.index_put.default: after_results(accumulating_index_put),
    _aten.index_put_.default: after_results(accumulating_index_put),
    _aten._index_put_impl_.default: after_results(accumulating_index_put),
}

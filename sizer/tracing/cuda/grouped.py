"""Grouped matrix products on CUDA: what they hold beside their results.

Source: aten/src/ATen/native/cuda/GroupedBlas.cpp, GroupMM.cu, and CUTLASS's get_workspace_size, asked over the host code of PyTorch
2.11 and 2.15: descriptors of tensors for each multiprocessor, and on 10.x barriers between its warps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sizer.base.units import round_up
from sizer.tracing.allocations import PRODUCT, Held, Steps, after_results
from sizer.tracing.cuda.processors import processors_of
from sizer.tracing.device import Device

# Bytes for each multiprocessor: on 9.x, on 10.x in tiles for few rows or columns, and in others.
SM90, SM100_SMALL, SM100 = 512, 5_376, 5_888
SMALL = 128  # rows or columns of a group, at most


def grouped_mm(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """aten._grouped_mm: aten/src/ATen/native/cuda/GroupMM.cu for bfloat16 on 9.x and 10.x, CUTLASS's arguments and workspace; else
    group by group by cuBLAS."""
    first, second = args[0], args[1]
    groups = args[2] if len(args) > 2 else kwargs.get("offs")
    dtypes = {first.dtype, second.dtype, out.dtype}
    if dtypes != {torch.bfloat16} or not (device.capability[0] == 9 or device.capability[0] == 10):
        return [[PRODUCT]]
    count = first.shape[0] if groups is None else groups.shape[0]
    # pointers to both matrices and the result, as many as are 16 bytes; three strides; rows, columns and depth as int32
    arguments = round_up(count, 2) * 3 * 8 + count * (3 * 8 + 3 * 4)
    each = SM90 if device.capability[0] == 9 else SM100_SMALL if _is_small(first, second, count) else SM100
    return [[arguments, processors_of(device) * each]]


def _is_small(first: Tensor, second: Tensor, groups: int) -> bool:
    """Whether a group has few rows or columns, where all are as large."""
    rows, columns = first.shape[-2], second.shape[-1]
    if first.dim() == 2 and second.dim() == 3:
        rows //= groups
    elif first.dim() == 3 and second.dim() == 2:
        columns //= groups
    return rows <= SMALL or columns <= SMALL


HELD: dict[Any, Held] = {torch.ops.aten._grouped_mm.default: after_results(grouped_mm)}

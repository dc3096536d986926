"""Grouped matrix products: the output's shape for every dtype and build.

PyTorch's meta kernel refuses all but bfloat16 before 2.12 and pads rows only in builds with CUDA.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sizer.tracing.values.handler import HandlerContext


def grouped_mm(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """aten._grouped_mm (torch/_meta_registrations.py, _create_grouped_mm_output_tensor): [M, K] or [G, M, K] by [G, K, N] or
    [K, N], groups ending at `offs` [G]; on a GPU each row is padded to 16 bytes."""
    first, second = args[0], args[1]
    if first.device.type != "meta":
        return NotImplemented
    groups = args[2] if len(args) > 2 else kwargs.get("offs")
    dtype = (args[4] if len(args) > 4 else kwargs.get("out_dtype")) or first.dtype
    shape = _shape(first, second, groups)
    multiple = 16 // dtype.itemsize if recorder.device.kind != "cpu" else 1
    row = -(-shape[-1] // multiple) * multiple
    strides = [row, 1] if len(shape) == 2 else [shape[1] * row, row, 1]
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _shape(first: Tensor, second: Tensor, groups: Tensor | None) -> list[int]:
    rows, columns = first.shape[-2], second.shape[-1]
    if first.dim() == second.dim():
        count = groups.shape[0] if first.dim() == 2 and groups is not None else first.shape[0]
        return [count, rows, columns]
    return [rows, columns]


HANDLERS = {torch.ops.aten._grouped_mm.default: grouped_mm}

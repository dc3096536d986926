"""Matrix products in half precision on the CPU: the buffers that oneDNN works in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sizer.tracing.allocations import Held, Steps
from sizer.tracing.cpu import processor
from sizer.tracing.device import Device

_aten = torch.ops.aten


def buffer_bytes(rows: int, inner: int, columns: int, exchanged: bool) -> int:
    """Bytes of a thread's buffers in oneDNN's matrix product [rows, inner] by [inner, columns] of half precision
    (src/cpu/x64/matmul/brgemm_matmul_utils.cpp): addresses, a block of the second operand, sums in float32, and a block of the
    first operand where it is stored the other way round. The blocks are usual ones, the exact ones go by the caches. Products of
    up to 16 by 16 by 16 are not oneDNN's (mkldnn/Matmul.cpp, mkldnn_gemm_min_size)."""
    if rows * inner * columns <= 16**3:
        return 0
    rows, width = -(-rows // -(-rows // 256)), min(columns, 64)
    depth = -(-min(inner, 512) // 32) * 32
    return 1024 + rows * width * 4 + depth * 128 + (rows * depth * 2 + 128 if exchanged else 0)


def half_product(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """mm, bmm, addmm and baddbmm in half precision (mkldnn/Matmul.cpp, use_mkldnn_matmul), where oneDNN computes them."""
    first, second = [a for a in args if isinstance(a, Tensor)][-2:]
    rows, inner, columns = first.shape[-2], first.shape[-1], second.shape[-1]
    if out.itemsize != 2 or not processor.onednn_takes(out.dtype):
        return [out]
    exchanged = first.stride(-1) != 1
    return [out, [torch.get_num_threads() * buffer_bytes(rows, inner, columns, exchanged)]]


HELD: dict[Any, Held] = dict.fromkeys(
    (_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default), half_product
)

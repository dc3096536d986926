"""Matrix products in half precision on the CPU: oneDNN's buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sizer.base.units import round_up
from sizer.tracing.allocations import AllocationRule, Steps
from sizer.tracing.cpu import processor
from sizer.tracing.device import Device

_aten = torch.ops.aten
_SMALL = 16**3
_ALIGNMENT = 128  # of an entry of a scratchpad (src/common/memory_tracking.hpp)


def is_small(rows: int, inner: int, columns: int) -> bool:
    """Return True if PyTorch computes a product itself (mkldnn/Matmul.cpp, mkldnn_gemm_min_size)."""
    return rows * inner * columns <= _SMALL


def buffer_bytes(rows: int, inner: int, columns: int, exchanged: bool) -> int:
    """Return the bytes of a thread's buffers in oneDNN's matrix product [rows, inner] by [inner, columns] of half precision.

    The buffers are addresses, a block of the second operand, sums in float32, and a block of the first operand if it is stored
    transposed. The blocks have their usual size; the exact size depends on the caches. Source:
    src/cpu/x64/matmul/brgemm_matmul_utils.cpp.
    """
    if is_small(rows, inner, columns):
        return 0
    rows, width = -(-rows // -(-rows // 256)), min(columns, 64)
    depth = -(-min(inner, 512) // 32) * 32
    return 1024 + rows * width * 4 + depth * 128 + (rows * depth * 2 + 128 if exchanged else 0)


def sum_bytes(batch: int, rows: int, columns: int) -> int:
    """Return the bytes of the float32 sums of a product of bfloat16 on a processor without instructions for it.

    oneDNN then uses its GEMM, in which each thread sums in its own rows (src/cpu/matmul/gemm_bf16_matmul.cpp and
    gemm_based_common.hpp, get_scratchpad_num_elements, 3.13).
    """
    threads = torch.get_num_threads()
    return max(threads * _block(batch, rows, columns, threads), _block(batch, rows, columns, 1)) * 4 + _ALIGNMENT


def _block(batch: int, rows: int, columns: int, threads: int) -> int:
    """Return the elements of one thread's sums."""
    work = -(-batch * rows * columns // threads)
    if work >= columns:
        work = min(rows * columns, work // columns * columns)
    return round_up(work, 64)


def half_product(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add oneDNN's buffers for mm, bmm, addmm and baddbmm in half precision (mkldnn/Matmul.cpp, use_mkldnn_matmul)."""
    first, second = [a for a in args if isinstance(a, Tensor)][-2:]
    rows, inner, columns = first.shape[-2], first.shape[-1], second.shape[-1]
    if out.itemsize != 2 or not processor.onednn_takes(out.dtype):
        return [out]
    if out.dtype == torch.bfloat16 and not processor.multiplies_bfloat16():
        return [out, [0 if is_small(rows, inner, columns) else sum_bytes(first.shape[0] if out.ndim == 3 else 1, rows, columns)]]
    exchanged = first.stride(-1) != 1
    return [out, [torch.get_num_threads() * buffer_bytes(rows, inner, columns, exchanged)]]


ALLOCATIONS: dict[Any, AllocationRule] = dict.fromkeys(
    (_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default), half_product
)

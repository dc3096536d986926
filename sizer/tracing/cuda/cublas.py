"""Memory of matrix products on CUDA: operators that call cuBLAS, and operators that call cuBLASLt.

The sizes and their sources are in `sizer.tracing.cuda.by_capability`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sizer.tracing.allocations import AllocationRule, Steps
from sizer.tracing.cuda.by_capability import LT_WORKSPACE, Blas
from sizer.tracing.device import Device

_aten = torch.ops.aten

_BIASED = frozenset({_aten._addmm_activation.default, *(getattr(_aten.addmm, name) for name in _aten.addmm.overloads())})
_IN_PLACE = (_aten.addmm_, _aten.baddbmm_, _aten.addmv_, _aten.addbmm_)
_INTO_RESULTS = (_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm, _aten.addmv, _aten.mv, _aten.dot, _aten.vdot, _aten.addbmm)
WORKSPACE_USERS = _BIASED | {
    _aten.mm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.addmv.default, _aten.mv.default,
    _aten.dot.default, _aten.vdot.default, _aten.addbmm.default, *(packet.default for packet in _IN_PLACE),
    *(
        getattr(packet, overload)
        for packet in _INTO_RESULTS
        for overload in packet.overloads()
        if overload in ("out", "dtype", "dtype_out")
    ),
}  # fmt: skip
_COPIES_OPERANDS = frozenset({_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default})

_BY_VECTOR = frozenset({_aten.mv.default, _aten.addmv.default, _aten.addmv_.default})


def scaled_product(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add cuBLASLt's own workspace for the call of aten._scaled_mm (CUDABlas.cpp, scaled_gemm, 2.15).

    Products with scales by rows use cuBLASLt on capability 9.0 only (cuda/ScaledBlas.cpp). CUTLASS's products are not modelled.
    """
    scale = args[2] if len(args) > 2 else kwargs["scale_a"]
    yield out
    if device.version >= (2, 15) and (scale.numel() == 1 or device.capability.among(((9, 0), (9, 0)))):
        yield [LT_WORKSPACE]


ALLOCATIONS: dict[Any, AllocationRule] = {_aten._scaled_mm.default: scaled_product}


def needs(
    blas: Blas, func: object, args: tuple, out: Tensor, *, beta: float = 1
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the bytes that a matrix product holds: for the time of the call, and kept.

    They are copies of operands that cuBLAS cannot read, and the workspace of the handle, of cuBLASLt or both. Empty products
    need no workspace. `beta` scales the addend of the product.
    """
    if blas.outer_by_triton and func is _aten.bmm.default and _is_outer(*args):
        return (), ()
    copies: tuple[int, ...] = ()
    if func in _COPIES_OPERANDS:
        copies = tuple(t.nbytes for t in args[-2:] if not _is_readable(t) or (t.is_conj() and _is_by_rows(t)))
    elif func in _BY_VECTOR and not _is_gemv_readable(args[-2]):
        copies = (args[-2].nbytes,)
    if out.numel() == 0 or any(t.numel() == 0 for t in args[-2:] if isinstance(t, Tensor)):
        return copies, ()
    light: tuple[int, ...] = ()
    if blas.lt_size is not None and func in _BIASED and _uses_lt(blas, args[0], args[1], args[2], out, beta):
        light = (blas.lt_size,)
    if not blas.kept:
        return (*copies, *(light or (blas.size,))), ()
    # a cuBLASLt handle is a cuBLAS handle, which has its own workspace
    return (copies, (blas.size, *light)) if blas.lt_kept else ((*copies, *light), (blas.size,))


def _is_outer(first: Tensor, second: Tensor) -> bool:
    return first.shape[2] == 1 and second.shape[1] == 1 and not first.is_complex()


def _uses_lt(blas: Blas, bias: Tensor, first: Tensor, second: Tensor, out: Tensor, beta: float) -> bool:
    if not out.is_contiguous():
        return False
    if beta == 1 and uses_lt(bias, first, second, row=blas.lt_takes_a_row):
        return True
    halves = first.dtype in (torch.float16, torch.bfloat16) and bias.dtype == first.dtype
    whole = bias.shape == (first.shape[0], second.shape[1]) and bias.is_contiguous() and bias is not out
    return blas.lt_takes_a_matrix and beta != 0 and halves and whole and min(*second.shape) > 1


def uses_lt(bias: Tensor, first: Tensor, second: Tensor, *, row: bool = True) -> bool:
    """Return whether bias [N] + first [M, K] @ second [K, N] uses cuBLASLt, which adds the bias in its epilogue.

    If `row`, a bias [1, N] uses it too.
    """
    flat = bias.dim() == 1 or (row and bias.squeeze().dim() == 1)
    fusable = flat and bias.is_contiguous() and bias.shape[-1] == second.shape[1]
    dtype = first.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    return fusable and dtype and min(*second.shape) > 1


def _is_gemv_readable(matrix: Tensor) -> bool:
    """Return whether cuBLAS multiplies a matrix with a vector without a copy of the matrix (cuda/Blas.cpp, addmv_out_cuda)."""
    (rows, columns), (row, column) = matrix.shape, matrix.stride()
    return (row == 1 and column >= max(1, rows)) or (column == 1 and row >= max(1, columns))


def _is_by_rows(tensor: Tensor) -> bool:
    """Return whether an operand has its rows one after another: cuBLAS conjugates operands by columns alone (cuda/Blas.cpp)."""
    return tensor.is_contiguous() or (tensor.stride(-1) == 1 and tensor.stride(-2) >= max(1, tensor.shape[-1]))


def _is_readable(tensor: Tensor) -> bool:
    """Return whether cuBLAS reads an operand as rows or columns: one of its last two strides is 1, none is 0.

    Source: prepare_matrix_for_cublas in cuda/Blas.cpp, prepare_batch_matrix_for_cublas.
    """
    if tensor.is_contiguous():
        return True
    (rows, columns), (row, column) = tensor.shape[-2:], tensor.stride()[-2:]
    if (column == 1 and row >= max(1, columns)) or (row == 1 and column >= max(1, rows)):
        return True
    return tensor.dim() == 2 and _aten.is_non_overlapping_and_dense.default(tensor)

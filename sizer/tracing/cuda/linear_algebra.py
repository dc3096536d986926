"""Linear algebra on CUDA: copies of matrices, pointers to them, and cuBLAS's workspace. cuSOLVER's workspaces are not counted.

PyTorch 2.15: native/cuda/linalg/BatchLinearAlgebra.cpp, BatchLinearAlgebraLib.cpp and BatchLinearAlgebraLibBlas.cpp.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from sizer.tracing.allocations import PRODUCT, AllocationRule, Library, Step, Steps, after_results, copies
from sizer.tracing.device import Device
from sizer.tracing.operator_tables import listed
from sizer.tracing.values.handler import Handler, HandlerContext
from sizer.tracing.values.known import tensors_of

_POINTER, _PLACE, _PIVOT, _INFO = 8, 8, 4, 4  # bytes
_LEAST_OF_LOOP, _MOST_OF_LOOP = 64, 8  # rows of a matrix, and matrices, that are solved one by one
_MOST_FACTORED = 128  # rows of matrices that are factored at once


def _shape(matrix: Tensor) -> tuple[int, int]:
    """Return the number of matrices [.., n, n] and their rows."""
    return prod(matrix.shape[:-2]), matrix.shape[-1]


def _triangular(count: int, rows: int) -> list[int]:
    """Return the memory of triangular_solve_kernel: few large matrices are solved one by one, others through pointers."""
    one_by_one = count <= _MOST_OF_LOOP and rows >= _LEAST_OF_LOOP
    return [PRODUCT] if one_by_one else [count * _POINTER, count * _POINTER, PRODUCT]


def _factors(count: int, rows: int) -> list[int]:
    """Return the memory of lu_factor: small matrices are factored at once, through pointers."""
    return [count * _POINTER, PRODUCT] if count > 1 and 0 < rows <= _MOST_FACTORED else []


def _solved(count: int, rows: int, columns: int, itemsize: int, *, adjoint: bool = False) -> list[Step]:
    """Return the memory of lu_solve_kernel, by its method.

    cuSOLVER solves one matrix at a time, cuBLAS all through pointers. The third method is two triangular solutions; rows are
    permuted before them, or after them for the adjoint matrix.
    """
    one_by_one: list[Step] = [[_INFO]]
    at_once: list[Step] = [[count * _POINTER, count * _POINTER, PRODUCT]]
    if rows == columns:
        if rows <= 16:
            return at_once
    elif rows <= 64 or (rows <= 128 and columns <= 2):
        return one_by_one if count <= 2 else at_once
    places, permuted = count * rows * _PLACE, count * rows * columns * itemsize
    found: Step = ([rows * _PLACE], places) if count > 1 else (places,)
    both: list[Step] = [_triangular(count, rows), _triangular(count, rows)]
    return [found, *both, [permuted]] if adjoint else [found, (rows * _PLACE, places, permuted), *both]


def inverse(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add factors, pivots and the memory of solving for the identity, for linalg_inv_ex (BatchLinearAlgebra.cpp)."""
    count, rows = _shape(args[0])
    yield from tensors_of(out)
    if not args[0].numel():
        return
    yield (args[0].nbytes, count * rows * _PIVOT)
    yield _factors(count, rows)
    yield from _solved(count, rows, rows, args[0].itemsize)


def solution(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add the memory of factoring and solving for _linalg_solve_ex; factors and pivots are results (BatchLinearAlgebra.cpp)."""
    count, rows = _shape(args[0])
    yield from tensors_of(out)
    if args[0].numel() and args[1].numel():
        yield _factors(count, rows)
        yield from _solved(count, rows, max(1, out[0].numel() // (count * rows)), args[0].itemsize)


def solution_by_factors(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add a copy of factors that are not stored by columns, for linalg_lu_solve (BatchLinearAlgebra.cpp).

    Arguments: factors, pivots, right, *, left, adjoint.
    """
    matrix, left = args[0], kwargs.get("left", True)
    count, rows = _shape(matrix)
    yield out
    if not out.numel():
        return
    yield () if matrix.mT.is_contiguous() else (matrix.nbytes,)
    columns, adjoint = out.shape[-1 if left else -2], kwargs.get("adjoint", False) == left
    yield from _solved(count, rows, columns, matrix.itemsize, adjoint=adjoint)


def triangular_solution(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add pointers to matrices for linalg_solve_triangular, unless these are few and large (BatchLinearAlgebraLibBlas.cpp)."""
    yield out
    yield _triangular(*_shape(args[0])) if out.numel() else []


def cholesky_solution(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add a copy of one factor, or two triangular solutions of several, for _cholesky_solve_helper (BatchLinearAlgebra.cpp).

    Arguments: right, factor, upper. Sources: BatchLinearAlgebra.cpp, BatchLinearAlgebraLib.cpp.
    """
    count, rows = _shape(args[1])
    yield out
    yield from [[_INFO, args[1].nbytes]] if count == 1 else [_triangular(count, rows)] * 2


def cholesky_inverse(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add a copy of cholesky_inverse's factor, and the memory of solving for the identity (BatchLinearAlgebra.cpp)."""
    yield out
    yield (args[0].nbytes,)
    yield from [*cholesky_solution(device, (out, args[0]), {}, out)][1:]


def determinant(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add the memory of factoring, the product of the diagonal and a comparison of pivots (native/BatchLinearAlgebra.cpp).

    Operator: _linalg_det. Each pivot is compared with its own index to find permuted rows.
    """
    count, rows = _shape(args[0])
    yield from tensors_of(out)
    yield (count * _INFO,)
    yield _factors(count, rows)
    pivots = count * rows
    yield [count * args[0].itemsize, pivots * _PIVOT, pivots, count * 8, pivots * 8]


def logarithm_of_determinant(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add the memory of factoring and a comparison of pivots, for _linalg_slogdet (native/BatchLinearAlgebra.cpp)."""
    count, rows = _shape(args[0])
    yield from tensors_of(out)
    yield (count * _INFO,)
    yield _factors(count, rows)
    yield [count * rows * _PIVOT, count * rows, count * 8, count * rows * 8]


def factors(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add pointers to small matrices for linalg_lu_factor_ex (BatchLinearAlgebraLibBlas.cpp)."""
    yield from tensors_of(out)
    yield _factors(*_shape(args[0]))


def singular_values(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add a copy of _linalg_svd's matrix, and unused vectors (BatchLinearAlgebraLib.cpp, svd_cusolver).

    Arguments: matrix, full_matrices, compute_uv. Vectors are computed even if they are not requested.
    """
    matrix = args[0]
    wanted = args[2] if len(args) > 2 else kwargs.get("compute_uv", True)
    yield from tensors_of(out)
    count, least = prod(matrix.shape[:-2]), min(matrix.shape[-2:])
    vectors = [] if wanted else [count * size * least * matrix.itemsize for size in matrix.shape[-2:]]
    yield [count * _INFO, matrix.nbytes, *vectors] if matrix.numel() else []


def errors(device: Device, args: tuple, kwargs: dict, out: None) -> Steps:
    """Add whether any matrix failed, for _linalg_check_errors (native/BatchLinearAlgebra.cpp). On meta nothing is checked."""
    return [[1, 1] if args[0].numel() == 1 else [1]] if args[0].numel() else []


def eigenvalues(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add errors of _linalg_eigh and their check, and a copy of the matrix if no vectors are wanted (BatchLinearAlgebra.cpp).

    Arguments: matrix, UPLO, compute_v.
    """
    values, vectors = out
    count = prod(args[0].shape[:-2])
    yield from (vectors, values)
    if not args[0].numel():
        return
    yield [*([] if vectors.numel() else [args[0].nbytes]), count * _INFO, *([1, 1] if count == 1 else [1])]


def orthogonal(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add the factors of the reflections and an error of linalg_qr (native/BatchLinearAlgebra.cpp)."""
    yield from tensors_of(out)
    count, (rows, columns) = prod(args[0].shape[:-2]), args[0].shape[-2:]
    if args[0].numel():
        yield [count * min(rows, columns) * args[0].itemsize, _INFO]


def upper_and_lower(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add both factors in one matrix, pivots and errors of linalg_lu (native/BatchLinearAlgebra.cpp)."""
    yield from tensors_of(out)
    count, least = prod(args[0].shape[:-2]), min(args[0].shape[-2:])
    if args[0].numel():
        yield [args[0].nbytes, count * least * _PIVOT, count * _INFO, *_factors(*_shape(args[0]))]


def of_reflections(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add an error, and factors that are not contiguous, for linalg_householder_product (native/BatchLinearAlgebra.cpp)."""
    return [out, [*copies(args[1]), _INFO] if out.numel() else []]


def times_reflections(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add reflections that are not stored by columns, their factors and an error, for ormqr (native/BatchLinearAlgebra.cpp)."""
    stored = args[0].mT.is_contiguous()
    return [out, [*([] if stored else [args[0].nbytes]), *copies(args[1]), _INFO] if out.numel() else []]


def factored(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the reflections and their factors of geqrf, which has no meta kernel (native/BatchLinearAlgebra.cpp)."""
    matrix = args[0]
    if not matrix.is_meta:
        return NotImplemented
    factors = matrix.new_empty([*matrix.shape[:-2], min(matrix.shape[-2:])])
    return torch.empty(matrix.mT.shape, dtype=matrix.dtype, device="meta").mT, factors


def reflections(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add an error of geqrf (native/BatchLinearAlgebra.cpp)."""
    return [[_INFO]] if args[0].numel() else []


def factoring(args: tuple) -> str | None:
    """Return the library that factors matrices; None for cuBLAS, which factors many small ones at once, without a workspace."""
    return None if _factors(*_shape(args[0])) else "cuSOLVER"


HANDLERS: dict[Any, Handler] = listed("geqrf", factored)
ALLOCATIONS: dict[Any, AllocationRule] = {
    **listed("_linalg_check_errors", errors),
    **listed("_linalg_eigh", eigenvalues),
    **listed("linalg_qr", orthogonal),
    **listed("linalg_lu", upper_and_lower),
    **listed("linalg_householder_product", of_reflections),
    **listed("ormqr", times_reflections),
    **listed("geqrf", after_results(reflections)),
    **listed("linalg_inv_ex", inverse),
    **listed("_linalg_solve_ex", solution),
    **listed("linalg_lu_solve", solution_by_factors),
    **listed("linalg_solve_triangular", triangular_solution),
    **listed("_cholesky_solve_helper", cholesky_solution),
    **listed("cholesky_inverse", cholesky_inverse),
    **listed("_linalg_det", determinant),
    **listed("_linalg_slogdet", logarithm_of_determinant),
    **listed("linalg_lu_factor_ex", factors),
    **listed("_linalg_svd", singular_values),
}
LIBRARIES: dict[Any, Library] = {
    **listed(
        "linalg_cholesky_ex _cholesky_solve_helper cholesky_inverse _linalg_svd _linalg_eigh linalg_eig linalg_qr geqrf ormqr "
        "linalg_householder_product linalg_ldl_factor_ex linalg_ldl_solve",
        lambda args: "cuSOLVER",
    ),
    **listed("linalg_lu_factor_ex linalg_lu_solve linalg_inv_ex _linalg_solve_ex _linalg_det _linalg_slogdet", factoring),
}

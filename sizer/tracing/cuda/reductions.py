"""Reductions on CUDA: the operators that reduce, their dimensions, and the size query of their staging memory.

As of PyTorch 2.11 to 2.15: aten/src/ATen/native/cuda/Reduce*.cu for partial results, native/ReduceOpsUtils.h (make_reduction)
for the dtype to which the input is converted first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from sizer.tracing.allocations import AllocationRule, Steps, after_results
from sizer.tracing.cuda.by_hardware import PARTIAL, REDUCTION, SEMAPHORES
from sizer.tracing.device import Device
from sizer.tracing.log import DeferredSize
from sizer.tracing.operator_tables import listed
from sizer.tracing.values.handler import HandlerContext
from sizer.tracing.values.known import tensors_of

_HALVES = (torch.float16, torch.bfloat16)
_PAIR = 16  # a value and its place, or the four numbers of Welford's method
_PAIRS = (_PAIR, 2 * _PAIR)  # and these in double precision (SharedReduceOps.h, WelfordData)


def _summing(input: Tensor) -> int:
    return 4 if input.dtype in _HALVES else input.itemsize


def _as_it_is(input: Tensor) -> int:
    return input.itemsize


def _welford(input: Tensor) -> int:
    return _PAIRS[input.dtype in (torch.float64, torch.complex128)]


def _boolean(input: Tensor) -> int:
    return 1


def _reducer(
    accumulator: Callable[[Tensor], int],
    at: int | None,
    *,
    sums: bool = False,
    flat: Callable[[Tensor], Tensor] | None = None,
) -> AllocationRule:
    """Return the rule of an operator that reduces over the dimensions in its argument `at`, or over all if `at` is None.

    `sums` means that integers are converted to the result's dtype first. `flat` turns the input into one row if all elements are
    reduced, which may copy it (native/ReduceAllOps.cpp, TensorCompare.cpp, ReduceOps.cpp; 2.15).
    """

    def rule(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
        """Add partial results and semaphores of thread blocks that share an output (cuda/Reduce.cuh).

        Integers that are summed are converted to the result's dtype first.
        """
        input, result = args[0], out if isinstance(out, Tensor) else out[0]
        converts = sums and result.dtype != input.dtype and not (input.dtype in _HALVES and result.dtype == torch.float32)
        if input.numel() <= 1:
            if converts and input.numel():
                return [[result.itemsize]]
            is_boolean = accumulator is _boolean and input.numel() and input.dtype not in (torch.bool, torch.uint8)
            return [[1]] if is_boolean else []  # any, all: the only element as a boolean
        given = args[at] if at is not None and len(args) > at else kwargs.get("dim")
        copies = []
        if converts:
            input = input.to(result.dtype)
            copies = [input.numel() * input.itemsize]
        if flat is not None and given is None:
            row = flat(input)
            copies = [] if row.untyped_storage()._cdata == input.untyped_storage()._cdata else [row.nbytes]
            input = row
        return [[*copies, *_staging(input, _mask(input, given), accumulator(input), result.dtype)]]

    return after_results(rule)


def _over_diagonal(rule: AllocationRule) -> AllocationRule:
    """Return a rule for `trace`, which sums the diagonal (cuda/TriangularOps.cu, trace_cuda)."""

    @wraps(rule)  # keeps the docstring for --explain
    def steps(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
        return rule(device, (args[0].diagonal(),), {}, out)

    return steps


def _in_parts(rule: AllocationRule) -> AllocationRule:
    """Add the results of both parts of complex numbers before they are added (ReduceOps.cpp, std_var_out, 2.15)."""

    @wraps(rule)
    def steps(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
        yield from rule(device, args, kwargs, out)
        if args[0].is_complex():
            yield [one.nbytes // (2 if one.is_complex() else 1) for one in tensors_of((out,)) for _ in range(2)]

    return steps


def summing(input: Tensor, dims: tuple[int, ...]) -> list[int]:
    """Return the scratch bytes of a sum over these dimensions, in the input's dtype."""
    return _staging(input, _mask(input, dims), _summing(input), input.dtype) if input.numel() > 1 else []


def staged(input: Tensor, dims: Any) -> list[int]:
    """Return the scratch bytes of a sum over dimensions; None or an empty list means all dimensions."""
    return _staging(input, _mask(input, dims), _summing(input), input.dtype) if input.numel() > 1 else []


def extremes(input: Tensor, numbers: int = 2) -> list[int]:
    """Return the bytes of finding the least and the largest element, or one of them: a contiguous copy, and scratch."""
    row = torch.empty(input.numel(), dtype=input.dtype, device="meta")
    copied = [] if input.is_contiguous() else [input.nbytes]
    return [*copied, *_staging(row, (True,), numbers * input.itemsize, input.dtype)] if input.numel() > 1 else []


def largest_staged(input: Tensor, dims: Any) -> list[int]:
    """Return the scratch bytes of the largest elements over dimensions (amax); None or an empty list means all dimensions."""
    return _staging(input, _mask(input, dims), input.itemsize, input.dtype) if input.numel() > 1 else []


def of_variance(input: Tensor, dims: tuple[int, ...]) -> list[int]:
    """Return the scratch bytes of the variance over dimensions (var_mean)."""
    return _staging(input, _mask(input, dims), _welford(input), input.dtype) if input.numel() > 1 else []


def largest_of_rows(input: Tensor) -> list[int]:
    """Return the scratch bytes of finding the largest element's index in each row (argmax)."""
    return _staging(input, _mask(input, -1), _PAIR, torch.int64) if input.numel() > 1 else []


def _mask(input: Tensor, given: Any) -> tuple[bool, ...]:
    if given is None or (isinstance(given, (list, tuple)) and not given):
        return (True,) * input.dim()
    dims = {dim % input.dim() for dim in (given if isinstance(given, (list, tuple)) else (given,))}
    return tuple(dim in dims for dim in range(input.dim()))


def _staging(input: Tensor, reduced: tuple[bool, ...], accumulator: int, result: torch.dtype) -> list[int]:
    converts = accumulator not in _PAIRS and not (input.dtype in _HALVES and result == input.dtype and accumulator > 2)
    words = "".join("01"[gone] for gone in reduced), str(input.itemsize), str(accumulator), str(int(converts))
    numbers = *input.shape, *input.stride()
    return [DeferredSize(0, REDUCTION, (which, *words), numbers) for which in (PARTIAL, SEMAPHORES)]


ALLOCATIONS: dict[Any, AllocationRule] = {
    **listed("sum", _reducer(_summing, None, sums=True)),
    **listed("trace", _over_diagonal(_reducer(_summing, None, sums=True))),
    **listed("sum.dim_IntList nansum", _reducer(_summing, 1, sums=True)),
    **listed("prod", _reducer(_summing, None, sums=True)),
    **listed("prod.dim_int", _reducer(_summing, 1, sums=True)),
    **listed("mean", _reducer(_summing, None, sums=True)),
    **listed("mean.dim", _reducer(_summing, 1, sums=True)),
    **listed("linalg_vector_norm norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype", _reducer(_summing, 2)),
    **listed("norm.Scalar norm.ScalarOpt_dtype", _reducer(_summing, None)),
    **listed("amax amin", _reducer(_as_it_is, 1)),
    **listed("max min", _reducer(_as_it_is, None, flat=Tensor.contiguous)),
    **listed("max.dim min.dim", _reducer(lambda input: _PAIR, 1)),
    **listed("argmax argmin", _reducer(lambda input: _PAIR, 1, flat=lambda input: input.reshape(-1))),
    **listed("aminmax", _reducer(lambda input: 2 * input.itemsize, 1, flat=Tensor.contiguous)),
    **listed(
        "var.correction std.correction var_mean.correction std_mean.correction", _in_parts(_reducer(_welford, 1))
    ),
    **listed("any all", _reducer(_boolean, None)),
    **listed("any.dim any.dims all.dim all.dims", _reducer(_boolean, 1)),
}


def in_float32(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Add in float32 in the gradient of renorm, as on CUDA (FunctionsManual.cpp, renorm_backward).

    On meta, as on the CPU, it adds in float64.
    """
    if kwargs.get("dtype") != torch.float64 or args[0].dtype != torch.float32:
        return NotImplemented
    node = torch._C._current_autograd_node()
    if node is None or not node.name().startswith("RenormBackward"):
        return NotImplemented
    with recorder:
        return func(*args, **(kwargs | {"dtype": None}))


HANDLERS = listed("linalg_vector_norm sum.dim_IntList", in_float32)

"""Kernels of the CPU that first copy operands: contiguous, in channels last, or in the dtype of the computation.

As of PyTorch 2.11 to 2.15.

Collectives of gloo copy to gloo's own memory first; NCCL writes to the output directly. Read in PyTorch 2.11 and 2.15:
torch/csrc/distributed/c10d/ProcessGroupGloo.cpp.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from sizer.tracing.allocations import AllocationRule, Steps
from sizer.tracing.device import Device
from sizer.tracing.meta.strides import in_format, memory_format
from sizer.tracing.operator_tables import Results, listed
from sizer.tracing.values.known import tensors_of

_aten = torch.ops.aten


def copying(*positions: int, last: bool = False) -> AllocationRule:
    """Return a rule that adds contiguous copies of the arguments at these positions.

    With `last` the copies have the memory format of the first argument. Users: softmax (cpu/SoftMaxKernel.cpp), group norm,
    pooling, padding, index_select and their gradients.
    """

    def inner(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
        """Add contiguous copies of operands that are not contiguous (cpu/SoftMaxKernel.cpp and the kernel of each operator)."""
        tensors = [args[i] for i in positions]
        wanted = memory_format(tensors[0]) if last else torch.contiguous_format
        return [*tensors_of((out,)), [0 if t.is_contiguous(memory_format=wanted) else t.nbytes for t in tensors]]

    return inner


def upsample(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add channels-last copies of input and result of small or channels-last images (cpu/UpSampleKernel.cpp).

    Operators: upsample_nearest2d and upsample_bilinear2d. Source: _use_vectorized_kernel_cond_2d. Tensors that are in channels
    last are not copied.
    """
    input = args[0]
    last = input.is_contiguous(memory_format=torch.channels_last) and input.shape[1] > 3
    if not last and out.shape[-2] + out.shape[-1] > 128:
        return [out]
    return [out, [0 if t.is_contiguous(memory_format=torch.channels_last) else t.nbytes for t in (input, out)]]


def promoted(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add copies of operands in the dtype of the computation (TensorIterator.cpp, compute_types).

    Pointwise operators on the CPU need them. A result of another dtype is computed in a copy too, which then overwrites the
    result. A GPU converts in registers.
    """
    return _converted(args, out, None)


def promoted_to_float(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add copies of integers in the default dtype (TensorIterator.cpp, promote_integer_inputs_to_float)."""
    return _converted(args, out, torch.get_default_dtype())


def selected(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add converted copies for where and similar operators, except of their mask (TensorIterator.cpp)."""
    return _converted(args[1:], out, None)


def _converted(args: tuple, out: Any, of_integers: torch.dtype | None) -> Steps:
    operands = [a for a in args if isinstance(a, (Tensor, bool, int, float, complex))]
    tensors = [a for a in operands if isinstance(a, Tensor)]
    if not isinstance(out, Tensor) or not tensors:
        return [*tensors_of((out,))]
    wide = functools.reduce(torch.promote_types, [torch.result_type(tensors[0], other) for other in operands])
    if of_integers is not None and not (wide.is_floating_point or wide.is_complex):
        wide = of_integers
    sizes = [t.numel() * wide.itemsize for t in tensors if t.dtype != wide and t.dim()]
    if out.dtype not in (wide, torch.bool):
        sizes.append(out.numel() * wide.itemsize)
    return [tuple(sizes), out] if sizes else [out]


def like_input(args: tuple, out: Tensor) -> Tensor:
    """Return the result in channels last if the input is; on meta it is contiguous."""
    return in_format(out, memory_format(args[0])) if out.dim() == 4 else out


# By name, since PyTorch would make an object of each: a row serves new results, results in place and results in `out`.
_KINDS = ("Tensor", "Scalar", "Tensor_Tensor", "self")
_OVERLOADS = ("default", "out", *_KINDS, *(f"{kind}_out" for kind in _KINDS))
_PROMOTED = """
    add sub mul maximum minimum fmax fmin pow fmod remainder hypot copysign addcmul addcdiv floor_divide clamp clamp_min clamp_max
    bitwise_and bitwise_or bitwise_xor eq ne lt le gt ge logical_and logical_or logical_xor
"""
_PROMOTED_TO_FLOAT = """
    div atan2 logaddexp logaddexp2 xlogy exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan sinh cosh tanh asin acos atan
    sigmoid reciprocal erf erfc lgamma digamma
"""


def _overloads(names: str, rule: AllocationRule) -> dict[str, AllocationRule]:
    each = ((name, place, overload) for name in names.split() for place in ("", "_") for overload in _OVERLOADS)
    return {f"aten.{name}{place}.{overload}": rule for name, place, overload in each}


RESULTS: Results = {_aten.roll.default: like_input, _aten.reflection_pad2d.default: like_input}


# ---------------------------------------------------------------------------------------------------------------- gloo


def gathered(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add one tensor with the data of all ranks, from which the outputs are copied (ProcessGroupGloo.cpp).

    Operators: allgather_ and _allgather_base_, with outputs as the first argument.
    """
    outputs = args[0][0] if isinstance(args[0], list) else [args[0]]
    return [[sum(tensor.nbytes for tensor in outputs)]]


def reduced(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add a copy of the whole input, which is reduced, for _reduce_scatter_base_ (ProcessGroupGloo.cpp)."""
    return [[sum(tensor.nbytes for tensor in tensors_of(args[1:2]))]]


_ROWS: dict[str, AllocationRule] = {
    "allgather_": gathered,
    "_allgather_base_": gathered,
    "_reduce_scatter_base_": reduced,
}
# PyTorch may be built without torch.distributed.


ALLOCATIONS: dict[Any, AllocationRule] = {
    **_overloads(_PROMOTED, promoted),
    **_overloads(_PROMOTED_TO_FLOAT, promoted_to_float),
    **_overloads("where", selected),
    **listed("_softmax _log_softmax index_select", copying(0)),
    **listed("_softmax_backward_data _log_softmax_backward_data", copying(0, 1)),
    **listed("max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d", copying(0, last=True)),
    **listed("upsample_bilinear2d_backward upsample_nearest2d_backward reflection_pad2d", copying(0, last=True)),
    **listed("upsample_bilinear2d upsample_nearest2d", upsample),
    **{
        getattr(torch.ops.c10d, name).default: row for name, row in _ROWS.items() if hasattr(torch.ops.c10d, name)
    },
}

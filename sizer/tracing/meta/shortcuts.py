"""Results of frequent operators without their meta kernels, most of which are Python and up to a thousand times slower.

Inputs are floating-point tensors of one dtype, contiguous or row by row with gaps (one half of a `chunk`). Pointwise operators
return a contiguous tensor of the largest shape, comparisons one of booleans, in-place operators their first argument,
`_foreach_` operators a list of tensors. If any condition does not hold, the meta kernel runs. `normal_`, `uniform_` and
`erfinv_` fill a model's parameters when it is built (torch/nn/init.py); the first meta kernel of a process that makes random
numbers imports sympy. `tests/tracing/test_shortcuts.py` compares each with its meta kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sizer.tracing.meta.autocast import names
from sizer.tracing.meta.strides import plain_strides
from sizer.tracing.operator_tables import join, listed, operator
from sizer.tracing.values.known import LARGEST_FLOATS, is_meta

_aten = torch.ops.aten
_META = torch.device("meta")


def like(tensor: Tensor) -> Tensor:
    """Return an empty contiguous meta tensor of the same shape and dtype."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=_META)


def _vector(length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(length, dtype=dtype, device=_META)


def plain_floats(*tensors: Tensor) -> bool:
    """Return whether all are contiguous floating-point meta tensors."""
    return all(is_meta(t) and t.dtype.is_floating_point and t.is_contiguous() for t in tensors)


def like_first(args: tuple) -> Any:
    """Return a tensor like the contiguous floating-point first argument; other tensors do not matter."""
    return like(args[0]) if plain_floats(args[0]) else NotImplemented


def cudnn_batch_norm(args: tuple) -> Any:
    """Return the output like input [N, C, ..], mean [C], inverse deviation [C] and reserve [0]; no statistics in evaluation."""
    input, channels = args[0], args[0].shape[1] if args[5] else 0
    if not plain_floats(input) or args[1].dtype != torch.float32:
        return NotImplemented
    return like(input), _vector(channels), _vector(channels), _vector(0, torch.uint8)


def cudnn_batch_norm_backward(args: tuple) -> Any:
    """Return the gradients of input, weight [C] and bias [C].

    Arguments: input, gradient, weight, ...
    """
    if not plain_floats(args[0], args[1]):
        return NotImplemented
    return like(args[0]), like(args[2]), like(args[2])


def native_batch_norm(args: tuple) -> Any:
    """Return the output like input [N, C, ..], mean [C] and inverse deviation [C], the statistics in float32."""
    if not plain_floats(args[0]) or args[0].dtype == torch.float64:
        return NotImplemented
    return like(args[0]), _vector(args[0].shape[1]), _vector(args[0].shape[1])


def native_batch_norm_backward(args: tuple) -> Any:
    """Return the gradients of input, weight and bias, each None if the mask excludes it."""
    grad, input, weight, wanted = args[0], args[1], args[2], args[9]
    if not plain_floats(grad, input):
        return NotImplemented
    dtype = input.dtype if weight is None else weight.dtype
    channels = [_vector(input.shape[1], dtype) if w else None for w in wanted[1:]]
    return (like(input) if wanted[0] else None, *channels)


def native_layer_norm(args: tuple) -> Any:
    """Return the output like input [.., N], mean [.., 1] and inverse deviation [.., 1], the statistics in float32."""
    input, normalized = args[0], len(args[1])
    if not plain_floats(input) or input.dtype == torch.float64:
        return NotImplemented
    rows = [*input.shape[: input.dim() - normalized], *[1] * normalized]
    statistics = [torch.empty(rows, dtype=torch.float32, device=_META) for _ in range(2)]
    return like(input), *statistics


def native_layer_norm_backward(args: tuple) -> Any:
    """Return the gradients of input, weight and bias, each None if the mask excludes it."""
    grad, input, weight, bias, wanted = args[0], args[1], args[5], args[6], args[7]
    if not plain_floats(grad, input):
        return NotImplemented
    return tuple(like(t) if w and t is not None else None for t, w in zip((input, weight, bias), wanted, strict=True))


def native_dropout(args: tuple) -> Any:
    """Return the output like input, and a mask of 1 byte per element."""
    input = args[0]
    if not plain_floats(input) or not args[2]:
        return NotImplemented
    return like(input), torch.empty(input.shape, dtype=torch.bool, device=_META)


_OF_NORMS: dict[Any, Any] = {
    _aten.cudnn_batch_norm.default: cudnn_batch_norm,
    _aten.cudnn_batch_norm_backward.default: cudnn_batch_norm_backward,
    _aten.native_batch_norm.default: native_batch_norm,
    _aten._native_batch_norm_legit.default: native_batch_norm,
    _aten.native_batch_norm_backward.default: native_batch_norm_backward,
    _aten.native_layer_norm.default: native_layer_norm,
    _aten.native_layer_norm_backward.default: native_layer_norm_backward,
    _aten.native_dropout.default: native_dropout,
    _aten.native_dropout_backward.default: like_first,
}


# ----------------------------------------------------------------------------------------------------------- shortcuts


POINTWISE = """
    add.Tensor sub.Tensor mul.Tensor div.Tensor add.Scalar sub.Scalar mul.Scalar div.Scalar pow.Tensor_Scalar rsqrt
    sqrt exp neg abs round sigmoid silu gelu relu tanh cos sin erf reciprocal clamp hardtanh hardswish hardsigmoid
    leaky_relu gelu_backward silu_backward threshold_backward sigmoid_backward tanh_backward hardtanh_backward
    hardswish_backward hardsigmoid_backward leaky_relu_backward maximum minimum addcmul addcdiv
"""
COMPARISONS = "lt.Scalar gt.Scalar le.Scalar ge.Scalar lt.Tensor gt.Tensor le.Tensor ge.Tensor"
IN_PLACE = """
    add_.Tensor add_.Scalar sub_.Tensor mul_.Tensor mul_.Scalar div_.Tensor div_.Scalar relu_ clamp_ sqrt_ neg_
    addcmul_ addcdiv_ lerp_.Scalar copy_ zero_ fill_.Scalar silu_ sigmoid_ hardtanh_ hardswish_ leaky_relu_
    normal_ uniform_ erfinv_
"""
FOREACH = names("""
    add.Scalar add.List add.ScalarList sub.List sub.Scalar mul.Scalar mul.List mul.ScalarList div.Scalar div.List
    div.ScalarList div.Tensor mul.Tensor add.Tensor sqrt neg abs pow.Scalar reciprocal maximum.List lerp.List
    lerp.Scalar addcdiv.Scalar addcdiv.ScalarList addcdiv.Tensor addcmul.Scalar addcmul.ScalarList addcmul.Tensor
    sign
""")


def _is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    return is_meta(tensor) and tensor.dtype == dtype and (tensor.is_contiguous() or _is_row_major(tensor))


def _is_row_major(tensor: Tensor) -> bool:
    """Return whether the elements have the order of a contiguous tensor, though with gaps.

    TensorIterator.cpp keeps that order.
    """
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    return all(left > right for left, right in zip(strides, [*strides[1:], 0], strict=True))


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or _aten.is_non_overlapping_and_dense.default(tensor)


def _fits_into(small: torch.Size, large: torch.Size) -> bool:
    """Return whether broadcasting the small shape to the large one leaves the large one unchanged."""
    if len(small) > len(large):
        return False
    return all(s in (1, n) for s, n in zip(reversed(small), reversed(large), strict=False))


def pointwise(args: tuple) -> Any:
    """Return the result of a pointwise operator, or NotImplemented if its meta kernel must run."""
    shape = _common_shape(args)
    return NotImplemented if shape is None else torch.empty(shape, dtype=args[0].dtype, device=_META)


def comparison(args: tuple) -> Any:
    """Return the booleans of a comparison of floating-point tensors."""
    shape = _common_shape(args)
    return NotImplemented if shape is None else torch.empty(shape, dtype=torch.bool, device=_META)


def where(args: tuple) -> Any:
    """Return the selection from two floating-point tensors by a condition [..] of their common shape."""
    condition, *values = args
    if not all(isinstance(value, Tensor) for value in values) or not _is_plain(condition, torch.bool):
        return NotImplemented
    shape = _common_shape(tuple(values))
    if shape is None or not _fits_into(shape, condition.shape):
        return NotImplemented
    return torch.empty(condition.shape, dtype=values[0].dtype, device=_META)


def _common_shape(args: tuple) -> torch.Size | None:
    """Return the shape of the largest tensor, to which the others broadcast; None if a meta kernel must run."""
    first = args[0]
    if not isinstance(first, Tensor) or not (dtype := first.dtype).is_floating_point:
        return None
    tensors, shape, alike = [], first.shape, True
    for arg in args:
        if isinstance(arg, Tensor):
            if not _is_plain(arg, dtype):
                return None
            tensors.append(arg)
            alike = alike and arg.shape == shape
        elif type(arg) is complex:
            return None
    if not alike:
        shape = max(tensors, key=lambda tensor: (tensor.dim(), tensor.numel())).shape
        if not all(tensor.shape == shape or _fits_into(tensor.shape, shape) for tensor in tensors):
            return None
    if 1 in shape and any(tensor.dim() and tensor.stride() != plain_strides(tensor.shape) for tensor in tensors):
        return None  # TensorIterator may keep the stride of a dimension of size 1
    return shape


def in_place(args: tuple) -> Any:
    """Return the first argument, if it is a floating-point meta tensor to which the others broadcast."""
    first = args[0]
    if not is_meta(first) or not first.dtype.is_floating_point:
        return NotImplemented
    for other in args[1:]:
        if isinstance(other, Tensor) and other.shape != first.shape and not _fits_into(other.shape, first.shape):
            return NotImplemented
    return first


def foreach(args: tuple) -> Any:
    """Return a new tensor for every dense floating-point meta tensor of the first list, of its shape and strides."""
    if not all(is_meta(t) and t.dtype.is_floating_point and _is_dense(t) for t in args[0]):
        return NotImplemented
    others = [a for a in args[1:] if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)]
    if any(a.dtype != t.dtype or a.shape != t.shape for other in others for a, t in zip(other, args[0], strict=True)):
        return NotImplemented
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=_META) for t in args[0]]


def foreach_in_place(args: tuple) -> Any:
    """Return None, if every tensor of the first list is a floating-point meta tensor."""
    return None if all(is_meta(t) and t.dtype.is_floating_point for t in args[0]) else NotImplemented


def resized(args: tuple) -> Any:
    """Return images [N, C, ..] of the size in the second argument, if the first is contiguous."""
    input, size = args[0], args[1]
    if not isinstance(size, (list, tuple)) or not plain_floats(input) or input.dim() != 4 or input.numel() == 0:
        return NotImplemented
    if len(size) != 2 or min(size) <= 0:
        return NotImplemented
    return torch.empty((*input.shape[:2], *size), dtype=input.dtype, device=_META)


def summed(args: tuple) -> Any:
    """Return a contiguous floating-point tensor without the dimensions in the list, or with each of them as 1."""
    tensor, dims, keep = args[0], args[1], len(args) > 2 and args[2]
    if not dims or not plain_floats(tensor) or not all(-tensor.dim() <= dim < tensor.dim() for dim in dims):
        return NotImplemented
    gone = {dim % tensor.dim() for dim in dims}
    shape = [1 if axis in gone else size for axis, size in enumerate(tensor.shape) if keep or axis not in gone]
    return torch.empty(shape, dtype=tensor.dtype, device=_META) if len(gone) == len(dims) else NotImplemented


def joined(args: tuple) -> Any:
    """Return contiguous floating-point tensors of one dtype, concatenated along a dimension (0 by default)."""
    tensors, dim = args[0], args[1] if len(args) > 1 else 0
    first = tensors[0]
    if not plain_floats(*tensors) or not -first.dim() <= dim < first.dim():
        return NotImplemented
    dim %= first.dim()
    rest = [size for axis, size in enumerate(first.shape) if axis != dim]
    for tensor in tensors:
        others = [size for axis, size in enumerate(tensor.shape) if axis != dim]
        if tensor.dtype != first.dtype or tensor.dim() != first.dim() or others != rest:
            return NotImplemented
    shape = [*first.shape]
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return torch.empty(shape, dtype=first.dtype, device=_META)


def zeros_like(args: tuple) -> Any:
    """Return a tensor of the same shape and strides; its zeros are known values only if the tensor is small."""
    tensor = args[0]
    if not plain_floats(tensor) or tensor.numel() <= LARGEST_FLOATS or tensor.stride() != plain_strides(tensor.shape):
        return NotImplemented
    return like(tensor)


_OTHERS = {
    _aten.upsample_nearest2d.default: resized,
    _aten.upsample_bilinear2d.default: resized,
    _aten.upsample_bicubic2d.default: resized,
    _aten.zeros_like.default: zeros_like,
    _aten.where.self: where,
    _aten.sum.dim_IntList: summed,
    _aten.cat.default: joined,
}


def _foreach(name: str, suffix: str) -> Any:
    packet, _, overload = name.partition(".")
    return operator(f"_foreach_{packet}{suffix}.{overload}")


SHORTCUTS = join(
    _OF_NORMS,
    _OTHERS,
    listed(POINTWISE, pointwise),
    listed(COMPARISONS, comparison),
    listed(IN_PLACE, in_place),
    {_foreach(name, ""): foreach for name in FOREACH},
    {_foreach(name, "_"): foreach_in_place for name in FOREACH},
)

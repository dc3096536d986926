"""Memory formats: strides of results for which meta kernels and the device's kernels differ.

Later operators copy or not depending on these strides. As of PyTorch 2.11 to 2.15.

Losses are computed into their result and then reduced there: the scalar has a storage for all elements, because `resize_` never
shrinks a storage (native/BinaryOps.cpp, native/Loss.cpp; PyTorch 2.15, seen by the profiler on the CPU).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from sizer.tracing.operator_tables import Results, listed

_aten = torch.ops.aten
_LAST = (torch.channels_last, torch.channels_last_3d)


def suggest_memory_format(tensor: Tensor) -> torch.memory_format:
    """Return channels last if the strides of a tensor [N, C, ..] are in this order (torch._prims_common.suggest_memory_format)."""
    if tensor.layout != torch.strided or not _is_channels_last(tensor.shape, tensor.stride()):
        return torch.contiguous_format
    return _LAST[tensor.ndim - 4]


@lru_cache(2**12)
def _is_channels_last(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return is_channels_last_strides_2d_s4 or _3d_s5 (c10/core/MemoryFormat.h, PyTorch 2.11 to 2.15)."""
    if len(shape) not in (4, 5) or strides[1] == 0:
        return False
    least = 0
    for dim in (1, *range(len(shape) - 1, 1, -1), 0):
        if shape[dim] == 0 or strides[dim] < least or (dim == 0 and least == strides[1]):
            return False
        least = strides[dim] * shape[dim]
    return True


def memory_format(*tensors: Tensor) -> torch.memory_format:
    """Return channels last if one of the tensors [N, C, ..] has this format; never in double precision."""
    for tensor in tensors:
        if tensor.dtype != torch.float64 and (found := suggest_memory_format(tensor)) in _LAST:
            return found
    return torch.contiguous_format


def in_format(tensor: Tensor | None, wanted: torch.memory_format) -> Tensor | None:
    """Return the tensor itself if it has the format, else a new tensor with it."""
    if tensor is None or tensor.is_contiguous(memory_format=wanted):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device, memory_format=wanted)


def _is_surely_contiguous(tensor: Tensor) -> bool:
    """Return whether a tensor is contiguous and not also in channels last.

    A tensor of one channel or one pixel may be both.
    """
    return tensor.stride(1) != 1 and tensor.is_contiguous()


@lru_cache(2**12)
def plain_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor that PyTorch makes itself: a dimension of size 1 counts like any other."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def iterated_strides(shape: Sequence[int], tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the strides that TensorIterator gives a result of this shape, to which its operands are broadcast.

    Source: aten/src/ATen/TensorIterator.cpp, 2.11 to 2.15: compute_fast_setup_type, then reorder_dimensions, whose order of
    dimensions includes those of size 1.
    """
    plain = plain_strides(shape)
    if all(tensor.shape == shape for tensor in tensors):
        if all(tensor.is_contiguous() for tensor in tensors):
            return plain
        for layout in (torch.channels_last,):
            if len(shape) == 4 and all(tensor.is_contiguous(memory_format=layout) for tensor in tensors):
                return torch.empty(shape, device="meta", memory_format=layout).stride()
        first = tensors[0].stride()
        if all(t.stride() == first and _aten.is_non_overlapping_and_dense.default(t) for t in tensors):
            return first
    order = _order(shape, [_broadcast_strides(shape, tensor) for tensor in tensors])
    if order == list(reversed(range(len(shape)))):
        return plain
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def _broadcast_strides(shape: Sequence[int], tensor: Tensor) -> list[int]:
    added = len(shape) - tensor.dim()
    pairs = zip(tensor.shape, tensor.stride(), shape[added:], strict=True)
    return [0] * added + [
        0 if size == 1 and wanted != 1 else stride * tensor.itemsize for size, stride, wanted in pairs
    ]


def _order(shape: Sequence[int], strides: list[list[int]]) -> list[int]:
    """Return the dimensions, the fastest first (TensorIteratorBase::reorder_dimensions): an insertion sort by strides."""

    def compare(first: int, second: int) -> int:
        for steps in strides:
            one, other = steps[first], steps[second]
            if one == 0 or other == 0:
                continue
            if one != other:
                return -1 if one < other else 1
            if shape[first] > shape[second]:
                return 1
        return 0

    order = list(reversed(range(len(shape))))
    for start in range(1, len(order)):
        place = start
        for before in reversed(range(start)):
            found = compare(order[before], order[place])
            if found > 0:
                order[before], order[place] = order[place], order[before]
                place = before
            elif found < 0:
                break
    return order


def iterated(args: tuple, out: Any, *, numbers: bool = False) -> Any:
    """Return the result of a pointwise operator with TensorIterator's strides. `numbers` means that numbers are operands too."""
    if not isinstance(out, Tensor) or out.device.type != "meta" or out.dim() < 2 or out.numel() == 0:
        return out
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if not tensors or any(t.device.type != "meta" and t.dim() for t in tensors):
        return out
    if numbers and any(isinstance(arg, (int, float)) for arg in args[:2]):
        tensors.append(torch.empty((), device="meta"))
    wanted = iterated_strides(out.shape, tensors)
    return out if wanted == out.stride() else _with_strides(out, wanted)


def indexed(args: tuple, out: Tensor) -> Tensor:
    """Return aten.index's result with TensorIterator's strides (native/TensorAdvancedIndexing.cpp, AdvancedIndex).

    They depend on the input, in which indexed dimensions have stride 0, and on the indices, including their strides in
    dimensions of size 1.
    """
    input, given = args[0], [*args[1], *[None] * (args[0].dim() - len(args[1]))]
    places = [place for place, index in enumerate(given) if index is not None]
    indices = [given[place] for place in places]
    masks = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    if 1 not in out.shape or out.device.type != "meta" or masks:
        return out
    if places[-1] - places[0] >= len(places):  # not adjacent: their dimensions come first
        others = [place for place in range(input.dim()) if place not in places]
        input, places = input.permute(*places, *others), list(range(len(places)))
    before, after = input.stride()[: places[0]], input.stride()[places[-1] + 1 :]
    shape = common_shape(indices)
    source = input.as_strided(out.shape, (*before, *[0] * len(shape), *after))
    spread = [index.expand(shape).reshape(*[1] * len(before), *shape, *[1] * len(after)) for index in indices]
    wanted = iterated_strides(out.shape, [source, *spread])
    return out if wanted == out.stride() else _with_strides(out, wanted)


def common_shape(tensors: Sequence[Tensor]) -> torch.Size:
    """Return the shape to which tensors broadcast; PyTorch computes it in Python."""
    shapes = {tensor.shape for tensor in tensors}
    return shapes.pop() if len(shapes) == 1 else torch.broadcast_shapes(*shapes)


def like_first(args: tuple, out: Any) -> Any:
    """Return tensors made like another with its strides, if that is dense (native/TensorFactories.cpp, empty_like)."""
    return _like(args[0], out) if isinstance(out, Tensor) else tuple(_like(args[0], made) for made in out)


def _like(first: Tensor, out: Tensor) -> Tensor:
    if out.shape != first.shape or out.stride() == first.stride():
        return out
    if not _aten.is_non_overlapping_and_dense.default(first) or not _is_permuted(out, first):
        return out
    return _with_strides(out, first.stride())


def _is_permuted(out: Tensor, first: Tensor) -> bool:
    """Return True if strides are equal, except in dimensions of size 1."""
    return all(
        one == other for size, one, other in zip(out.shape, out.stride(), first.stride(), strict=True) if size != 1
    )


def _with_strides(out: Tensor, strides: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(out.shape, strides, dtype=out.dtype, device=out.device)


def correction(func: Any) -> Callable[[tuple, Any], Any] | None:
    """Return a function that corrects the strides of an operator's result, by its tags and name, or None."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten" or func._schema.is_mutable:
        return None
    if func._opname in _LIKE:
        return like_first
    if func._opname in ("masked_fill", "_unsafe_masked_index") or len(func._schema.returns) != 1:
        return None  # a contiguous clone that is written to
    if func._opname == "threshold_backward":  # its operands are the input and the gradient (native/Activation.cpp)
        return lambda args, out: iterated((args[1], args[0]), out)
    if torch.Tag.pointwise in func.tags or func._opname == "_prelu_kernel":
        # a number as an operand is a tensor without dimensions, so not all operands have the same shape
        return partial(
            iterated, numbers=func._overloadname in ("Scalar", "Tensor", "self", "ScalarOther", "ScalarSelf")
        )
    return None


_LIKE = {
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like", "clone", "_to_copy", "flip",
    "native_dropout", "sort",
}  # fmt: skip


def convolution(args: tuple, out: Tensor) -> Tensor:
    """Return aten.convolution's result in channels last if the input or the weight is; on meta it is contiguous.

    Source: mkldnn_conv_use_channels_last and cudnn_conv_suggest_memory_format (aten/src/ATen/native/ConvUtils.h); in
    torch/_meta_registrations.py, meta_conv: "Memory format is left as contiguous".
    """
    if _is_surely_contiguous(args[0]) and _is_surely_contiguous(args[1]):
        return out
    return in_format(out, memory_format(args[0], args[1]))


def convolution_backward(args: tuple, out: tuple) -> tuple:
    """Return the gradients of input and weight in channels last if the input or the weight is.

    The gradient's own strides do not matter, although PyTorch 2.11's meta kernel follows them.
    Source: determine_backend_memory_format in aten/src/ATen/native/Convolution.cpp.
    """
    plain = _is_surely_contiguous(args[1]) and _is_surely_contiguous(args[2])
    wanted = torch.contiguous_format if plain else memory_format(args[1], args[2])
    return (in_format(out[0], wanted), in_format(out[1], wanted), out[2])


def layer_norm_backward(args: tuple, out: tuple) -> tuple:
    """Return native_layer_norm_backward's results with a contiguous gradient of the input (layer_norm.cpp).

    On meta it has the strides of the incoming gradient.
    """
    return (in_format(out[0], torch.contiguous_format), *out[1:])


def group_norm_backward(args: tuple, out: tuple) -> tuple:
    """Return native_group_norm_backward's results with the input's gradient in the input's dtype (group_norm.cpp).

    On meta it has the widest dtype of the arguments.
    """
    input = args[1]
    if out[0] is None or out[0].dtype == input.dtype:
        return out
    return (
        torch.empty(input.shape, dtype=input.dtype, device=input.device, memory_format=memory_format(input)),
        *out[1:],
    )


# -------------------------------------------------------------------------------------------------------------- losses


_NONE = 0  # at::Reduction::None


def is_reduced(args: tuple, kwargs: dict, at: int) -> bool:
    """Return True if a loss is reduced to its mean or sum; `at` is the position of the reduction argument."""
    return (args[at] if len(args) > at else kwargs.get("reduction", 1)) != _NONE


def elements_of(args: tuple) -> torch.Size:
    """Return the shape of a loss's elements."""
    return common_shape([arg for arg in args if isinstance(arg, Tensor)])


def over_elements(at: int) -> Any:
    """Return a correction for a reduced loss, which has the storage of all elements; `at` is the position of the reduction."""

    def correct(args: tuple, out: Tensor) -> Tensor:
        if not is_reduced(args, {}, at):
            return out
        return torch.empty(elements_of(args[:at]), dtype=out.dtype, device=out.device).resize_(())

    return correct


RESULTS: Results = {
    _aten.index.Tensor: indexed,
    _aten._unsafe_index.Tensor: indexed,
    _aten.convolution.default: convolution,
    _aten.convolution_backward.default: convolution_backward,
    _aten.native_layer_norm_backward.default: layer_norm_backward,
    _aten.native_group_norm_backward.default: group_norm_backward,
    **listed("mse_loss smooth_l1_loss soft_margin_loss", over_elements(2)),
    **listed("binary_cross_entropy", over_elements(3)),
}

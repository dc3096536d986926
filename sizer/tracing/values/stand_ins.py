"""Operators whose result depends on values: computed from known values, else given by a documented stand-in.

Each stand-in is noted once per operator and module, and every report lists it as uncounted. Where a stand-in has values of its
own (the places that `nonzero` found), they are known from there on, so that what follows agrees with it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sizer.tracing.values.handler import Handler, HandlerContext
from sizer.tracing.values.known import LARGEST_ASSUMED, tensors_of
from sizer.versions import installed_version

NONZERO = "nonzero of unknown values was taken to find every element"
PASSED = "of the boxes of unknown scores {} were taken to pass the threshold, as many as the model goes on with"
FINITE = "unknown values were taken to be finite numbers"
LISTED = "a list of numbers as an index was taken as 0, 1, 2, ..., since meta tensors do not keep it"
EVERY = "an unknown boolean mask was taken to select every element"

_aten = torch.ops.aten
_LISTS_COME_UNSEEN = installed_version() < (2, 15)  # of the code that runs, whatever the device's rules


def on_meta(real: Any, recorder: HandlerContext, assumption: str | None = None) -> Any:
    """Meta tensors of the shapes of real results, their values remembered, as assumed ones where `assumption` says so."""
    if isinstance(real, (list, tuple)):
        return type(real)(on_meta(r, recorder, assumption) for r in real)
    if not isinstance(real, Tensor):
        return real
    out = torch.empty(real.shape, dtype=real.dtype, device="meta")
    if assumption is None:
        recorder.values.remember(out, real.contiguous())
    else:
        recorder.values.assume(out, real.contiguous(), assumption)
    return out


def note_assumption(recorder: HandlerContext, tensors: list[Tensor]) -> None:
    """Note what the values of these tensors were assumed to be, now that something depends on them."""
    if (text := recorder.values.assumption(tensors)) is not None:
        recorder.stand_in(text)


def involves_meta(args: tuple, kwargs: dict) -> bool:
    return any(t.device.type == "meta" for t in tensors_of(args) + tensors_of(kwargs.values()))


def scalar(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """`.item()`: the known value; else 0, 1.0, or False: checks such as `isnan().any()` find nothing. An `all()` is True."""
    if not involves_meta(args, kwargs):
        return func(*args, **kwargs)
    tensor = args[0]
    real = recorder.values.get(tensor)
    if real is not None:
        note_assumption(recorder, [tensor])
        return real.item()
    value: Any = 1.0 if tensor.dtype.is_floating_point else 0
    if tensor.dtype == torch.bool:
        value = tensor in recorder.values.expected_true
    recorder.stand_in(f"the value of a tensor was taken as {value}")
    return value


def all_of(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """`all()` of unknown values: True where it is asked for, since code that goes on expects that its checks hold.

    Not where `any()` of them was asked for before, which finds nothing.
    """
    out = func(*args, **kwargs)
    recorder.values.follow(func, args, kwargs, out)
    unknown = out.device.type == "meta" and recorder.values.get(out) is None
    if unknown and args[0] not in recorder.values.expected_false:
        recorder.values.expected_true.add(out)
    return out


def any_of(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """`any()` of unknown values: False where it is asked for, and `all()` of them, too, from then on."""
    out = func(*args, **kwargs)
    recorder.values.follow(func, args, kwargs, out)
    if args[0].device.type == "meta" and recorder.values.get(out) is None:
        recorder.values.expected_false.add(args[0])
    return out


def copy(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Writing meta values into a CPU tensor: the known ones, else zeros."""
    target, source = args[0], args[1]
    if target.device.type != "cpu" or source.device.type != "meta":
        return NotImplemented
    real = recorder.values.get(source)
    if real is None:
        recorder.stand_in("values copied to the CPU were taken as zeros")
        real = torch.zeros(source.shape, dtype=source.dtype)
    return func(target, real, *args[2:], **kwargs)


def equal(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """torch.equal and allclose: from known values; two tensors of unknown values are taken as equal when their shapes are."""
    if recorder.values.all_known(tensors_of(args)):
        note_assumption(recorder, tensors_of(args))
        return recorder.values.run(func, args, kwargs)
    recorder.stand_in("two tensors of unknown values were taken as equal where their shapes are")
    return args[0].shape == args[1].shape


def from_values(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """An operator whose output shape depends on values, when all are known."""
    if not involves_meta(args, kwargs):
        return func(*args, **kwargs)
    inputs = tensors_of(args) + tensors_of(kwargs.values())
    if not recorder.values.all_known(inputs):
        return _unknown_shape(recorder, func, args, kwargs)
    note_assumption(recorder, inputs)
    return on_meta(recorder.values.run(func, args, kwargs), recorder, recorder.values.assumption(inputs))


def _unknown_shape(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    packet, tensor = func.overloadpacket, args[0]

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    if packet is _aten.nonzero:
        return _found(recorder, tensor, NONZERO, apart=False)[0]
    if packet is _aten.masked_select:
        recorder.stand_in("masked_select with an unknown mask was taken to keep every element")
        return empty(tensor.numel(), dtype=tensor.dtype)
    if packet in (_aten._unique2, _aten.unique_consecutive, _aten.unique_dim):
        recorder.stand_in("unique of unknown values was taken to find no duplicates")
        indices = empty(*tensor.shape) if packet is not _aten.unique_dim else empty(tensor.shape[args[1]])
        return torch.empty_like(tensor), indices, torch.empty_like(indices)
    if packet is _aten.bincount:
        recorder.stand_in("bincount of unknown values was taken to have its minimum length")
        return empty(max(1, args[2] if len(args) > 2 else kwargs.get("minlength", 0)))
    if packet is _aten.repeat_interleave and kwargs.get("output_size") is not None:
        return empty(kwargs["output_size"])
    if packet is _aten.repeat_interleave:
        recorder.stand_in("repeat_interleave with unknown counts was taken to repeat once")
        return empty(tensor.numel())
    return func(*args, **kwargs)


def _places(recorder: HandlerContext, mask: Tensor, writes: bool) -> list[Tensor]:
    """A boolean or byte mask on meta as the integer indices that it stands for, one tensor for each of its dimensions.

    Of an unknown mask all places, whose values are known only where they are read from: two unknown masks that are written
    through, one after the other, hardly write to the same places.
    """
    real = recorder.values.get(mask)
    if real is None:
        places = _found(recorder, mask, EVERY)
        return [torch.empty_like(place) for place in places] if writes else places
    note_assumption(recorder, [mask])
    count = int(real.count_nonzero())
    return [torch.empty(count, dtype=torch.int64, device="meta") for _ in range(mask.dim())]


def _found(recorder: HandlerContext, mask: Tensor, text: str, apart: bool = True) -> list[Tensor]:
    """The places that an unknown mask is taken to find: all, or the first ones where the recorder knows of a limit.

    A tensor [count] for each of the mask's dimensions, or with `apart` False a single one [count, dimensions]. Their values are
    known up to `LARGEST_ASSUMED` places.
    """
    count = mask.numel()
    if recorder.mask_limit is not None and recorder.mask_limit < count:
        count, text = recorder.mask_limit, PASSED.format(recorder.mask_limit)
    recorder.stand_in(text)
    shapes = [(count,)] * mask.dim() if apart else [(count, mask.dim())]
    if count > LARGEST_ASSUMED:
        return [torch.empty(shape, dtype=torch.int64, device="meta") for shape in shapes]
    first = torch.arange(count, device="cpu")
    places = [first] if mask.dim() == 1 else torch.unravel_index(first, mask.shape)
    return on_meta(list(places) if apart else [torch.stack(places, dim=-1)], recorder, text)


def _count_up(recorder: HandlerContext, tensor: Tensor, indices: list[Tensor | None]) -> None:
    """Give values to the index that stands for a list of numbers (`x[:, [0, 2, 1]]`), where those of `x` are known.

    It is made in C++ below any dispatch and loses its data (indexing_tensor_from_data in torch/csrc/utils/tensor_new.cpp).
    """
    values = recorder.values
    if values.get(tensor) is None:
        return
    for dim, index in enumerate(indices):
        if index is not None and index.dim() == 1 and index in values.lost and values.get(index) is None:
            values.assume(index, torch.arange(index.numel(), device="cpu") % tensor.shape[dim], LISTED)


def _see_lists(recorder: HandlerContext, indices: list[Tensor | None]) -> None:
    """Log indices that stand for lists of numbers where they come straight from C++, as they do in PyTorch 2.11.

    In 2.15 indexing_tensor_from_data ends in `lift_fresh`, which the recorder sees.
    """
    for index in indices:
        if index is None or index.dtype != torch.int64 or index.dim() == 0 or not index.is_meta:
            continue
        if recorder.block_of(index) is None and recorder.values.get(index) is None:
            recorder.see_new(index, "aten.lift_fresh.default")
            recorder.values.lost.add(index)


def lift_fresh(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """The last step of making a tensor from data. One that comes on meta was made in C++ and has lost the data."""
    if args[0].device.type == "meta" and args[0].dtype == torch.int64 and recorder.values.get(args[0]) is None:
        recorder.values.lost.add(args[0])
    return NotImplemented


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8) and index.device.type == "meta"


def masked_index(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Indexing with boolean masks: the number of selected elements comes from the known mask.

    All known: the whole operator runs on its values, so that results stay known.
    """
    if not involves_meta(args, kwargs):
        return func(*args, **kwargs)
    if _LISTS_COME_UNSEEN:
        _see_lists(recorder, args[1])
    writes = func._schema.is_mutable or func.overloadpacket is _aten.index_put
    if not writes:
        _count_up(recorder, *args[:2])
    tensors = tensors_of(args)
    if not writes and len(tensors) > 1 and recorder.values.all_known(tensors):
        note_assumption(recorder, [index for index in args[1] if index is not None])
        return on_meta(recorder.values.run(func, args, kwargs), recorder, recorder.values.assumption(tensors))
    parts = [_places(recorder, index, writes) if _is_mask(index) else [index] for index in args[1]]
    indices = [part for places in parts for part in places]
    if writes:
        values = args[2]
        if values.numel() != 1 and any(map(_is_mask, args[1])):
            # the shape of `values` follows the true mask; on meta only the sizes of what is written matter
            values = values.new_empty(())
        out = func(args[0], indices, values, *args[3:], **kwargs)
        recorder.values.follow(func, args, kwargs, out)
        return out
    args = (args[0], indices, *args[2:])
    out = _rows(args[0], indices) if len(indices) == 1 else None
    out = func(*args, **kwargs) if out is None else out
    recorder.values.follow(func, args, kwargs, out)
    return out


def _rows(tensor: Tensor, indices: list[Tensor]) -> Tensor | None:
    """Rows of a contiguous tensor [N, ..] by their numbers [K]: [K, ..], without the meta kernel, which is slow; else None."""
    rows = indices[0]
    if rows is None or rows.dim() != 1 or rows.dtype != torch.int64 or tensor.device.type != "meta":
        return None
    return (
        torch.empty((len(rows), *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
        if tensor.is_contiguous()
        else None
    )


def to_host(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """`.cpu()`, `.tolist()`, `.numpy()`: the known values; unknown ones arrive as zeros."""
    tensor, device = args[0], kwargs.get("device")
    if tensor.device.type != "meta" or device is None or torch.device(device).type != "cpu":
        return NotImplemented
    real = recorder.values.get(tensor)
    if real is None:
        recorder.stand_in("values copied to the CPU were taken as zeros")
        real = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    note_assumption(recorder, [tensor])
    return func(real, **kwargs).clone()


def finite_check(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """The gradient scaler's check: gradients are taken as finite, so the optimizer always steps."""
    return None


def not_a_number(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """`isnan`, or what it becomes, `x != x`, and its opposite `x == x`: of unknown values none is."""
    if len(args) > 1 and args[0] is not args[1]:
        return NotImplemented
    return _assumed_everywhere(recorder, func, args, kwargs, func.overloadpacket is _aten.eq)


def infinite(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """`isinf`, or what it becomes, `abs(x) == inf`, and its opposite: of unknown values none is."""
    if len(args) > 1 and (not isinstance(args[1], float) or not math.isinf(args[1])):
        return NotImplemented
    return _assumed_everywhere(recorder, func, args, kwargs, func.overloadpacket is _aten.ne)


def _assumed_everywhere(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict, value: bool) -> Any:
    out = func(*args, **kwargs)
    recorder.values.follow(func, args, kwargs, out)
    if out.device.type == "meta" and recorder.values.get(out) is None and out.numel() <= LARGEST_ASSUMED:
        recorder.values.assume(out, torch.full(out.shape, value, device="cpu"), FINITE)
    return out


def masked_fill(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """`masked_fill` with a number that is a tensor on the CPU, which devices take and the meta kernel refuses."""
    value = args[2]
    if value.device.type != "cpu" or value.dim() or args[0].device.type != "meta":
        return NotImplemented
    instead = _aten.masked_fill_.Scalar if func._schema.is_mutable else _aten.masked_fill.Scalar
    out = instead(args[0], args[1], value.item())
    recorder.values.follow(instead, (args[0], args[1], value.item()), kwargs, out)
    return out


HANDLERS: dict[Any, Handler] = {
    _aten._local_scalar_dense.default: scalar,
    _aten.any.default: any_of,
    _aten.all.default: all_of,
    _aten.all.dim: all_of,
    _aten.all.dims: all_of,
    _aten._is_all_true.default: all_of,
    _aten.copy_.default: copy,
    _aten.equal.default: equal,
    _aten.allclose.default: equal,
    _aten.lift_fresh.default: lift_fresh,
    _aten.nonzero.default: from_values,
    _aten.masked_select.default: from_values,
    _aten._unique2.default: from_values,
    _aten.unique_consecutive.default: from_values,
    _aten.unique_dim.default: from_values,
    _aten.bincount.default: from_values,
    _aten.repeat_interleave.Tensor: from_values,
    _aten.index.Tensor: masked_index,
    _aten.index_put_.default: masked_index,
    _aten._index_put_impl_.default: masked_index,
    _aten._to_copy.default: to_host,
    _aten.isnan.default: not_a_number,
    _aten.isinf.default: infinite,
    _aten.ne.Tensor: not_a_number,
    _aten.eq.Tensor: not_a_number,
    _aten.eq.Scalar: infinite,
    _aten.ne.Scalar: infinite,
    _aten.masked_fill.Tensor: masked_fill,
    _aten.masked_fill_.Tensor: masked_fill,
    _aten._amp_foreach_non_finite_check_and_unscale_.default: finite_check,
}

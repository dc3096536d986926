"""Indexing by masks and by lists of numbers: the number of selected elements, which depends on values.

An unknown mask is assumed to select every element, or the first ones if the recorder has a limit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sizer.base.versions import installed_version
from sizer.tracing.values.handler import Handler, HandlerContext, involves_meta, note_assumption, on_meta
from sizer.tracing.values.known import LARGEST_ASSUMED, is_meta, tensors_of

PASSED = "of the boxes of unknown scores {} were taken to pass the threshold, as many as the model goes on with"
LISTED = "a list of numbers as an index was taken as 0, 1, 2, ..., since meta tensors do not keep it"
EVERY = "an unknown boolean mask was taken to select every element"

_aten = torch.ops.aten
_LISTS_COME_UNSEEN = installed_version() < (2, 15)  # depends on the installed version, not on the device's rules


def _places(recorder: HandlerContext, mask: Tensor, writes: bool) -> list[Tensor]:
    """Return the integer indices of a boolean or byte mask on meta, one tensor for each of its dimensions.

    For an unknown mask these are all positions. Their values are known for reads only: two unknown masks in successive writes
    hardly select the same positions.
    """
    real = recorder.values.get(mask)
    if real is None:
        places = found_places(recorder, mask, EVERY)
        return [torch.empty_like(place) for place in places] if writes else places
    note_assumption(recorder, [mask])
    count = int(real.count_nonzero())
    return [torch.empty(count, dtype=torch.int64, device="meta") for _ in range(mask.dim())]


def found_places(recorder: HandlerContext, mask: Tensor, text: str, apart: bool = True) -> list[Tensor]:
    """Return the assumed positions of an unknown mask: all, or the first ones if the recorder has a limit.

    The result is a tensor [count] for each of the mask's dimensions, or with `apart` False a single tensor [count, dimensions].
    The values are known for up to `LARGEST_ASSUMED` positions.
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
    """Give values to the index of a list of numbers (`x[:, [0, 2, 1]]`), if the values of `x` are known.

    The index is made in C++ below any dispatch and loses its data (indexing_tensor_from_data in
    torch/csrc/utils/tensor_new.cpp).
    """
    values = recorder.values
    if not values.is_known(tensor):
        return
    for dim, index in enumerate(indices):
        if index is not None and index.dim() == 1 and index in values.lost and not values.is_known(index):
            values.assume(index, torch.arange(index.numel(), device="cpu") % tensor.shape[dim], LISTED)


def _see_lists(recorder: HandlerContext, indices: list[Tensor | None]) -> None:
    """Log the indices of lists of numbers if they come directly from C++, as in PyTorch 2.11.

    In 2.15 indexing_tensor_from_data ends in `lift_fresh`, which the recorder sees.
    """
    for index in indices:
        if index is None or index.dtype != torch.int64 or index.dim() == 0 or not index.is_meta:
            continue
        if recorder.block_of(index) is None and not recorder.values.is_known(index):
            recorder.see_new(index, "aten.lift_fresh.default")
            recorder.values.lost.add(index)


def lift_fresh(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Note tensors on meta that were made from data in C++ and have lost it, at the last step of their construction."""
    if is_meta(args[0]) and args[0].dtype == torch.int64 and not recorder.values.is_known(args[0]):
        recorder.values.lost.add(args[0])
    return NotImplemented


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8) and is_meta(index)


def masked_index(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run indexing with boolean masks; the known mask determines the number of selected elements.

    If all values are known, the whole operator runs on them, so that results stay known.
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
            # the shape of `values` depends on the true mask; on meta only the sizes of the written tensor matter
            values = values.new_empty(())
        out = func(args[0], indices, values, *args[3:], **kwargs)
        recorder.values.follow(func, args, kwargs, out)
        return out
    args = (args[0], indices, *args[2:])
    out = _rows(args[0], indices) if len(indices) == 1 else None
    out = recorder.corrected(func, args, recorder.run_kernel(func, args, kwargs)) if out is None else out
    recorder.values.follow(func, args, kwargs, out)
    return out


def _rows(tensor: Tensor, indices: list[Tensor]) -> Tensor | None:
    """Return the rows [K, ..] of a contiguous tensor [N, ..] at indices [K], without the slow meta kernel; else None."""
    rows = indices[0]
    if rows is None or rows.dim() != 1 or rows.dtype != torch.int64 or not is_meta(tensor):
        return None
    return (
        torch.empty((len(rows), *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
        if tensor.is_contiguous()
        else None
    )


HANDLERS: dict[Any, Handler] = {
    _aten.lift_fresh.default: lift_fresh,
    _aten.index.Tensor: masked_index,
    _aten.index_put_.default: masked_index,
    _aten._index_put_impl_.default: masked_index,
}

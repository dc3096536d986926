"""Choices among unknown values: which experts of a mixture a token goes to, which candidates of a detector score best.

`topk`, `argmax`, `max` and their opposites of unknown values choose places that are spread evenly: row r of the
choice takes the next k of n places after those of row r - 1, starting anew with each sample of the batch. That is a choice
which could have happened (k different places in every row), every expert gets the same number of tokens, give or take one, and
from then on the places are known, so that loops over experts, their masks and their capacities agree with each other. It is
noted where something comes to depend on it: grouped matrix products do not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sizer.tracing.values.handler import Handler, HandlerContext
from sizer.tracing.values.known import LARGEST_ASSUMED

EVENLY = (
    "the largest (or smallest) of unknown values were taken to lie evenly spread, "
    "so that every expert or code gets as many tokens as the next"
)

_aten = torch.ops.aten


def spread(shape: torch.Size, dim: int, size: int, samples: int) -> Tensor:
    """Places in [0, size), int64 of this shape: along `dim` different ones, over the other dimensions as often as each other."""
    rest = [length for axis, length in enumerate(shape) if axis != dim]
    rows, chosen = torch.Size(rest).numel(), shape[dim]
    row = torch.arange(rows, device="cpu")
    if rows % samples == 0:
        row %= rows // samples
    places = (row.unsqueeze(1) * chosen + torch.arange(chosen, device="cpu")) % size
    return places.view(*rest, chosen).movedim(-1, dim).contiguous()


def choose(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """`topk(values [.., n, ..], k, dim)`, `argmax(values, dim)`, `max(values, dim)` and their opposites; unknown places are
    spread evenly."""
    out = func(*args, **kwargs)
    recorder.values.follow(func, args, kwargs, out)
    places = out if isinstance(out, Tensor) else out[1]
    values = args[0]
    if places.device.type != "meta" or recorder.values.get(places) is not None or values.dim() == 0:
        return out
    if not 0 < places.numel() <= LARGEST_ASSUMED:
        return out
    position = 2 if func.overloadpacket is _aten.topk else 1
    dim = args[position] if len(args) > position else kwargs.get("dim", -1 if position == 2 else None)
    if dim is None:
        return out  # the place in the whole tensor
    dim %= values.dim()
    size = values.shape[dim]
    shape = [*values.shape]
    shape[dim] = places.numel() * size // values.numel()
    real = spread(torch.Size(shape), dim, size, recorder.batch_size)
    recorder.values.assume(places, real.view(places.shape), EVENLY)
    return out


HANDLERS: dict[Any, Handler] = dict.fromkeys(
    (_aten.topk.default, _aten.argmax.default, _aten.argmin.default, _aten.max.dim, _aten.min.dim), choose
)

"""Operators with results that depend on values: computed from known values, else a documented stand-in.

Each stand-in is noted once per operator and module, and every report lists it as uncounted. If a stand-in has values of its own
(the positions that `nonzero` found), they are known from there on, so that later results agree with it.

Unknown values also decide choices: the experts of a mixture for each token, the best candidates of a detector. `topk`,
`argmax`, `max` and their opposites choose positions that are spread evenly: row r of the choice takes the next k of n positions
after those of row r - 1, starting again with each sample of the batch. Such a choice is possible (k different positions in
every row), and every expert gets the same number of tokens, give or take one. From then on the positions are known, so that
loops over experts, their masks and their capacities agree with each other. The assumption is noted once a result depends on it,
which grouped matrix products do not.

Drawn tokens (`multinomial`), and choices from so many positions that these are a vocabulary, are spread over it, so that a
generation does not end early.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sizer.tracing.values.handler import Handler, HandlerContext, involves_meta, note_assumption, on_meta
from sizer.tracing.values.known import LARGEST_ASSUMED, is_meta, tensors_of, unfilled
from sizer.tracing.values.masks import found_places

NONZERO = "nonzero of unknown values was taken to find every element"
FINITE = "unknown values were taken to be finite numbers"

_aten = torch.ops.aten


def packed(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Read _pack_padded_sequence's lengths on the host (native/PackedSequence.cpp), as host tensors of a setup are on meta."""
    lengths = args[1]
    if lengths.is_cpu or (real := recorder.values.get(lengths)) is None or not recorder.device.is_on_host(lengths):
        return NotImplemented
    return func(args[0], real, *args[2:], **kwargs)


def scalar(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the known value for `.item()`; else 0, 1.0, or False, so that checks such as `isnan().any()` find nothing.

    An unknown `all()` is True.
    """
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
    """Run `all()`; of unknown values it is True when it is read, since code usually expects that its checks pass.

    After `any()` of the same values, which is False, it is not.
    """
    out = recorder.run_kernel(func, args, kwargs)
    recorder.values.follow(func, args, kwargs, out)
    unknown = is_meta(out) and not recorder.values.is_known(out)
    if unknown and args[0] not in recorder.values.expected_false:
        recorder.values.expected_true.add(out)
    return out


def any_of(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run `any()`; of unknown values it is False when it is read, and from then on `all()` of them too."""
    out = recorder.run_kernel(func, args, kwargs)
    recorder.values.follow(func, args, kwargs, out)
    if is_meta(args[0]) and not recorder.values.is_known(out):
        recorder.values.expected_false.add(args[0])
    return out


def copy(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Write meta values into a CPU tensor: the known values, else zeros."""
    target, source = args[0], args[1]
    if target.device.type != "cpu" or source.device.type != "meta":
        return NotImplemented
    return func(target, _on_host(recorder, source), *args[2:], **kwargs)


def _on_host(recorder: HandlerContext, tensor: Tensor) -> Tensor:
    """Return a meta tensor's values; zeros if they are unknown."""
    real = recorder.values.get(tensor)
    if real is None:
        recorder.stand_in("values copied to the CPU were taken as zeros")
        real = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    return real


def equal(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return torch.equal or allclose of known values; tensors of unknown values are assumed equal if their shapes are."""
    if func is _aten.allclose.default:  # elements are compared one by one, then all of them (native/TensorCompare.cpp)
        with recorder:
            torch.isclose(*args, **kwargs).all()
    if recorder.values.all_known(tensors_of(args)):
        note_assumption(recorder, tensors_of(args))
        return recorder.values.run(func, args, kwargs)
    recorder.stand_in("two tensors of unknown values were taken as equal where their shapes are")
    return args[0].shape == args[1].shape


def from_values(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operator with an output shape that depends on values, if all of them are known."""
    if not involves_meta(args, kwargs):
        return func(*args, **kwargs)
    inputs = tensors_of(args) + tensors_of(kwargs.values())
    if not recorder.values.all_known(inputs):
        return _unknown_shape(recorder, func, args, kwargs)
    note_assumption(recorder, inputs)
    real, assumption = recorder.values.run(func, args, kwargs), recorder.values.assumption(inputs)
    out = on_meta(real, recorder, assumption)
    if func.overloadpacket in _CUT and recorder.device.kind == "cuda":
        counts_booleans = inputs[0].dtype == torch.bool and func.overloadpacket is not _aten.unique_consecutive
        made = 2 if counts_booleans else inputs[0].numel()
        out = tuple(_cut(recorder, part, max(made, part.numel()), assumption) for part in real)
    return out


_CUT = (_aten._unique, _aten._unique2, _aten.unique_consecutive)


def _cut(recorder: HandlerContext, real: Tensor, elements: int, assumption: str | None) -> Tensor:
    """Return a result of `unique`, which has `elements` elements before it is cut (cuda/UniqueCub.cu, 2.15)."""
    if not real.numel():
        return on_meta(real, recorder)
    out = torch.empty(elements, dtype=real.dtype, device="meta").resize_(real.shape)
    with torch._C.DisableTorchFunction():  # a trace would put a large one on meta
        whole = torch.empty(elements, dtype=real.dtype, device="cpu").resize_(real.shape).copy_(real)
    if assumption is None:
        recorder.values.remember(out, whole)
    else:
        recorder.values.assume(out, whole, assumption)
    return out


def _unknown_shape(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    packet, tensor = func.overloadpacket, args[0]

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    if packet is _aten.nonzero:
        return found_places(recorder, tensor, NONZERO, apart=False)[0]
    if packet is _aten.masked_select and (mask := recorder.values.get(args[1])) is not None:
        note_assumption(recorder, [args[1]])
        shape = torch.broadcast_shapes(tensor.shape, mask.shape)
        return empty(int(mask.expand(shape).count_nonzero()), dtype=tensor.dtype)
    if packet is _aten.masked_select:
        recorder.stand_in("masked_select with an unknown mask was taken to keep every element")
        return empty(tensor.numel(), dtype=tensor.dtype)
    if packet in (_aten._unique, _aten._unique2, _aten.unique_consecutive, _aten.unique_dim):
        recorder.stand_in("unique of unknown values was taken to find no duplicates")
        if packet is _aten._unique:
            return torch.empty_like(tensor), empty(*tensor.shape)
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


def to_host(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the known values for `.cpu()`, `.tolist()` and `.numpy()`; zeros for unknown ones."""
    tensor, device = args[0], kwargs.get("device")
    if not isinstance(tensor, Tensor):  # a number, which vmap's rules cast as a tensor (functorch/BatchRulesBinaryOps.cpp)
        return func(torch.tensor(tensor, device="cpu"), **kwargs)
    if tensor.device.type != "meta" or device is None or torch.device(device).type != "cpu":
        return NotImplemented
    real = _on_host(recorder, tensor)
    note_assumption(recorder, [tensor])
    if not tensor.is_contiguous() and _aten.is_non_overlapping_and_dense.default(tensor):
        real = unfilled(tensor).copy_(real)
    return func(real, **kwargs).clone()


def finite_check(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Skip the gradient scaler's check: gradients are assumed finite, so the optimizer always steps."""
    return None


def not_a_number(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return `isnan`, or its form `x != x`, or the opposite `x == x`: no unknown value is NaN."""
    if len(args) > 1 and args[0] is not args[1]:
        return NotImplemented
    return _assumed_everywhere(recorder, func, args, kwargs, func.overloadpacket is _aten.eq)


def infinite(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return `isinf`, or its form `abs(x) == inf`, or the opposite: no unknown value is infinite.

    A complex number is infinite if a part of it is (native/TensorCompare.cpp, isinf).
    """
    if len(args) == 1 and args[0].is_complex():
        with recorder:
            return torch.isinf(args[0].real).logical_or_(torch.isinf(args[0].imag))
    if len(args) > 1 and (not isinstance(args[1], float) or not math.isinf(args[1])):
        return NotImplemented
    return _assumed_everywhere(recorder, func, args, kwargs, func.overloadpacket is _aten.ne)


def _assumed_everywhere(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict, value: bool) -> Any:
    out = recorder.run_kernel(func, args, kwargs)
    recorder.values.follow(func, args, kwargs, out)
    if is_meta(out) and not recorder.values.is_known(out) and out.numel() <= LARGEST_ASSUMED:
        recorder.values.assume(out, torch.full(out.shape, value, device="cpu"), FINITE)
    return out


def chosen(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run `where(mask, x, y)`; the result is known if the mask is known and selects known values only."""
    first, second = map(recorder.values.is_known, args[1:])
    if first is second or (mask := recorder.values.get(args[0])) is None or not mask.numel():
        return NotImplemented
    if bool(mask[(0,) * mask.dim()]) is not first:  # before all elements of a large mask are read
        return NotImplemented
    if bool(mask.all() if first else mask.any()) is not first:
        return NotImplemented
    real = recorder.values.get(args[1] if first else args[2])
    if real is None:
        return NotImplemented
    out = recorder.run_kernel(func, args, kwargs)
    if 0 < out.numel() <= LARGEST_ASSUMED:
        made = real.to(out.dtype).expand(out.shape).contiguous()
        assumption = recorder.values.assumption([one for one in args if is_meta(one)])
        if assumption is None:
            recorder.values.remember(out, made)
        else:
            recorder.values.assume(out, made, assumption)
    return out


_END = 1e9  # marks a score that cannot be reached, as in beam search


def beyond(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Compare floats, as in `x > y`: unknown values are above known values of -1e9 and less, and below those of 1e9 and more."""
    known = [(place, real) for place, one in enumerate(args) if (real := recorder.values.get(one)) is not None]
    if len(known) != 1 or not all(one.is_floating_point() for one in args):
        return NotImplemented
    side, end = known[0]
    if not end.numel():
        return NotImplemented
    is_low, is_high = bool((end <= -_END).all()), bool((end >= _END).all())
    if not is_low and not is_high:
        return NotImplemented
    first_is_larger = is_low if side == 1 else is_high
    return _assumed_everywhere(recorder, func, args, kwargs, first_is_larger is (func.overloadpacket in (_aten.gt, _aten.ge)))


def masked_fill(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run `masked_fill` with a CPU tensor as the number, which devices accept and the meta kernel refuses."""
    value = args[2]
    if value.device.type != "cpu" or value.dim() or not is_meta(args[0]):
        return NotImplemented
    instead = _aten.masked_fill_.Scalar if func._schema.is_mutable else _aten.masked_fill.Scalar
    out = instead(args[0], args[1], value.item())
    recorder.values.follow(instead, (args[0], args[1], value.item()), kwargs, out)
    return out


def absorbed(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run `x & 0` or `x | True`: the result is known, whatever the other values are.

    So `generate` ends at its length, whatever its check for EOS finds.
    """
    out = recorder.run_kernel(func, args, kwargs)
    recorder.values.follow(func, args, kwargs, out)
    if is_meta(out) and not recorder.values.is_known(out) and out.numel() <= LARGEST_ASSUMED:
        absorbing = func.overloadpacket in (_aten.bitwise_or, _aten.logical_or)
        operands = [recorder.values.get(tensor) for tensor in tensors_of(args)]
        whole = [real for real in operands if real is not None and real.numel()]
        if any(bool((real == absorbing).all()) for real in whole if real.dtype == torch.bool or not absorbing):
            recorder.values.remember(out, torch.full(out.shape, absorbing, dtype=out.dtype, device="cpu"))
    return out


# ------------------------------------------------------------------------------------------------------------- routing


EVENLY = (
    "the largest (or smallest) of unknown values were taken to lie evenly spread, "
    "so that every expert or code gets as many tokens as the next"
)


SORTED = "unknown values were taken to be sorted already"


def spread(shape: torch.Size, dim: int, size: int, samples: int) -> Tensor:
    """Return int64 positions in [0, size) of this shape.

    Along `dim` they differ; over the other dimensions each is used equally often.
    """
    rest = [length for axis, length in enumerate(shape) if axis != dim]
    rows, chosen = torch.Size(rest).numel(), shape[dim]
    row = torch.arange(rows, device="cpu")
    if rows % samples == 0:
        row %= rows // samples
    places = (row.unsqueeze(1) * chosen + torch.arange(chosen, device="cpu")) % size
    return places.view(*rest, chosen).movedim(-1, dim).contiguous()


def _spread_as(wanted: torch.Size, *args: Any) -> Tensor:
    return spread(*args).view(wanted)


CHOICES = 4096  # experts, codes or classes to choose from: vocabularies are larger
DRAWN = "choices among more than 4,096 places, such as tokens, were taken to be spread evenly, so that no sequence ends early"
_FROM_VOCABULARY = (_aten.argmax, _aten.topk)  # greedy and beam search


def spread_tokens(count: int, size: int) -> Tensor:
    """Return `count` tokens of a vocabulary of `size`, int64, each in the middle of its share.

    Special tokens are at a vocabulary's ends.
    """
    shares = min(count, size)
    numbers = torch.arange(count, device="cpu") % shares
    return (2 * numbers + 1) * size // (2 * shares)


def draw(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run `multinomial(weights [.., n], samples)` with draws spread over all n, as tokens of a vocabulary."""
    out = func(*args, **kwargs)
    if is_meta(out) and 0 < out.numel() <= LARGEST_ASSUMED:
        recorder.values.assume(out, spread_tokens(out.numel(), args[0].shape[-1]).view(out.shape), DRAWN)
    return out


def choose(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run `topk`, `argmax`, `max` and their opposites; unknown positions are spread evenly.

    Arguments: values [.., n, ..], k for `topk`, dim.
    """
    out = func(*args, **kwargs)
    recorder.values.follow(func, args, kwargs, out)
    places = out if isinstance(out, Tensor) else out[1]
    values = args[0]
    if places.device.type != "meta" or recorder.values.is_known(places) or values.dim() == 0:
        return out
    if not 0 < places.numel() <= LARGEST_ASSUMED:
        return out
    position = 2 if func.overloadpacket is _aten.topk else 1
    dim = args[position] if len(args) > position else kwargs.get("dim", -1 if position == 2 else None)
    if dim is None:
        return out  # the position in the whole tensor
    dim %= values.dim()
    size = values.shape[dim]
    if func.overloadpacket in _FROM_VOCABULARY and size > CHOICES:
        recorder.values.assume(places, spread_tokens(places.numel(), size).view(places.shape), DRAWN)
        return out
    shape = [*values.shape]
    shape[dim] = places.numel() * size // values.numel()
    compute = partial(_spread_as, places.shape, torch.Size(shape), dim, size, recorder.batch_size)
    recorder.values.assume_later(places, compute, EVENLY)
    return out


def order(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run `sort`; unknown values are taken to be sorted already, as equal values are by a stable sort."""
    out = func(*args, **kwargs)
    recorder.values.follow(func, args, kwargs, out)
    values, places = args[0], out[1]
    if places.device.type != "meta" or recorder.values.is_known(places) or not values.dim():
        return out
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", -1)) % values.dim()
    if 0 < places.numel() <= LARGEST_ASSUMED and is_ordered(values, dim):
        recorder.values.assume_later(places, partial(spread, places.shape, dim, values.shape[dim], 1), SORTED)
    return out


def is_ordered(values: Tensor, dim: int) -> bool:
    """Return True if unknown values count as sorted: a whole tensor, or few values of each row, which are no vocabulary."""
    return values.dim() == 1 or values.shape[dim] <= CHOICES


def of_padded_rows(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the result of _padded_dense_to_jagged_forward, which has no meta kernel.

    Arguments: padded [batch, longest, width], starts, rows. Source: nested/cuda/NestedTensorTransformerFunctions.cpp.
    """
    rows = args[2] if len(args) > 2 else None
    return NotImplemented if rows is None else args[0].new_empty(rows, *args[0].shape[2:])


HANDLERS: dict[Any, Handler] = {
    _aten._pack_padded_sequence.default: packed,
    _aten._local_scalar_dense.default: scalar,
    _aten.any.default: any_of,
    _aten.all.default: all_of,
    _aten.all.dim: all_of,
    _aten.all.dims: all_of,
    _aten._is_all_true.default: all_of,
    _aten.copy_.default: copy,
    _aten.equal.default: equal,
    _aten.allclose.default: equal,
    _aten.nonzero.default: from_values,
    _aten.masked_select.default: from_values,
    _aten._unique.default: from_values,
    _aten._unique2.default: from_values,
    _aten.unique_consecutive.default: from_values,
    _aten.unique_dim.default: from_values,
    _aten.bincount.default: from_values,
    _aten.repeat_interleave.Tensor: from_values,
    _aten._to_copy.default: to_host,
    _aten.isnan.default: not_a_number,
    _aten.isinf.default: infinite,
    _aten.ne.Tensor: not_a_number,
    _aten.eq.Tensor: not_a_number,
    _aten.eq.Scalar: infinite,
    _aten.ne.Scalar: infinite,
    **dict.fromkeys((_aten.gt.Tensor, _aten.ge.Tensor, _aten.lt.Tensor, _aten.le.Tensor), beyond),
    _aten.bitwise_and.Tensor: absorbed,
    _aten.bitwise_or.Tensor: absorbed,
    _aten.logical_or.default: absorbed,
    _aten.masked_fill.Tensor: masked_fill,
    _aten.masked_fill_.Tensor: masked_fill,
    _aten._amp_foreach_non_finite_check_and_unscale_.default: finite_check,
    _aten.multinomial.default: draw,
    _aten._padded_dense_to_jagged_forward.default: of_padded_rows,
    **dict.fromkeys(
        (_aten.topk.default, _aten.argmax.default, _aten.argmin.default, _aten.max.dim, _aten.min.dim), choose
    ),
    _aten.sort.default: order,
    _aten.sort.stable: order,
}

"""Operators whose result depends on values: answered from known values, else by a documented stand-in.

Each stand-in is noted once per operator and module, and every report lists it as uncounted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sizer.tracing.values import tensors_of

if TYPE_CHECKING:
    from sizer.tracing.recorder import Recorder

_aten = torch.ops.aten
Handler = Callable[["Recorder", Any, tuple, dict], Any]


def _on_meta(real: Any, recorder: Recorder) -> Any:
    """Meta tensors of the shapes of real results, their values remembered."""
    if isinstance(real, (list, tuple)):
        return type(real)(_on_meta(r, recorder) for r in real)
    if not isinstance(real, Tensor):
        return real
    out = torch.empty(real.shape, dtype=real.dtype, device="meta")
    recorder.values.remember(out, real.contiguous())
    return out


def _involves_meta(args: tuple, kwargs: dict) -> bool:
    return any(t.device.type == "meta" for t in tensors_of(args) + tensors_of(kwargs.values()))


def scalar(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Any:
    """`.item()`: the known value; else 0, 1.0, or False: checks such as `isnan().any()` find nothing. An `all()` is True."""
    if not _involves_meta(args, kwargs):
        return func(*args, **kwargs)
    tensor = args[0]
    real = recorder.values.get(tensor)
    if real is not None:
        return real.item()
    value: Any = 1.0 if tensor.dtype.is_floating_point else 0
    if tensor.dtype == torch.bool:
        value = recorder.values.is_expected_true(tensor)
    recorder.stand_in(f"the value of a tensor was taken as {value}")
    return value


def all_of(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Any:
    """`all()` of unknown values: True where it is asked for, since code that goes on expects that its checks hold."""
    out = func(*args, **kwargs)
    recorder.values.follow(func, args, kwargs, out)
    if out.device.type == "meta" and recorder.values.get(out) is None:
        recorder.values.expect_true(out)
    return out


def copy(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Any:
    """Writing meta values into a CPU tensor: the known ones, else zeros."""
    target, source = args[0], args[1]
    if target.device.type != "cpu" or source.device.type != "meta":
        return NotImplemented
    real = recorder.values.get(source)
    if real is None:
        recorder.stand_in("values copied to the CPU were taken as zeros")
        real = torch.zeros(source.shape, dtype=source.dtype)
    return func(target, real, *args[2:], **kwargs)


def equal(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Any:
    """torch.equal and allclose: from known values; two tensors of unknown values are taken as equal when their shapes are."""
    if recorder.values.all_known(tensors_of(args)):
        return recorder.values.run(func, args, kwargs)
    recorder.stand_in("two tensors of unknown values were taken as equal where their shapes are")
    return args[0].shape == args[1].shape


def from_values(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Any:
    """An operator whose output shape depends on values, when all are known."""
    if not _involves_meta(args, kwargs):
        return func(*args, **kwargs)
    if not recorder.values.all_known(tensors_of(args) + tensors_of(kwargs.values())):
        return _unknown_shape(recorder, func, args, kwargs)
    return _on_meta(recorder.values.run(func, args, kwargs), recorder)


def _unknown_shape(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Any:
    packet, tensor = func.overloadpacket, args[0]
    empty = lambda *shape, dtype=torch.int64: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
    if packet is _aten.nonzero:
        recorder.stand_in("nonzero of unknown values was taken to find every element")
        return empty(tensor.numel(), tensor.dim())
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


def _index_of(recorder: Recorder, index: Tensor | None) -> list[Tensor | None]:
    """A boolean or byte mask as the integer indices that it stands for, anything else as it is."""
    if index is None or index.dtype not in (torch.bool, torch.uint8) or index.device.type != "meta":
        return [index]
    real = recorder.values.get(index)
    if real is None:
        recorder.stand_in("an unknown boolean mask was taken to select every element")
        count = index.numel()
    else:
        count = int(real.count_nonzero())
    return [torch.empty(count, dtype=torch.int64, device="meta") for _ in range(index.dim())]


def masked_index(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Any:
    """Indexing with boolean masks: the number of selected elements comes from the known mask.

    All known: the whole operator runs on its values, so that results stay known.
    """
    if not _involves_meta(args, kwargs):
        return func(*args, **kwargs)
    indices = [part for index in args[1] for part in _index_of(recorder, index)]
    writes = func._schema.is_mutable
    if not writes and recorder.values.all_known(tensors_of(args)) and len(tensors_of(args)) > 1:
        return _on_meta(recorder.values.run(func, args, kwargs), recorder)
    if writes or func.overloadpacket is _aten.index_put:
        values = args[2]
        if values.numel() != 1 and any(a is not b for a, b in zip(indices, args[1], strict=False)):
            # the shape of `values` follows the true mask; on meta only the sizes of what is written matter
            values = values.new_empty(())
        out = func(args[0], indices, values, *args[3:], **kwargs)
        recorder.values.follow(func, args, kwargs, out)
        return out
    return func(args[0], indices, *args[2:], **kwargs)


def to_host(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Any:
    """`.cpu()`, `.tolist()`, `.numpy()`: the known values; unknown ones arrive as zeros."""
    tensor, device = args[0], kwargs.get("device")
    if tensor.device.type != "meta" or device is None or torch.device(device).type != "cpu":
        return NotImplemented
    real = recorder.values.get(tensor)
    if real is None:
        recorder.stand_in("values copied to the CPU were taken as zeros")
        real = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    return func(real, **kwargs).clone()


def finite_check(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Any:
    """The gradient scaler's check: gradients are taken as finite, so the optimizer always steps."""
    return None


def non_maximum_suppression(recorder: Recorder, func: Any, args: tuple, kwargs: dict) -> Any:
    """torchvision's nms over boxes [N, 4]: from known values; of unknown boxes all N are taken to be kept."""
    if not _involves_meta(args, kwargs):
        return func(*args, **kwargs)
    if recorder.values.all_known(tensors_of(args)):
        return _on_meta(recorder.values.run(func, args, kwargs), recorder)
    recorder.stand_in("non-maximum suppression of unknown boxes was taken to keep every box")
    return torch.empty(args[0].shape[0], dtype=torch.int64, device="meta")


HANDLERS: dict[Any, Handler] = {
    _aten._local_scalar_dense.default: scalar,
    _aten.all.default: all_of,
    _aten.all.dim: all_of,
    _aten.all.dims: all_of,
    _aten._is_all_true.default: all_of,
    _aten.copy_.default: copy,
    _aten.equal.default: equal,
    _aten.allclose.default: equal,
    _aten.nonzero.default: from_values,
    _aten.masked_select.default: from_values,
    _aten._unique2.default: from_values,
    _aten.unique_consecutive.default: from_values,
    _aten.unique_dim.default: from_values,
    _aten.bincount.default: from_values,
    _aten.repeat_interleave.Tensor: from_values,
    _aten.index.Tensor: masked_index,
    _aten.index_put.default: masked_index,
    _aten.index_put_.default: masked_index,
    _aten._index_put_impl_.default: masked_index,
    _aten._to_copy.default: to_host,
    _aten._amp_foreach_non_finite_check_and_unscale_.default: finite_check,
}

# Operators of other libraries, by name: they exist only where the library has been imported.
FOREIGN: dict[str, Handler] = {"torchvision.nms.default": non_maximum_suppression}

"""Memoized results of meta kernels: equal layers of a stack call them with the same arguments.

The result of a meta kernel depends on shapes, strides and dtypes of its tensors, its other arguments and the default dtype. The
cache of torch/_subclasses/fake_tensor.py (PyTorch 2.15, `_cache_key`, `_validate_cache_key`) relies on the same. Only new dense
tensors are memoized. Results that share memory with an argument, or have a larger storage than their elements, are computed
each time. A pointwise operator in place returns its first argument unchanged. Traces for one kind of device share the memoized
results: traces with fewer layers, of another dtype or at another batch size repeat many calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from sizer.base.versions import Version
from sizer.tracing.meta import strides
from sizer.tracing.values.known import is_meta, tensors_of

_META = torch.device("meta")
_aten = torch.ops.aten
_FACTORIES = (_aten.zeros.default, _aten.ones.default, _aten.full.default, _aten.scalar_tensor.default)
MOST_RESULTS = 2**12  # results per operator
_ORDINARY = (Tensor, nn.Parameter)
_NUMBERS = (bool, int, float)  # True, 1 and 1.0 are equal, and promote differently

Maker = Callable[[], Any]


class Memo:
    """Operator, memoized by everything that determines its results."""

    __slots__ = ("_func", "_makers")

    def __init__(self, func: Callable[..., Any], correct: Callable[[tuple, Any], Any] | None = None) -> None:
        self._func = func if correct is None else _corrected(func, correct)
        self._makers: dict[tuple, Maker] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the operator's result, or new tensors like those of an earlier equal call."""
        try:
            key = torch.get_default_dtype(), _traits(args)
            if kwargs:
                key = (*key, *kwargs, _traits(kwargs.values()))
            maker = self._makers.get(key)
        except TypeError:
            return self._func(*args, **kwargs)
        if maker is not None:
            return maker()
        out = self._func(*args, **kwargs)
        if (maker := _maker(out, tensors_of((args, *kwargs.values())))) is not None:
            if len(self._makers) >= MOST_RESULTS:
                self._makers.clear()
            self._makers[key] = maker
        return out


class InPlaceMemo:
    """Memo of the arguments that a pointwise in-place operator accepts: a meta tensor has no values to change."""

    __slots__ = ("_func", "_taken")

    def __init__(self, func: Callable[..., Any]) -> None:
        self._func = func
        self._taken: set[tuple] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the operator's result, which is its first argument. Raises the operator's errors."""
        try:
            key = (_traits(args), *kwargs, _traits(kwargs.values())) if kwargs else (_traits(args),)
            if key in self._taken:
                return args[0]
        except TypeError:
            return self._func(*args, **kwargs)
        out = self._func(*args, **kwargs)
        if out is args[0] and _traits(args[:1]) == key[0][:1]:
            if len(self._taken) >= MOST_RESULTS:
                self._taken.clear()
            self._taken.add(key)
        return out


def memoized(func: Any, correct: Callable[[tuple, Any], Any] | None = None) -> Callable[..., Any]:
    """Return the operator with its own memo if it can be memoized, else the operator itself.

    `correct` changes new results.
    """
    if makes_tensors(func) or func in _FACTORIES:
        return Memo(func, correct)
    return InPlaceMemo(func) if changes_values(func) else func


@cache
def shared(func: Any, kind: str, version: Version, *, corrects: bool) -> Callable[..., Any]:
    """Return the operator as `memoized` does, shared by all traces for a kind of device and a version of PyTorch.

    With `corrects` the strides of results are those of the device.
    """
    return memoized(func, strides.correction(func) if corrects else None)


def _corrected(func: Callable[..., Any], correct: Callable[[tuple, Any], Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        asked = kwargs.get("memory_format") not in (None, torch.preserve_format)
        return out if asked else correct(args, out)

    return run


def changes_values(func: Any) -> bool:
    """Return whether an operator of PyTorch writes to its first argument element by element, by its schema and tags."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten" or torch.Tag.pointwise not in func.tags:
        return False
    first, *others = func._schema.arguments
    written = first.alias_info is not None and first.alias_info.is_write and str(first.type) == "Tensor"
    return written and all(argument.alias_info is None for argument in others)


def makes_tensors(func: Any) -> bool:
    """Return whether an operator of PyTorch creates new tensors from others and writes to none, by its schema."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return False
    arguments = func._schema.arguments
    aliases = any(value.alias_info is not None for value in (*arguments, *func._schema.returns))
    return not aliases and any("Tensor" in str(argument.type) for argument in arguments)


def _traits(values: Iterable[Any]) -> tuple:
    """Return the traits that determine a result. Raises TypeError if a tensor has more than shape, strides and dtype."""
    traits: list[Any] = []
    for value in values:
        kind = type(value)
        if kind in _ORDINARY and is_meta(value) and value.layout is torch.strided and not value.dtype.is_complex:
            traits.append((value.shape, value.stride(), value.dtype))
        elif kind in _NUMBERS:
            traits.append((kind, value))
        elif kind is list or kind is tuple:
            traits.append(_traits(value))
        elif isinstance(value, Tensor):
            raise TypeError(f"a {kind.__name__} of {value.dtype} on {value.device} is more than its shape")
        else:
            traits.append(value)
    return tuple(traits)


def _maker(out: Any, inputs: list[Tensor]) -> Maker | None:
    """Return a function that creates such a result again.

    None if the result has anything except new dense tensors and numbers.
    """
    kind = type(out)
    items = out if isinstance(out, (list, tuple)) else [out]
    made = [item for item in items if item is not None and type(item) is not int]
    if not made or not all(isinstance(item, Tensor) and _is_whole(item) for item in made):
        return None
    storages = {t.untyped_storage()._cdata for t in made}
    if len(storages) < len(made) or any(t.untyped_storage()._cdata in storages for t in inputs):
        return None
    makers = [_tensor_maker(item) if isinstance(item, Tensor) else partial(_same, item) for item in items]
    return makers[0] if items is not out else lambda: kind([make() for make in makers])


def _tensor_maker(out: Tensor) -> Maker:
    shape, strides, dtype = out.shape, out.stride(), out.dtype
    return lambda: torch.empty_strided(shape, strides, dtype=dtype, device=_META)


def _is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor uses its whole memory, and has only its shape, strides and dtype."""
    if type(tensor) is not Tensor or not is_meta(tensor) or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    alike = _tensor_maker(tensor)()
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == alike.untyped_storage().nbytes()


def _same(value: int | None) -> int | None:
    return value

"""Known values: contents of integer and boolean tensors, stored separately from the meta tensors.

Model code branches on small tensors: `.item()`, `.any()`, `.tolist()`, `nonzero`, boolean masks. Inputs have known values. An
operator with known tensor inputs, and outputs that are integers, booleans or few floats, also runs for real on the CPU. Every
storage with known values has a real twin of the same size, so views and in-place operators keep their aliases.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from sizer.tracing.values.twins import (
    DEEPEST,
    Held,
    Twin,
    can_wait,
    hold,
    is_whole,
    layout_of,
    on_cpu,
    run_on_cpu,
    run_on_held,
)

# Elements of the largest followed integer or boolean tensor: for each of 4096 tokens and 768 experts, whether it is chosen.
LARGEST_INTEGERS = 2**26
LARGEST_FLOATS = 2**20  # the same for a floating-point tensor: schedules, thresholds, anchors and their overlaps
LARGEST_UNDEFINED = 2**12  # of an integer tensor made without values
LARGEST_ASSUMED = 2**20  # of an integer or boolean tensor with stand-ins for unknown values
LARGEST_KEPT_INTEGERS, LARGEST_KEPT_FLOATS = 2**16, 2**6  # of a buffer made by a constructor, or of `zeros_like`

_KEPT = "_values_of_buffers"  # attribute of a module for them
_aten = torch.ops.aten
# Operators that change a tensor's shape and strides in place, and no values.
_VIEWED = frozenset(
    {_aten.squeeze_, _aten.unsqueeze_, _aten.t_, _aten.transpose_, _aten.swapaxes_, _aten.swapdims_, _aten.as_strided_}
)  # fmt: skip
_UNDEFINED = {_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default,
              _aten.new_empty_strided.default, _aten.empty_permuted.default, _aten.resize_.default}  # fmt: skip
Fill = Callable[[tuple, dict], Any]
"""Takes an operator's arguments; returns the value of all elements of its result."""

_FILLED: dict[Any, Fill] = {
    _aten.zeros_like.default: lambda args, kwargs: 0,
    _aten.new_zeros.default: lambda args, kwargs: 0,
    _aten.ones_like.default: lambda args, kwargs: 1,
    _aten.new_ones.default: lambda args, kwargs: 1,
    _aten.full_like.default: lambda args, kwargs: args[1] if len(args) > 1 else kwargs["fill_value"],
    _aten.new_full.default: lambda args, kwargs: args[2] if len(args) > 2 else kwargs["fill_value"],
}
# Of no tensor at all: autograd begins the gradient of each slice and selection with zeros, and writes unknown values over them
_CONSTANT: dict[Any, Fill] = {
    _aten.zeros.default: lambda args, kwargs: 0,
    _aten.ones.default: lambda args, kwargs: 1,
    _aten.full.default: lambda args, kwargs: args[1] if len(args) > 1 else kwargs["fill_value"],
}


Assume = Callable[[Tensor, Tensor, str], None]
"""Takes a tensor, the values [..] on the CPU that it is taken to hold if they are unknown, and a text that says so."""

LARGEST_INPUT = 2**23  # of a step's own floating-point input: pictures that code looks through for padding


class _Kept:
    """Values in a module for later traces, in a slot, which the census does not count as a model's tensor."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}


def is_small(tensor: Tensor) -> bool:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.numel() <= LARGEST_FLOATS
    return tensor.numel() <= LARGEST_INTEGERS


def _filled(shape: torch.Size, dtype: torch.dtype, value: Any) -> Tensor:
    """Return a CPU tensor filled with a value."""
    if value or not shape.numel():
        return torch.full(shape, value, dtype=dtype, device="cpu")
    zeros = np.zeros(shape.numel() * dtype.itemsize, np.uint8)  # memory pages that are not written until they are read
    return torch.from_numpy(zeros).view(dtype).view(shape)


def _filled_storage(shape: torch.Size, dtype: torch.dtype, value: Any) -> torch.UntypedStorage:
    return _filled(shape, dtype, value).untyped_storage()


def unfilled(like: Tensor) -> Tensor:
    """Return a CPU tensor in the shape, strides and dtype of another one; a trace would put a large one on meta."""
    with torch._C.DisableTorchFunction():
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")


# Tensor.is_meta in C++, without the attribute that a trace has installed (`devices_told`)
is_meta: Callable[[Tensor], bool] = torch._C.TensorBase.is_meta.__get__


def tensors_of(values: Any) -> list[Tensor]:
    """Return the tensors among an operator's arguments or results, also within lists and tuples."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_of(value)
    return found


def storage_number(tensor: Tensor) -> int:
    """Return the number of a tensor's storage, its `_cdata`.

    For a tensor wrapped by `torch.func`, as by `vmap`, it is the inner tensor's. It also works for parameters of lazy modules,
    which allow few methods.
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return torch._C._storage_address(tensor)


class StorageSet:
    """Tensors by their storages, as long as these are alive."""

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref] = {}

    def add(self, tensor: Tensor) -> None:
        """Add the tensor's storage."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._references[key] = weakref.ref(storage, lambda _: self._references.pop(key, None))

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._references


_MISMATCH = re.compile(r"expected scalar type|Found dtype \w+ but expected")  # of PyTorch's messages


class KnownValues:
    """Real twins of meta storages, by the storage's address."""

    def __init__(self) -> None:
        self._twins: dict[int, tuple[Twin, weakref.ref]] = {}
        self._waiting: weakref.WeakSet[Twin] = weakref.WeakSet()  # twins that are yet to be computed
        self.expected_true = StorageSet()  # results of `all()`: unknown, but surely expected to be True
        self.expected_false = StorageSet()  # tensors on which `any()` was called: unknown, but assumed to hold no True
        self.lost = StorageSet()  # integers that were made from data in C++, which drops it on every meta device
        self._assumed: dict[int, str] = {}
        self._traits: dict[int, _Traits] = {}  # by the operator's identity, as its own hash runs Python code

    def get(self, tensor: Tensor) -> Tensor | None:
        """Return a real CPU tensor with this tensor's values (sharing the twin's memory), or None if they are unknown."""
        if not is_meta(tensor):
            return tensor if tensor.is_cpu else None
        twin = self._twins.get(tensor.untyped_storage()._cdata)
        return twin[0].view(layout_of(tensor)) if twin is not None else None

    def twin_of(self, tensor: Tensor) -> Twin | None:
        """Return the twin of a meta tensor's storage, or None if its values are unknown."""
        entry = self._twins.get(tensor.untyped_storage()._cdata)
        return entry[0] if entry is not None else None

    def remember(self, tensor: Tensor, real: Tensor) -> None:
        """Note that the meta tensor, which owns its whole storage, has the values of `real` (same shape and dtype)."""
        storage = tensor.untyped_storage()
        if (
            real.stride() != tensor.stride()
            or real.untyped_storage().nbytes() != storage.nbytes()
            or real.storage_offset()
        ):
            real = unfilled(tensor).copy_(real)
            if real.untyped_storage().nbytes() != storage.nbytes():
                return
        self._pair(storage, Twin(real.untyped_storage()))

    def _pair(self, storage: torch.UntypedStorage, twin: Twin) -> None:
        key = storage._cdata
        self._twins[key] = (twin, weakref.ref(storage, lambda _: self._drop(key)))

    def keep(self, module: nn.Module) -> None:
        """Store the known values of the module's small buffers in the module, for another trace to `recall`."""
        kept = module.__dict__.setdefault(_KEPT, _Kept()).values
        for name, buffer in module.named_buffers():
            largest = LARGEST_KEPT_FLOATS if buffer.dtype.is_floating_point else LARGEST_KEPT_INTEGERS
            if buffer.device.type == "meta" and buffer.numel() <= largest and (real := self.get(buffer)) is not None:
                kept[name] = real.clone()

    def recall(self, module: nn.Module) -> None:
        """Remember the values that `keep` stored in the module, in its buffers' current dtypes; some buffers may be missing."""
        buffers = dict(module.named_buffers())
        for name, real in getattr(module.__dict__.get(_KEPT), "values", {}).items():
            if (buffer := buffers.get(name)) is not None and buffer.shape == real.shape and buffer.is_contiguous():
                with _disable_current_modes():  # stored values are no part of the trace
                    self.remember(buffer, real.to(buffer.dtype, copy=True))

    def assume(self, tensor: Tensor, real: Tensor, text: str) -> None:
        """Remember `real` as a stand-in for unknown values; `text` describes it to users of the values.

        The tensor may be a part of its storage (one half of a split); the rest of the storage is then assumed to be zeros.
        """
        storage = tensor.untyped_storage()
        if real.nbytes < storage.nbytes():
            whole = torch.zeros(storage.nbytes() // tensor.itemsize, dtype=tensor.dtype, device="cpu")
            whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(real)
            self._pair(storage, Twin(whole.untyped_storage()))
        else:
            self.remember(tensor, real)
        self._assumed[tensor.untyped_storage()._cdata] = text

    def assume_later(self, tensor: Tensor, compute: Callable[[], Tensor], text: str) -> None:
        """Do the same with the values that `compute` returns at their first use.

        It must hold no meta tensor, which it would keep alive.
        """
        if not is_whole(tensor):
            self.assume(tensor, compute(), text)
            return
        self._pair(tensor.untyped_storage(), Twin(compute=lambda: compute().contiguous().untyped_storage()))
        self._assumed[tensor.untyped_storage()._cdata] = text

    def assume_unknown(self, tensor: Tensor, real: Tensor, text: str) -> None:
        """Let a meta tensor of unknown values hold the values of `real`."""
        if is_meta(tensor) and not self.is_known(tensor) and tensor.numel() <= LARGEST_ASSUMED:
            self.assume(tensor, real.contiguous(), text)

    def assumption(self, tensors: list[Tensor]) -> str | None:
        """Return the text of an `assume` on which the values of one of the tensors depend, None if all values are true."""
        if not self._assumed:
            return None
        texts = (self._assumed.get(t.untyped_storage()._cdata) for t in tensors if is_meta(t))
        return next((text for text in texts if text is not None), None)

    def forget(self, tensor: Tensor) -> None:
        """Note that the tensor's values are unknown from here on."""
        if is_meta(tensor):
            self._drop(tensor.untyped_storage()._cdata)

    def _drop(self, key: int) -> None:
        self._twins.pop(key, None)
        self._assumed.pop(key, None)

    def all_known(self, tensors: list[Tensor]) -> bool:
        """Return whether every one of the tensors has known values."""
        return all(map(self.is_known, tensors))

    def is_known(self, tensor: Tensor) -> bool:
        """Return whether a tensor on meta or the CPU has known values, without computing them."""
        return tensor.is_cpu or tensor.untyped_storage()._cdata in self._twins

    def run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Return the result of `func` on the known values: real CPU tensors. Call only when all tensor inputs are known."""
        return func(*self._real(args), **{k: self._real(v) for k, v in kwargs.items()})

    def follow(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        """Update the twins after an operator on meta tensors."""
        traits = self._traits.get(id(func))
        if traits is None:
            traits = self._traits[id(func)] = _Traits.of(func)
        if traits.mutable:
            self._follow_mutation(func, args, kwargs, traits)
            return
        if traits.unpredictable:
            self._follow_undefined(func, out)
            return
        if traits.permutes:
            if is_meta(out) and is_small(out):
                self.remember(out, permutation(out.numel()).to(out.dtype))
            return
        if isinstance(out, Tensor):
            if not is_small(out):
                return
        elif not isinstance(out, (list, tuple)):
            return
        if args and isinstance(args[0], Tensor) and not self.is_known(args[0]):  # quick path for most results
            if traits.fill is not None:
                self._follow_filled(traits.fill, args, kwargs, out)
            return
        inputs = tensors_of(args)
        if kwargs:
            inputs += tensors_of(kwargs.values())
        if inputs and not self.all_known(inputs):
            if traits.fill is not None:
                self._follow_filled(traits.fill, args, kwargs, out)
            return
        if traits.constant is not None and not inputs and self._follow_constant(traits.constant, args, kwargs, out):
            return
        if traits.fill is not None and not kwargs.get("pin_memory") and self._follow_filled(traits.fill, args, kwargs, out):
            return
        outs = [out] if isinstance(out, Tensor) else tensors_of(out)
        fresh = [t for t in outs if is_meta(t) and t.untyped_storage()._cdata not in self._twins]
        if not fresh or not all(is_small(t) for t in outs):
            return
        text = self.assumption(inputs)
        if can_wait(func, inputs, out):
            self._pair(out.untyped_storage(), self._later(func, args, kwargs, inputs))
        else:
            try:
                results = run_on_cpu(func, self._real(args), {k: self._real(v) for k, v in kwargs.items()})
            except RuntimeError as error:
                if "norm" not in func.name() and _MISMATCH.search(str(error)):  # a device refuses it, too
                    raise
                return  # the CPU has no such kernel, or does not support float32 statistics with bfloat16
            results = [results] if isinstance(results, Tensor) else tensors_of(results)
            for tensor, real in zip(outs, results, strict=True):
                new = is_meta(tensor) and tensor.untyped_storage()._cdata not in self._twins
                if new and tensor.shape == real.shape:  # some statistics and buffers have other shapes on the CPU
                    self.remember(tensor, real.to(tensor.dtype))
        if text is not None:
            self._assumed |= dict.fromkeys((tensor.untyped_storage()._cdata for tensor in fresh), text)

    def _later(self, func: Any, args: tuple, kwargs: dict, inputs: list[Tensor]) -> Twin:
        """Return the twin of `func`'s result, computed at its first use.

        It holds no meta tensor, which it would keep alive.
        """
        held = {id(one): Held(self._twins[one.untyped_storage()._cdata][0], layout_of(one)) for one in inputs}
        compute = partial(run_on_held, func, hold(args, held), {name: hold(one, held) for name, one in kwargs.items()})
        sources = [one.twin for one in held.values()]
        if max(one.depth for one in sources) >= DEEPEST:
            for one in sources:
                one.settle()
        twin = Twin(compute=compute, sources=sources)
        self._waiting.add(twin)
        return twin

    def _follow_filled(self, fill: Fill, args: tuple, kwargs: dict, out: Any) -> bool:
        """Remember the values of `full_like` and similar operators, which use only a tensor's shape. Return False for others."""
        largest = LARGEST_KEPT_FLOATS if out.dtype.is_floating_point else LARGEST_INTEGERS
        if not is_meta(out) or out.numel() > largest or isinstance(value := fill(args, kwargs), Tensor):
            return False
        if is_whole(out):
            self._pair(out.untyped_storage(), Twin(compute=partial(_filled_storage, out.shape, out.dtype, value)))
        else:
            self.remember(out, _filled(out.shape, out.dtype, value))
        return True

    def _follow_constant(self, fill: Fill, args: tuple, kwargs: dict, out: Tensor) -> bool:
        """Remember the values of `zeros` and similar operators, computed at their first use. Return False if they must run."""
        if kwargs.get("pin_memory") or not is_meta(out) or out.layout is not torch.strided:
            return False
        compute = partial(_filled_storage, out.shape, out.dtype, fill(args, kwargs))
        self._pair(out.untyped_storage(), Twin(compute=compute))
        return True

    def _follow_undefined(self, func: Any, out: Any) -> None:
        """Remember integers of `empty` as zeros: code writes them element by element before it reads them."""
        if func in _UNDEFINED and isinstance(out, Tensor) and is_meta(out):
            fresh = out.untyped_storage()._cdata not in self._twins
            if fresh and not out.dtype.is_floating_point and out.numel() <= LARGEST_UNDEFINED:
                storage = out.untyped_storage()  # smaller than the result if its elements overlap
                self._pair(storage, Twin(_filled_storage(torch.Size([storage.nbytes()]), torch.uint8, 0)))

    def _follow_mutation(self, func: Any, args: tuple, kwargs: dict, traits: _Traits) -> None:
        written = tensors_of(
            [args[index] if index < len(args) else kwargs.get(name) for index, name in traits.written]
        )
        if not any(map(is_meta, written)):
            return
        if traits.keeps_values or (func is _aten.resize_.default and self._still_fits(*written)):
            return
        inputs = tensors_of(args) + tensors_of(kwargs.values())
        if traits.unpredictable or not self._can_mutate(traits.overwrites, written, inputs):
            for tensor in written:
                self.forget(tensor)
            return
        text = self.assumption(inputs)
        for tensor in written:
            self._adopt(tensor)
            self._compute_what_waits_for(tensor)
            if text is not None and is_meta(tensor):
                self._assumed[tensor.untyped_storage()._cdata] = text
        self.run(func, args, kwargs)

    def _still_fits(self, resized: Tensor) -> bool:
        """Return whether a resized tensor has its memory and contents as before, because it did not grow."""
        storage = resized.untyped_storage()
        twin = self._twins.get(storage._cdata)
        return twin is not None and twin[0].storage.nbytes() == storage.nbytes()

    def _can_mutate(self, overwrites: bool, written: list[Tensor], inputs: list[Tensor]) -> bool:
        # fill_, zero_ and copy_ over a whole tensor do not need its earlier values.
        sources = [t for t in inputs if not any(t is w for w in written)] if overwrites else inputs
        if not self.all_known(sources):
            return False
        return all(
            self.all_known([t])
            or (overwrites and is_small(t) and t.numel() * t.itemsize == t.untyped_storage().nbytes())
            for t in written
        )

    def _compute_what_waits_for(self, tensor: Tensor) -> None:
        """Compute all deferred values that depend on a tensor, before it changes."""
        twin, _ = self._twins.get(tensor.untyped_storage()._cdata, (None, None))
        for waiting in [one for one in self._waiting if twin in one.sources]:
            waiting.settle()

    def _adopt(self, tensor: Tensor) -> None:
        if is_meta(tensor) and tensor.untyped_storage()._cdata not in self._twins:
            self.remember(tensor, unfilled(tensor))

    def _real(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.get(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._real(v) for v in value)
        return on_cpu(value)


def permutation(count: int) -> Tensor:
    """Return a permutation, the same for each count.

    Drawn numbers differ from a device's numbers, and the host draws none for them.
    """
    return torch.randperm(count, generator=torch.Generator("cpu").manual_seed(count), device="cpu")


def _is_unpredictable(func: Any) -> bool:
    if func.overloadpacket is _aten.randperm:  # as good a permutation as any: code only requires that it is one
        return False
    return torch.Tag.nondeterministic_seeded in func.tags or func in _UNDEFINED


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traits:
    """Facts about an operator for following its values, looked up once: hashing an operator runs Python code."""

    func: Any  # kept alive, so that no other operator has its identity
    mutable: bool
    unpredictable: bool
    permutes: bool
    written: tuple[tuple[int, str], ...]  # positions and names of the arguments that it writes to
    keeps_values: bool  # changes shapes and strides alone
    overwrites: bool  # needs no earlier values of its output
    fill: Fill | None
    constant: Fill | None

    @classmethod
    def of(cls, func: Any) -> _Traits:
        """Return the facts about an operator."""
        arguments = enumerate(func._schema.arguments)
        return cls(
            func=func,
            mutable=func._schema.is_mutable,
            unpredictable=_is_unpredictable(func),
            permutes=func.overloadpacket is _aten.randperm,
            written=tuple((at, one.name) for at, one in arguments if one.alias_info is not None and one.alias_info.is_write),
            keeps_values=func.overloadpacket in _VIEWED,
            overwrites=func.overloadpacket in (_aten.fill_, _aten.zero_, _aten.copy_),
            fill=_FILLED.get(func),
            constant=_CONSTANT.get(func),
        )

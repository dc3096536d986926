"""Follow small values on a device that computes nothing. Imports torch.

Scripts read tensors: how many elements a mask selects, whether generation has ended, a loss. Under `Values`, a function whose
tensors are all small and known is computed again on the host. It uses the device's memory, which the host can read and write. A
function mode is above autograd and the dispatcher, so PyTorch makes the same allocations with it.

A small tensor is in one of three states:

- true: it has the value that a device would compute;
- assumed: it depends on a value that was not computed, which is taken as 0. Choices among a few such values (`topk`, `argmax`,
  `max`) are spread evenly, as in a trace (sizer.tracing.values.stand_ins), so that every expert gets the same number of tokens.
  Values that `sort` orders are taken to be in order.
  Tokens that are drawn from a vocabulary (`multinomial`, `argmax`, `topk`) are spread over it, so that a generation does not
  end early;
- unknown: it is not followed. Large tensors are always unknown.

PyTorch's kernels that count elements (nonzero, unique) copy the number to the host. The driver returns the number that Python
computed, so PyTorch allocates the result itself. A mask that depends on spread choices is counted. If another mask is unknown,
all its elements count as selected. `assumed` lists both.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import math
import os
import random
import sys
import sysconfig
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch._guards import active_fake_mode
from torch._ops import OpOverload, OpOverloadPacket
from torch._tensor_str import _tensor_str
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from sizer.tracing.values.iterations import iterations_assumed
from sizer.tracing.values.known import permutation
from sizer.tracing.values.libraries import library_values_assumed, modes_unseen
from sizer.tracing.values.masks import PASSED
from sizer.tracing.values.stand_ins import CHOICES, is_ordered, spread, spread_tokens
from sizer.tracing.values.twins import run_on_cpu

INTEGERS = 2**21  # elements of followed integers and masks: token ids, attention masks, labels
FLOATS = 2**14  # elements of followed floats: losses, positions, scales, boxes
COMPUTED = 2**20  # float elements computed only from true values of the device: anchors and their overlaps with boxes
ZEROED_BYTES = 2**16  # an unknown result up to this size is set to 0; larger ones keep the previous content of their block
_READ = 8  # elements of a tensor that C++ code reads by itself, as `item` does
_READS = 16  # such tensors of one call

_HOST = torch.device("cpu")
_WITHOUT_MEMORY = "torch._subclasses."  # fake and functional tensors; compilers also call functions on them outside of their modes
_FACTORIES = frozenset(
    {torch.arange, torch.ones, torch.zeros, torch.full, torch.tensor, torch.as_tensor, torch.linspace, torch.eye,
     torch.tril_indices, torch.triu_indices, torch.scalar_tensor, torch.from_numpy, torch.asarray}
)  # fmt: skip
# Functions that take nothing of their first argument but its shape.
_SHAPED = frozenset(
    {torch.zeros_like, torch.ones_like, torch.full_like, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_tensor}
)
# Functions that take nothing of the tensors after their first argument but dtype, device and shape.
_LIKE = frozenset({Tensor.type_as, Tensor.to, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as})
_OVERWRITING = frozenset({Tensor.fill_, Tensor.zero_, Tensor.copy_})
_PERMUTED = frozenset({torch.randperm})
_INDEXED = frozenset({Tensor.__getitem__, Tensor.__setitem__})
_PUT = frozenset({torch.index_put, Tensor.index_put, torch.index_put_, Tensor.index_put_})
_WHERE = frozenset({torch.where, Tensor.where})
_SELECTED = frozenset({torch.masked_select, Tensor.masked_select})
_SCATTERED = frozenset({torch.masked_scatter, Tensor.masked_scatter})  # counted in the backward pass
_NONZERO = frozenset({torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere})
_REPEATED = frozenset({torch.repeat_interleave, Tensor.repeat_interleave})
_UNIQUE = frozenset({torch.unique, Tensor.unique, torch.unique_consecutive, Tensor.unique_consecutive})
# Choices among values, each with the position of its dimension, and which that is by default.
_CHOOSING: dict[Any, tuple[int, int | None]] = {
    **dict.fromkeys((torch.topk, Tensor.topk), (2, -1)),
    **dict.fromkeys((torch.argmax, Tensor.argmax, torch.argmin, Tensor.argmin), (1, None)),
    **dict.fromkeys((torch.max, Tensor.max, torch.min, Tensor.min), (1, None)),
    **dict.fromkeys((torch.sort, Tensor.sort, torch.argsort, Tensor.argsort), (1, -1)),
}
_SORTING = frozenset({torch.sort, Tensor.sort, torch.argsort, Tensor.argsort})
_FROM_VOCABULARY = frozenset({torch.argmax, Tensor.argmax, torch.topk, Tensor.topk})  # tokens of greedy and of beam search
_DRAWING = frozenset({torch.multinomial, Tensor.multinomial})
_SEGMENTED = frozenset({torch.segment_reduce})
_ALL = frozenset({torch.all, Tensor.all, torch._is_all_true})
_ANY = frozenset({torch.any, Tensor.any, torch._is_any_true})
_BINS = frozenset({torch.bincount, Tensor.bincount, torch.nn.functional.one_hot})
_COUNTING = _INDEXED | _PUT | _WHERE | _SELECTED | _SCATTERED | _NONZERO | _REPEATED | _UNIQUE

# Computed values are taken as finite, because scripts replace values that are not.
_FINITE = {
    torch.isfinite: True,
    Tensor.isfinite: True,
    torch.isnan: False,
    Tensor.isnan: False,
    torch.isinf: False,
    Tensor.isinf: False,
}
_UNSCALE = frozenset({torch._amp_foreach_non_finite_check_and_unscale_})
_READING = frozenset(
    {Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.tolist,
     Tensor.__contains__, Tensor.__format__, Tensor.__repr__}
)  # fmt: skip
_COMPARING = frozenset({torch.equal, Tensor.equal, torch.allclose, Tensor.allclose})
_COPYING = frozenset({Tensor.cpu, Tensor.numpy, Tensor.to, Tensor.copy_})

# Dispatch keys of kernels that run on a device.
_KERNEL_KEYS = frozenset({"", "CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd"})

# Initializations of weights, by name: libraries replace torch.nn.init's functions by their own.
_DRAWS = frozenset(
    {"normal_", "uniform_", "random_", "exponential_", "bernoulli_", "zeros_", "ones_", "constant_", "trunc_normal_", "zero_",
     "fill_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_", "orthogonal_", "mul_", "add_", "div_",
     "erfinv_", "clamp_"}
)  # fmt: skip


def _unseen(function: Callable) -> Callable:
    """Return a function whose own operators no dispatch mode of the script sees, such as selective checkpointing's."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch._C._len_torch_dispatch_stack():
            return function(*args, **kwargs)
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


class Values(TorchFunctionMode):
    """Small tensors on the null device hold the values that a device would have computed.

    Attributes:
        reads: By line, how often the host read a value that was not computed.
        assumed: By line, how often a count was assumed.
    """

    def __init__(self, driver: ctypes.CDLL, *, skip_draws: bool = False) -> None:
        """Follow values over a driver.

        Args:
            driver: The null driver's library.
            skip_draws: Leave large tensors of the host without initial values, so that their pages stay untouched.
        """
        super().__init__()
        self.reads: Counter[str] = Counter()
        self.assumed: Counter[str] = Counter()
        self._driver, self._skip_draws = driver, skip_draws
        self._known, self._tainted = _Storages(), _Storages()
        self._none_of = _Storages()  # `any` of these was requested, and was 0
        self._spread = _Storages()  # tainted tensors that depend on evenly spread choices
        self._in_python: set[str] = set()  # names of operators with a kernel that is a Python function
        self.mask_limit: int | None = None  # elements that an unknown mask is assumed to select; None for all

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Turn the mode on, also in Python code that the backward pass and the dispatcher call."""
        run, register = torch.autograd._engine_run_backward, torch.library.Library.impl
        run_backward = self._turned_on(run)

        def impl(library: Any, op_name: Any, fn: Any, dispatch_key: str = "", **kwargs: Any) -> None:
            if (dispatch_key or library.dispatch_key) in _KERNEL_KEYS and fn is not torch.library.fallthrough_kernel:
                name = op_name if isinstance(op_name, str) else op_name._schema.name
                self._in_python.add(f"{library.ns}::{name.rpartition('::')[2].partition('.')[0]}")
                fn = self._turned_on(fn)
            register(library, op_name, fn, dispatch_key, **kwargs)

        gathers: dict[str, Any] = {name: self._gathering(getattr(c10d, name)) for name in ("all_gather", "all_gather_into_tensor")}
        places = (torch.autograd, torch.autograd.graph)
        for place in places:
            place._engine_run_backward = run_backward
        torch.library.Library.impl = impl
        self._driver.null_follow(1)
        try:
            with (
                mock.patch.multiple(dist, **gathers),
                mock.patch.multiple(c10d, **gathers),
                iterations_assumed(self._note),
                library_values_assumed(self, self._assume_unknown),
                modes_unseen(),
                self,
            ):
                yield
        finally:
            self._driver.null_follow(0)
            torch.library.Library.impl = register
            for place in places:
                place._engine_run_backward = run

    def _gathering(self, gather: Callable) -> Callable:
        """Return an all-gather after which every rank's values are those of this rank, if these are known."""

        @functools.wraps(gather)
        def call(*args: Any, **kwargs: Any) -> Any:
            work = gather(*args, **kwargs)
            outputs, tensor, *_ = inspect.signature(gather).bind(*args, **kwargs).arguments.values()
            known = tensor.is_cuda and self._is_known(tensor) and tensor.numel() > 0
            for output in _tensors(outputs):
                if output.is_cuda and known:
                    every = on_host(tensor.detach()).reshape(1, -1).expand(output.numel() // tensor.numel(), -1)
                    self._spread_over(output, every.reshape(-1))
                elif output.is_cuda:
                    self._assume(output, zero=False)
            return work

        return call

    def _turned_on(self, function: Callable) -> Callable:
        """Return a function that turns the mode on while it runs."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if any(mode is self for mode in _get_current_function_mode_stack()):
                return function(*args, **kwargs)
            with self:
                return function(*args, **kwargs)

        return call

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        if active_fake_mode() is not None or torch.jit.is_tracing() or any(map(_is_wrapped, given)):
            return func(*args, **kwargs)
        if self._skip_draws and _is_draw(func, given):
            return given[0]
        if func in _READING and given and given[0].is_cuda and not self._is_true(given[0]):
            self.reads[call_site()] += 1
        single = [tensor for tensor in given if tensor.is_cuda and 0 < tensor.numel() <= _READ][:_READS]
        if not single:
            return self._call(func, args, kwargs, given)
        bounds = [bound for t in single for bound in (t.data_ptr(), t.data_ptr() + _READ * t.itemsize)]
        self._driver.null_real((ctypes.c_size_t * len(bounds))(*bounds), len(single))
        try:
            return self._call(func, args, kwargs, given)
        finally:
            self._driver.null_real(None, 0)

    def _call(self, func: Any, args: tuple, kwargs: dict, given: list[Tensor]) -> Any:
        on_device = any(tensor.is_cuda for tensor in given)
        if func is Tensor.__format__ and args[0].is_cuda and args[0].dim():
            with self:
                return object.__format__(*args)
        if func is Tensor.__repr__ and args[0].is_cuda and kwargs.get("tensor_contents") is None:
            kwargs = {"tensor_contents": self._contents(args[0])}
        if on_device and func in _COMPARING:
            return self._equal(func, args, kwargs, given)
        if on_device and func in _BINS:
            return self._count(self._bins(func, args, kwargs, given), func, args, kwargs, given)
        if on_device and func in _COUNTING and (counts := self._counts(func, args, kwargs)) is not None:
            return self._count(counts, func, args, kwargs, given)
        if on_device and isinstance(func, OpOverloadPacket) and str(func) == "torchvision.nms":
            return self._count([self._boxes(given[0])], func, args, kwargs, given)
        if on_device and isinstance(func, OpOverload | OpOverloadPacket) and _operator_name(func) in self._in_python:
            return func(*args, **kwargs)  # its kernel's own calls are followed
        if on_device and func in _SEGMENTED:  # PyTorch checks that lengths fit the data
            return self._count([0, 1], func, args, kwargs, given)
        out = func(*args, **kwargs)
        self._note_results(func, args, kwargs, out, given)
        if func is Tensor.tolist and on_device and self._is_known(given[0]):
            return self._listed(given[0])
        return out

    @_unseen
    def _listed(self, tensor: Tensor) -> Any:
        return on_host(tensor.detach()).tolist()

    @_unseen
    def _note_results(self, func: Any, args: tuple, kwargs: dict, out: Any, given: list[Tensor]) -> None:
        """Give the results of a call their values."""
        results = [tensor for tensor in _tensors(out) if tensor.is_cuda and not _is_wrapped(tensor)]
        if func in _FINITE and isinstance(out, Tensor) and out.is_cuda and not all(map(self._is_known, given)):
            if _is_small(out):
                on_host(out).fill_(_FINITE[func])
                self._known.add(out)
        elif results and func in _ALL and not self._follows_from_known(given[0]) and _is_small(out):
            self._assume(out, zero=True)
            # scripts expect that their checks succeed, as in a trace; except checks for which the script requested `any`
            on_host(out).fill_(given[0] not in self._none_of)
        elif func in _UNSCALE:
            on_host(args[1]).zero_()  # no infinite gradient: the optimizer steps
            self._known.add(args[1])
        elif results or any(tensor.is_cuda for tensor in given):
            if func in _COPYING and isinstance(out, Tensor) and not out.is_cuda:
                self._note_copy(given)
                self._copy_known(out, given[1] if func is Tensor.copy_ else given[0])
            self._follow(func, args, kwargs, out, given, results)
            if results and func in _ANY and not self._follows_from_known(given[0]):
                self._none_of.add(given[0])

    def _equal(self, func: Any, args: tuple, kwargs: dict, given: list[Tensor]) -> bool:
        """Compare two tensors: by their values if both are known, else by their shapes, as in a trace."""
        func(*args, **kwargs)  # for its allocations
        if not all(map(self._is_true, given)):
            self.reads[call_site()] += 1
        if all(map(self._is_known, given)):
            return _unseen(func)(*_to_host(args), **_to_host(kwargs))
        return given[0].shape == given[1].shape

    def _note(self, text: str) -> None:
        self.assumed[f"{call_site()}: {text}"] += 1

    @_unseen
    def _assume_unknown(self, tensor: Tensor, real: Tensor, text: str) -> None:
        """Set a small tensor of the device to values that were not computed. `text` describes them."""
        if tensor.is_cuda and 0 < tensor.numel() <= INTEGERS and not self._is_true(tensor):
            self._note(text)
            self._spread_over(tensor, real.to(tensor.dtype))

    @_unseen
    def _contents(self, tensor: Tensor) -> str:
        """Return the numbers of a tensor as text. PyTorch would count elements on the device to choose their format."""
        known = self._is_known(tensor)
        values = on_host(tensor.detach()) if known else torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        return _tensor_str(values, len("tensor("))

    @_unseen
    def _copy_known(self, copy: Tensor, source: Tensor) -> None:
        """Copy known values to the host. PyTorch's copy goes through a kernel if strides or dtype differ."""
        if source.is_cuda and self._is_known(source) and copy.shape == source.shape:
            with torch.no_grad():
                copy.detach().copy_(on_host(source.detach()))

    def _note_copy(self, given: list[Tensor]) -> None:
        if any(tensor.is_cuda and not self._is_true(tensor) for tensor in given):
            self.reads[call_site()] += 1

    @_unseen
    def _follow(
        self, func: Any, args: tuple, kwargs: dict, out: Any, given: list[Tensor], results: list[Tensor]
    ) -> None:
        """Compute the results of a call on the host, or mark them as assumed or unknown."""
        held = {_key(tensor) for tensor in given if tensor.is_cuda}
        fresh = [tensor for tensor in results if _key(tensor) not in held]
        written = [tensor for tensor in results if _key(tensor) in held]
        dim = _chosen_dim(func, args, kwargs)
        overwrites = func in _OVERWRITING and _is_whole(given[0])
        read = given[1:] if func in _SHAPED or overwrites else given[:1] if func in _LIKE else given
        states = self._states_of(read)
        if self._spread in states:
            largest = INTEGERS
        else:
            largest = FLOATS if states or not any(tensor.is_cuda for tensor in read) else COMPUTED
        if (given or func in _FACTORIES) and all(map(self._is_known, read)) and all(_is_small(one, largest) for one in results):
            chooses = states and dim is not None and not self._follows_choices(given[0])
            if not chooses and self._compute(func, args, kwargs, out, fresh):
                if overwrites:
                    self._known.add(given[0])
                    self._tainted.discard(given[0])
                    self._spread.discard(given[0])
                for tensor in (*fresh, *written):
                    self._note_states(tensor, states)
                    if states and tensor.dtype.is_floating_point:
                        _make_finite(on_host(tensor), (args, kwargs))
                return
        for tensor in fresh:
            self._assume(tensor, zero=True)
        if func in _PERMUTED and _is_small(out):  # any permutation is valid, because scripts only rely on its being one
            on_host(out).copy_(permutation(out.numel()))
            self._known.add(out)
            self._tainted.discard(out)
        elif func in _DRAWING:
            self._draw(out, (args[0] if args else kwargs["input"]).shape[-1])
        elif dim is not None:
            self._choose(func, args[0] if args else kwargs["input"], out, dim)
        if getattr(func, "__name__", "").endswith("_") and not func.__name__.startswith("__"):
            for tensor in written:  # written in place, by a value that was not computed
                self._assume(tensor, zero=False)

    def _states_of(self, given: list[Tensor]) -> list[_Storages]:
        """Return the sets of uncomputed values to which the results of some tensors belong.

        A result of spread choices and of a value that was taken as 0 is not spread.
        """
        tainted = [tensor for tensor in given if tensor.is_cuda and tensor in self._tainted]
        if not tainted:
            return []
        return [self._tainted, self._spread] if all(tensor in self._spread for tensor in tainted) else [self._tainted]

    def _note_states(self, tensor: Tensor, states: list[_Storages]) -> None:
        """Add a tensor to the sets that its values belong to."""
        for state in states:
            state.add(tensor)
        if states and self._spread not in states:
            self._spread.discard(tensor)

    def _follows_choices(self, values: Tensor) -> bool:
        """Return True for integers and masks derived from choices: their maximum is computed."""
        return values.is_cuda and values in self._spread and not values.dtype.is_floating_point

    def _draw(self, places: Tensor, size: int) -> None:
        """Spread tokens over a vocabulary."""
        if _is_small(places) and places.numel():
            self._spread_over(places, spread_tokens(places.numel(), size))

    def _spread_over(self, places: Tensor, chosen: Tensor) -> None:
        on_host(places).copy_(chosen.view(places.shape))
        for state in (self._known, self._tainted, self._spread):
            state.add(places)

    def _choose(self, func: Any, values: Tensor, out: Any, dim: int) -> None:
        """Spread the places that `topk`, `argmax`, `max` and their opposites have chosen along a dimension."""
        places = out if isinstance(out, Tensor) else out[1]
        if places.dtype != torch.int64 or not _is_small(places) or values.dim() == 0:
            return
        dim %= values.dim()
        size = values.shape[dim]
        if func in _SORTING:
            if places.numel() and is_ordered(values, dim):
                self._spread_over(places, spread(places.shape, dim, size, 1))
            return
        if func in _FROM_VOCABULARY and size > CHOICES:
            self._draw(places, size)
        if not places.numel() or size > CHOICES:
            return
        shape = [*values.shape]
        shape[dim] = places.numel() * size // values.numel()
        self._spread_over(places, spread(torch.Size(shape), dim, size, 1))

    def _assume(self, tensor: Tensor, *, zero: bool) -> None:
        for state in (self._known, self._spread):
            state.discard(tensor)
        if not _is_small(tensor) or not 0 < tensor.untyped_storage().nbytes() <= ZEROED_BYTES:
            return
        if zero:
            on_host(tensor).zero_()
        self._known.add(tensor)
        self._tainted.add(tensor)

    def _compute(self, func: Any, args: tuple, kwargs: dict, out: Any, fresh: list[Tensor]) -> bool:
        """Return True if the call could be repeated on the host; its results are then on the device."""
        if func is Tensor.cuda:  # would take memory of the device once more, as would a GPU by its number
            func, args, kwargs = Tensor.to, (args[0], _HOST), {}
        elif func is Tensor.to and isinstance(args[1] if len(args) > 1 else None, int):
            args = (args[0], _HOST, *args[2:])
        elif isinstance(kwargs.get("device"), int):
            kwargs = kwargs | {"device": _HOST}
        try:
            with torch.no_grad():
                computed = run_on_cpu(func, _to_host(args), _to_host(kwargs))
        except Exception:  # an operator without a CPU kernel: its result stays unknown
            return False
        ours = {id(tensor) for tensor in fresh}
        for tensor, value in zip(_tensors(out), _tensors(computed), strict=False):
            if id(tensor) in ours and tensor.numel() and tensor.shape == value.shape:
                on_host(tensor).copy_(value)
                self._known.add(tensor)
        return True

    # ---------------------------------------------------------------------------------------------------------------- counts

    @_unseen
    def _counts(self, func: Any, args: tuple, kwargs: dict) -> list[int] | None:
        """Return the numbers that PyTorch's kernels would count, in their order; None if PyTorch counts nothing."""
        if func in _UNIQUE:
            return [self._distinct(args[0], func)] * 2
        if func in _REPEATED:
            return self._repeated(args, kwargs, func)
        if func in _WHERE:
            masks = [args[0]] if len(args) == 1 and not kwargs else []
        elif func in _SELECTED:
            tensor, mask = args[0], kwargs["mask"] if "mask" in kwargs else args[1]
            masks = [mask.expand(torch.broadcast_shapes(tensor.shape, mask.shape))]
        elif func in _SCATTERED:
            return self._scattered(args, kwargs, func)
        elif func in _INDEXED or func in _PUT:
            masks = [leaf for leaf in pytree.tree_leaves(args[1]) if _is_mask(leaf)]
        else:
            masks = [args[0]]
        return [self._selected(mask, func) for mask in masks if mask.is_cuda] or None

    def _is_countable(self, tensor: Tensor, func: Any) -> bool:
        """Return True if a tensor's values can be counted; note the place if they depend on spread choices."""
        if not self._follows_from_known(tensor):
            return False
        if self._is_true(tensor):
            return True
        self.assumed[f"{call_site()}: {func.__name__} counts choices that are spread evenly"] += 1
        return True

    def _selected(self, mask: Tensor, func: Any) -> int:
        if self._is_countable(mask, func):
            return int(on_host(mask.detach()).count_nonzero())
        if self.mask_limit is not None and self.mask_limit < mask.numel():
            self._note(PASSED.format(self.mask_limit))
            return self.mask_limit
        self._note(f"{func.__name__} selects all {mask.numel():,} elements")
        return mask.numel()

    def _scattered(self, args: tuple, kwargs: dict, func: Any) -> list[int] | None:
        """Return the number of written source elements, which its gradient counts; None if it has no gradient."""
        tensor = args[0] if args else kwargs["input"]
        mask, source = (kwargs[name] if name in kwargs else args[at] for at, name in ((1, "mask"), (2, "source")))
        if not (torch.is_grad_enabled() and source.requires_grad):
            return None
        mask = mask.expand(torch.broadcast_shapes(tensor.shape, mask.shape))
        return [min(self._selected(mask, func), source.numel())]

    @_unseen
    def _boxes(self, boxes: Tensor) -> int:
        self.assumed[f"{call_site()}: nms keeps all {boxes.shape[0]:,} boxes"] += 1
        return boxes.shape[0]

    def _distinct(self, tensor: Tensor, func: Any) -> int:
        if self._is_countable(tensor, func):
            return len(torch.unique(on_host(tensor.detach())))
        self.assumed[f"{call_site()}: {func.__name__} finds {tensor.numel():,} distinct elements"] += 1
        return tensor.numel()

    def _repeated(self, args: tuple, kwargs: dict, func: Any) -> list[int] | None:
        repeats = kwargs.get("repeats", args[min(1, len(args) - 1)] if args else None)
        if not isinstance(repeats, Tensor) or not repeats.is_cuda or kwargs.get("output_size") is not None:
            return None
        if self._is_countable(repeats, func):
            return [int(on_host(repeats).sum())]
        if self._is_known(repeats) and (total := int(on_host(repeats).sum())) > 0:  # a script that reads them finds the same
            self._note(f"{func.__name__} repeats by values that were not computed")
            return [total]
        self.assumed[f"{call_site()}: {func.__name__} repeats each element once"] += 1
        return [repeats.numel()]

    @_unseen
    def _bins(self, func: Any, args: tuple, kwargs: dict, given: list[Tensor]) -> list[int]:
        """Return the smallest and the largest integer, in the order in which PyTorch reads them."""
        one_hot = func is torch.nn.functional.one_hot
        if one_hot and kwargs.get("num_classes", args[1] if len(args) > 1 else -1) > 0 and not self._is_known(given[0]):
            return [0, 0]  # PyTorch checks that they are in range: no size follows
        if not given[0].numel() or not self._is_countable(given[0], func):
            self.assumed[f"{call_site()}: {func.__name__} finds zeros only"] += 1
            return [0, 0]
        values = on_host(given[0].detach())
        return [int(values.max())] if one_hot else [int(values.min()), int(values.max())]

    def _count(self, counts: list[int], func: Any, args: tuple, kwargs: dict, given: list[Tensor]) -> Any:
        """Call a function whose kernels count, with the numbers that the driver returns; its backward pass counts again."""
        numbers = (ctypes.c_int64 * len(counts))(*counts)

        def answer(*_: Any) -> None:
            self._driver.null_answer(numbers, len(numbers))

        # index_put counts for the gradient of the tensor, and again for that of the values
        twice = (ctypes.c_int64 * (2 * len(counts)))(*counts, *counts)

        def answer_backward(*_: Any) -> None:
            self._driver.null_answer(twice, len(twice))

        def forget(*_: Any) -> None:
            self._driver.null_answer(None, 0)

        answer()
        try:
            out = func(*args, **kwargs)
        finally:
            forget()
        result = out if isinstance(out, Tensor) else given[0] if out is None and given else None
        if result is not None and result.grad_fn is not None:
            result.grad_fn.register_prehook(answer_backward)
            result.grad_fn.register_hook(forget)
        if out is not None:
            self._follow(func, args, kwargs, out, given, [tensor for tensor in _tensors(out) if tensor.is_cuda])
        elif given and given[0].is_cuda:  # __setitem__
            self._set(func, args, kwargs, given)
        return out

    @_unseen
    def _set(self, func: Any, args: tuple, kwargs: dict, given: list[Tensor]) -> None:
        """Write elements on the host, too. A mask that was not computed selects none there, so its values do not fit."""
        if not all(map(self._is_known, given)):
            self._known.discard(given[0])
            return
        self._note_states(given[0], self._states_of(given))
        try:
            with torch.no_grad():
                func(*_to_host(args), **_to_host(kwargs))
        except (RuntimeError, IndexError):
            self._known.discard(given[0])

    # ---------------------------------------------------------------------------------------------------------------- states

    def _is_known(self, tensor: Tensor) -> bool:
        if not tensor.is_cuda or not tensor.numel():
            return _is_small(tensor)
        return tensor in self._known and _is_small(tensor, INTEGERS if tensor in self._spread else COMPUTED)

    def _follows_from_known(self, tensor: Tensor) -> bool:
        """Return True if a tensor's values are true, or follow from choices that were spread."""
        return self._is_true(tensor) or (self._is_known(tensor) and tensor in self._spread)

    def _is_true(self, tensor: Tensor) -> bool:
        return self._is_known(tensor) and not (tensor.is_cuda and tensor.numel() and tensor in self._tainted)


class _Storages:
    """A set of living storages."""

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref] = {}

    def add(self, tensor: Tensor) -> None:
        storage, key, references = tensor.untyped_storage(), _key(tensor), self._references
        references[key] = weakref.ref(storage, lambda _: references.pop(key, None))

    def discard(self, tensor: Tensor) -> None:
        self._references.pop(_key(tensor), None)

    def __contains__(self, tensor: Tensor) -> bool:
        return _key(tensor) in self._references


def on_host(tensor: Tensor) -> Tensor:
    """Return a CPU tensor over the memory of a tensor on the null device."""
    if not tensor.is_cuda:
        return tensor
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    with torch._C.DisableTorchFunction():
        memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
        raw = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype)
        return torch.as_strided(raw, tensor.shape, tensor.stride(), tensor.storage_offset())


def fix_seeds() -> None:
    """Seed the host's random generators, so that each run of a script, on each route, has the same sizes."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


_OURS = str(Path(__file__).parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep


def call_site() -> str:
    """Return the innermost line, as "file:line", that is neither PyTorch's, Python's nor Sizer's; else PyTorch's."""
    frame: FrameType | None = sys._getframe(1)
    inner = None
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_OURS, "<")):
            inner = inner or f"{name}:{frame.f_lineno}"
            if not name.startswith(_TORCH) and (not name.startswith(_STANDARD) or "site-packages" in name):
                return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return inner or "unknown line"


@torch.no_grad()
def _make_finite(values: Tensor, given: Any) -> None:
    """Replace NaN by 0 in place, and infinities too if no argument is infinite: a value that was taken as 0 divides others."""
    wrong = values.isnan() if any(map(_is_infinite, pytree.tree_leaves(given))) else ~values.isfinite()
    if wrong.any():
        values[wrong] = 0


def _is_infinite(leaf: object) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.dtype.is_floating_point and _is_small(leaf) and bool(on_host(leaf.detach()).isinf().any())
    return isinstance(leaf, float) and math.isinf(leaf)


def _key(tensor: Tensor) -> int:
    # A storage that Python has an object of counts as shared: autograd would no longer add to a gradient in place.
    return torch._C._storage_address(tensor)


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a value, also the bounds of slices, which PyTorch reads."""
    leaves: list[Any] = []
    for leaf in pytree.tree_leaves(value):
        leaves += (leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else (leaf,)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _operator_name(operator: OpOverload | OpOverloadPacket) -> str:
    packet = operator.overloadpacket if isinstance(operator, OpOverload) else operator
    return packet._qualified_op_name


def _chosen_dim(func: Any, args: tuple, kwargs: dict) -> int | None:
    """Return the dimension along which a function chooses indices; None if it chooses none, such as `max` of all values."""
    if func not in _CHOOSING:
        return None
    position, usual = _CHOOSING[func]
    dim = args[position] if len(args) > position else kwargs.get("dim", usual)
    return dim if isinstance(dim, int) else None


def _is_small(tensor: Tensor, largest: int = FLOATS) -> bool:
    """Return True if a tensor is followed. `largest` is the number of elements of floats."""
    return tensor.layout == torch.strided and tensor.numel() <= (largest if tensor.dtype.is_floating_point else INTEGERS)


def _is_whole(tensor: Tensor) -> bool:
    """Return True if a tensor of the device has its storage to itself."""
    return tensor.is_cuda and tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()


def _is_mask(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype in (torch.bool, torch.uint8)


def _is_wrapped(tensor: Tensor) -> bool:
    return (
        tensor.layout != torch.strided
        or tensor.is_nested  # without a shape
        or is_traceable_wrapper_subclass(tensor)
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        or tensor.device.type == "meta"
        or type(tensor).__module__.startswith(_WITHOUT_MEMORY)
        or is_lazy(tensor)  # without a shape
    )


def _is_draw(func: Any, given: list[Tensor]) -> bool:
    """Return True if a function gives initial values to a large tensor of the host."""
    if not given or given[0].is_cuda or given[0].numel() <= INTEGERS:
        return False
    return getattr(func, "__name__", "") in _DRAWS and given[0].dtype.is_floating_point


def _to_host(value: Any) -> Any:
    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return on_host(leaf.detach())
        if isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf.startswith("cuda")):
            return _HOST
        if isinstance(leaf, str):
            return leaf.replace("torch.cuda.", "torch.")
        if getattr(leaf, "__module__", None) == "torch.cuda" and isinstance(leaf, type):  # a type of tensors
            return getattr(torch, leaf.__name__)
        return leaf

    return pytree.tree_map(convert, value)

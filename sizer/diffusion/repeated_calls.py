"""Calls of a pipeline's modules that repeat earlier ones: their allocations are logged again, and their operators do not run.

A denoiser repeats equal blocks, and a VAE decodes equal tiles, often with hooks that move each layer's weights. Modules that
are described alike (sizer.tracing.depth) are equal. A call repeats another one if equal modules get inputs of the same shapes,
strides and dtypes. Two such calls run first. If both log the same stretch, and return tensors of the same layout, each further
one repeats it. First calls of modules and later ones are compared separately, because a first call may prepare something.

A call runs each time if it leaves more than its results and the lists that it got: other tensors, work of a stream, a phase, or
values that are known.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from sizer.base.errors import TraceError
from sizer.tape.tape import Tensor as NotedTensor
from sizer.tracing.depth import described_layers
from sizer.tracing.log import Stretch
from sizer.tracing.recorder import LAYER, Recorder
from sizer.tracing.values.known import is_meta

_CODERS = ("encoder", "decoder")  # of a VAE, which calls them for each tile
_FEWEST_PARTS = 4  # of a layer, below which repeating its calls is not worth it
_PLAIN = (int, float, str, bytes, torch.dtype, torch.device, torch.Size, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """A tensor that a call returns: over the memory of an argument, or of the call's own block, both by their numbers.

    Without a shape it is the argument itself.
    """

    number: int
    is_passed: bool
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] = ()
    offset: int = 0  # from the argument's
    dtype: torch.dtype = torch.uint8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """Record of one call: its stretch of the log, its results, and bytes on the host."""

    stretch: Stretch
    results: list[_Result | Any]
    spec: TreeSpec
    copied_bytes: int
    host_bytes: int  # most that it held in addition
    tensors: dict[int, NotedTensor]
    path: str = field(compare=False)  # of the module that ran


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """An argument of a call: the tensor, which may be freed in the call, its offset, and its block."""

    tensor: Callable[[], Any]
    offset: int
    block: int | None


class RepeatedCalls:
    """Modules of a pipeline whose calls may repeat earlier ones. `differ` is set if that turned out to be wrong."""

    def __init__(self, pipe: Any, recorder: Recorder) -> None:
        self.differ = False
        self._recorder = recorder
        self._modules: list[tuple[nn.Module, int]] = []  # each with the number of its description
        self._last: dict[Hashable, _Call | None] = {}
        self._known: dict[Hashable, _Call] = {}
        self._called: set[int] = set()  # by id, modules that ran, or whose call was repeated
        self._never_ran: set[int] = set()
        self._told: set[tuple[str, str]] = set()  # paths of a module that ran, and of one whose call was repeated
        numbers = count()
        for part in pipe.components.values():
            if isinstance(part, nn.Module):
                self._find(part, numbers)

    def _find(self, part: nn.Module, numbers: Iterator[int]) -> None:
        """Find lists of layers in a part, and the coders of a VAE. Call it before the pipeline is placed: hooks differ."""
        kinds: dict[str, list[tuple[dict[str, Any], int]]] = {}
        for path, stack in part.named_modules():
            if not isinstance(stack, nn.ModuleList) or len(stack) < 2 or None in stack._modules.values():
                continue
            if min(sum(1 for _ in layer.modules()) for layer in stack) < _FEWEST_PARTS:
                continue
            alike = kinds.setdefault(LAYER.sub(".*", path), [])  # notes of a trace have such a path
            for layer, facts in zip(stack, described_layers(part, path, stack) or [], strict=False):
                number = next((number for other, number in alike if other == facts), None)
                if number is None:
                    alike.append((facts, number := next(numbers)))
                self._modules.append((layer, number))
        coders = (getattr(part, name, None) for name in _CODERS)
        self._modules += ((coder, next(numbers)) for coder in coders if isinstance(coder, nn.Module))

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Repeat calls within the context. Enter it after the pipeline is placed, so that hooks are a part of each call."""
        with ExitStack() as stack:
            for module, number in self._modules:
                stack.callback(self._watch(module, number))
            yield

    def _watch(self, module: nn.Module, number: int) -> Callable[[], None]:
        own, has_own = module.forward, "forward" in vars(module)

        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._call(module, number, own, args, kwargs)

        def put_back() -> None:
            if has_own:
                module.forward = own
            else:
                del module.forward

        module.forward = forward  # as hooks of accelerate and diffusers do
        return put_back

    def _call(self, module: nn.Module, number: int, own: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        is_first = id(module) not in self._called
        self._called.add(id(module))
        passed, spec = tree_flatten((args, kwargs))
        with torch._C.DisableTorchFunction():
            facts = self._facts(passed)
        key = None if facts is None else (number, is_first, spec, facts)
        if key is not None and (call := self._known.get(key)) is not None:
            if is_first:
                self._never_ran.add(id(module))
            return self._repeat(call, passed, _lists_in((args, kwargs)))
        if id(module) in self._never_ran:
            self.differ = True
            raise TraceError("calls of equal modules differ", todo="trace each call")
        if key is None or self._last.get(key, ...) is None:
            del passed  # the call may free tensors in lists
            return own(*args, **kwargs)
        given = self._given(passed)
        del passed
        out, call = self._record(own, args, kwargs, given)
        if call is not None and call == self._last.get(key):
            self._known[key] = call
        self._last[key] = call
        return out

    def _facts(self, passed: list[Any]) -> Hashable | None:
        """Return the facts about arguments that decide what a call does; None if they are not all known."""
        facts, places, recorder = list[Hashable](), dict[int, int](), self._recorder
        for value in passed:
            if isinstance(value, _PLAIN):
                facts.append((type(value), value))
                continue
            if not _is_dense(value):
                return None
            key = value.untyped_storage()._cdata
            offset = value.storage_offset() if key in places else None
            is_placed = value in recorder.host, value in recorder.deferred, value in recorder.storages
            place = places.setdefault(key, len(places))
            facts.append((value.shape, value.stride(), value.dtype, place, offset, is_placed, recorder.values.twin_of(value)))
        return tuple(facts)

    def _given(self, passed: list[Any]) -> list[_Given | Any]:
        with torch._C.DisableTorchFunction():
            return [
                _Given(tensor=weakref.ref(value), offset=value.storage_offset(), block=self._recorder.block_of(value))
                if isinstance(value, Tensor)
                else value
                for value in passed
            ]

    def _record(self, own: Callable[..., Any], args: tuple, kwargs: dict, given: list[Any]) -> tuple[Any, _Call | None]:
        """Run a call. Return its output, and what it did; None if that cannot be repeated."""
        recorder, lists = self._recorder, _lists_in((args, kwargs))
        log, host, values, path = recorder.log, recorder.host, recorder.values, recorder.paths.current()
        since, copied, held = log.position(), host.copied_bytes, host.held_bytes
        tensors = [one.tensor for one in given if isinstance(one, _Given)]
        versions = [(find, find()._version) for find in tensors if values.twin_of(find()) is not None]
        with host.peak_apart() as most:
            out = own(*args, **kwargs)
        blocks = [one.block if isinstance(one, _Given) else None for one in given]
        with torch._C.DisableTorchFunction():
            changed = any((tensor := find()) is None or tensor._version != version for find, version in versions)
            stretch = None if changed or host.held_bytes != held else log.stretch(since, path, blocks)
            if stretch is None:
                return out, None
            leaves, spec = tree_flatten((out, [[*one] for one in lists]))
            results = [self._result(leaf, given, blocks, since[1]) for leaf in leaves]
        kept = set(range(len(stretch.sizes))) - {~event for event in stretch.order if event < 0}
        returned = {one.number for one in results if isinstance(one, _Result) and not one.is_passed}
        if kept != returned or any(one is ... for one in results):
            return out, None
        noted = {} if recorder.block_notes is None else recorder.block_notes.tensors
        call = _Call(
            stretch=stretch,
            results=results,
            spec=spec,
            copied_bytes=host.copied_bytes - copied,
            host_bytes=most[0],
            tensors={block - since[1]: noted[block] for block in range(since[1], len(log.sizes)) if block in noted},
            path=path,
        )
        return out, call

    def _result(self, leaf: Any, given: list[Any], blocks: list[int | None], first: int) -> Any:
        """Return the description of a returned value; an ellipsis if it cannot be made again."""
        if isinstance(leaf, _PLAIN):
            return leaf
        for number, one in enumerate(given):
            if isinstance(one, _Given) and one.tensor() is leaf:
                return _Result(number=number, is_passed=True)
        block = self._recorder.block_of(leaf) if _is_dense(leaf) and not leaf.requires_grad else None
        if block is None or self._recorder.values.twin_of(leaf) is not None:
            return ...
        is_passed = block < first
        if is_passed and block not in blocks:
            return ...
        number = blocks.index(block) if is_passed else block - first
        offset = leaf.storage_offset() - (given[number].offset if is_passed else 0)
        return _Result(
            number=number, is_passed=is_passed, shape=tuple(leaf.shape), strides=leaf.stride(), offset=offset, dtype=leaf.dtype
        )

    def _repeat(self, call: _Call, passed: list[Any], lists: list[list]) -> Any:
        """Log a call's stretch again, and return tensors like its results."""
        recorder = self._recorder
        log, host, notes, path = recorder.log, recorder.host, recorder.block_notes, recorder.paths.current()
        with torch._C.DisableTorchFunction():
            blocks = [recorder.block_of(value) if isinstance(value, Tensor) else None for value in passed]
            first = log.repeat(call.stretch, path, blocks)
            for number in (~event - len(call.stretch.sizes) for event in call.stretch.order if ~event >= len(call.stretch.sizes)):
                recorder.storages.forget(passed[number].untyped_storage())
        if (call.path, path) not in self._told:
            self._told.add((call.path, path))
            recorder.device.repeat_choices(lambda other: _like(other, call.path, path))
        host.copied_bytes += call.copied_bytes
        host.peak_bytes = max(host.peak_bytes, host.held_bytes + call.host_bytes)
        if notes is not None:
            notes.tensors.update((first + block, tensor) for block, tensor in call.tensors.items())
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            out, contents = tree_unflatten(self._made(call, passed, first), call.spec)
        for one, content in zip(lists, contents, strict=True):
            one[:] = content
        return out

    def _made(self, call: _Call, passed: Sequence[Any], first: int) -> list[Any]:
        """Return new tensors like the results of a call, over the blocks from `first` on."""
        recorder, storages = self._recorder, dict[int, torch.UntypedStorage]()

        def storage_of(block: int) -> torch.UntypedStorage:
            if block not in storages:
                size = int(recorder.log.sizes[first + block])
                storages[block] = torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage()
                recorder.storages.follow(storages[block], first + block)
            return storages[block]

        def make(result: Any) -> Any:
            if not isinstance(result, _Result):
                return result
            if result.shape is None:
                return passed[result.number]
            given = passed[result.number] if result.is_passed else None
            storage = storage_of(result.number) if given is None else given.untyped_storage()
            offset = result.offset + (0 if given is None else given.storage_offset())
            return torch.empty(0, dtype=result.dtype, device="meta").set_(storage, offset, result.shape, result.strides)

        return [make(result) for result in call.results]


def _is_dense(value: Any) -> bool:
    return type(value) is Tensor and is_meta(value) and value.layout is torch.strided


def _lists_in(value: Any) -> list[list]:
    """Return the lists in a call's arguments, which it may change."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [*([value] if isinstance(value, list) else []), *(found for one in inner for found in _lists_in(one))]


def _like(path: str, own: str, other: str) -> list[str]:
    """Return the path of a part of another module like the one with a path, if that is a part of its own."""
    return [f"{other}{path[len(own) :]}"] if own and (path == own or path.startswith(f"{own}.")) else []

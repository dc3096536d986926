"""Dispatch mode that watches a step on meta tensors and logs every allocation and release.

A block is a storage: it is logged when an operator first returns a tensor over it and released when the storage is freed
(`blocks.py`). Effects of the mode itself are undone (`meta/in_place.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_map_only

from sizer.architecture.inner_tensors import cache_tensors, parts_of
from sizer.base.versions import by_address
from sizer.catalogue.recipes import workspaces_of
from sizer.tape.tape import BlockNotes
from sizer.tape.tape import Tensor as NotedTensor
from sizer.tracing.allocations import AllocationRule, During, Library, Steps
from sizer.tracing.blocks import Storages, Workspaces
from sizer.tracing.cuda import cublas
from sizer.tracing.cuda.by_capability import as_environment_says
from sizer.tracing.device import Device
from sizer.tracing.device_rules import rules_for
from sizer.tracing.log import BlockLog, DeferredSize
from sizer.tracing.meta import collectives, composite, in_place
from sizer.tracing.meta.accelerators import sparse_refused
from sizer.tracing.meta.deferred import Deferred
from sizer.tracing.meta.dtypes import Check
from sizer.tracing.meta.host_memory import HostMemory
from sizer.tracing.meta.memo import shared
from sizer.tracing.meta.refusals import in_own_words
from sizer.tracing.modules import Loading, ModulePaths, tensors_in
from sizer.tracing.operator_tables import functional
from sizer.tracing.values.handler import Handler
from sizer.tracing.values.host_draws import HostDraws
from sizer.tracing.values.known import LARGEST_INPUT, KnownValues, is_meta, is_small, tensors_of

_CONTIGUOUS = torch.contiguous_format
_META = torch.device("meta")
_HALVES = (torch.bfloat16, torch.float16)
_COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}  # between the device and the host, too
_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.nonzero.default}
_RESIZING = {torch.ops.aten.resize_.default, torch.ops.aten.resize_as_.default}
_VIEWS = {torch.ops.aten._unsafe_view.default}  # not views by their schemas
LAYER = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Plan for an operator: the function that runs instead, and the allocations added to its result."""

    func: Any
    name: str
    check: Check | None  # raises where every device would
    handler: Handler | None  # may return NotImplemented
    instead: Callable[..., Any] | None  # runs under the recorder instead of the operator
    shortcut: Callable[[tuple], Any] | None  # may return NotImplemented
    run: Callable[..., Any]  # the operator itself, memoized if possible
    correct: Callable[[tuple, Any], Any] | None  # corrects the meta kernel's result
    multiplies: bool  # whether it multiplies matrices, so that cuBLAS runs
    allocations: AllocationRule | None  # the kernel's allocations other than its results
    collective: str | None  # kind of communication between ranks
    reads: bool  # a value, so that the host waits
    lifts: bool  # the last call of `torch.tensor(data)`, with a new argument
    resizable: Callable[[tuple, dict], list[Tensor]] | None  # arguments with storages that may grow
    draws: bool  # in place, at random
    library: Library | None  # names the library that it calls, whose workspaces are not counted
    views: bool = False  # only returns a view of an argument

    @property
    def is_plain(self) -> bool:
        """Return True if only the operator itself runs."""
        instead = self.check, self.handler, self.instead, self.shortcut
        rules = *instead, self.correct, self.allocations, self.collective, self.resizable, self.library
        does_more = self.multiplies or self.reads or self.lifts or self.draws
        return all(rule is None for rule in rules) and not does_more


class Recorder(TorchDispatchMode):
    """Logs the blocks of all code that runs under it, by the rules of one device.

    `log` is the tape in progress, `values` the known values, `paths` the current module, `notes` the stand-ins used, `at` the
    current operator, `storages` the block of each storage. If set, `on_backward` is called for every operator of a backward
    pass. With several streams, `follow_stream` is called for every operator. Tensors on the CPU are part of the log only if the
    device is the CPU itself; `host` are meta tensors that represent such tensors.
    """

    def __init__(self, device: Device, *, crowded: bool = False) -> None:
        super().__init__()
        self.device = device
        self.rules = rules_for(device)
        self.log = BlockLog(by_address=device.kind == "cuda" and by_address(device.version))
        self.values = KnownValues()
        self.host = HostMemory()
        device.is_on_host = lambda tensor: tensor.is_cpu or tensor in self.host
        self.deferred = Deferred()
        self.paths = ModulePaths()
        self.notes: dict[str, None] = {}
        self.at: Any = None
        self.on_backward: Callable[[], None] | None = None
        self.follow_stream: Callable[[tuple], None] | None = None
        self.crowded = crowded
        self.batch_size = 1  # assumed positions are spread equally within each sample
        self.mask_limit: int | None = None  # elements that an unknown mask is assumed to select; None for all
        self.block_notes: BlockNotes | None = (
            None  # further facts about blocks, if requested
        )
        self._plans: dict[int, _Plan] = {}  # by the operator's identity, as its own hash runs Python code
        self._kernels: dict[int, Callable[..., Any]] = {}  # the same, for operators that handlers call
        self.taken_apart: Any = None
        self.unawaited: dict[int, tuple[Tensor, ...]] = {}
        self.barriers: dict[str, Tensor] = {}
        self.storages = Storages(self.log)
        self._device_types = ("meta", "cpu") if device.kind == "cpu" else ("meta",)
        blas = self.rules.blas
        product, kept = (None, False) if blas is None else (blas.size, blas.kept)
        self._workspaces = Workspaces(self.log, self.paths, product=product, kept=kept)
        device.where = self.paths.current
        self._node: int | None = None  # autograd's node that made the latest block, and its first block
        self._first_of_node = 0
        self._sole_owner = in_place.sole_owner_use_count()
        self.engine_use_count = in_place.engine_use_count()

    environment: Mapping[str, str] | None = None  # environment variables of the traced code, if it has its own
    draws: HostDraws | None = None  # draws for large host tensors, if later draws matter
    supports_higher_order_operators = True
    compiles = False  # whether compiled code is compiled for the device (sizer.tracing.compiled)

    def ignore_compile_internals(self) -> bool:
        """Return True if Dynamo may compile under this mode (torch/utils/_python_dispatch.py, 2.15)."""
        return self.compiles

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Without it TorchDispatchMode wraps __torch_dispatch__ in torch._dynamo.disable, which costs more than an operator does
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if types and any(map(is_traceable_wrapper_subclass_type, types)):
            self.taken_apart = func
            return NotImplemented  # the subclass decomposes itself, and its inner operators come here
        plan = self._plans.get(id(func))
        if plan is None and not types and isinstance(func, HigherOrderOperator):
            return self._run_dense(func, args, kwargs or {})
        kwargs = kwargs or {}
        if self.compiles and (device := kwargs.get("device")) is not None and device.type == "cuda":
            kwargs = kwargs | {"device": _META}  # in compiled code no function mode moves it there
        self.at = func
        if self.follow_stream is not None:
            self.follow_stream(args)
        if self.on_backward is not None and torch._C._current_graph_task_id() != -1:
            self.on_backward()
        if plan is None:
            plan = self._plan(func)
        if plan.views and (view := self._view(func, args, kwargs)) is not None:
            return view
        if plan.check is not None:
            plan.check(self.device.kind, args)
        if self.storages.overwritten and not func.is_view:
            self.storages.check_readable(tensors_of(args))
        if self.deferred.is_left:
            self.place_deferred(tensors_of(args))
        if self.host or self.host.tells:
            inputs = [tensor for tensor in tensors_of((args, *kwargs.values())) if tensor not in self.deferred]
            if len(inputs) > 1:
                self.host.check(plan.name, inputs)
            if self.host and self.host.mixes(plan.name, inputs):
                args = tree_map_only(Tensor, self._on_meta_of_host, args)
        if plan.reads and self.log.awaited:
            self.log.synchronize(self.log.stream_order.record(self.log.stream))
        resizable = [] if plan.resizable is None else _storages(plan.resizable(args, kwargs))
        out = plan.handler(self, func, args, kwargs) if plan.handler is not None else NotImplemented
        if out is NotImplemented:
            if plan.instead is not None:
                with self:
                    return plan.instead(*args, **kwargs)
            if plan.shortcut is not None and not kwargs:
                out = plan.shortcut(args)
            if out is NotImplemented:
                try:
                    out = plan.run(*args, **kwargs)
                except NotImplementedError:  # the trace's own limit
                    raise
                except (RuntimeError, IndexError, ValueError, TypeError) as error:
                    raise in_own_words(func, args, kwargs, error) from None
            if plan.correct is not None:
                out = plan.correct(args, out)
            if isinstance(out, Tensor) and out.is_sparse and is_meta(out):
                raise sparse_refused(plan.name)
            self.values.follow(func, args, kwargs, out)
        if plan.draws and self.draws is not None:
            self.draws.follow(func, args, kwargs)
        for storage, before in resizable:
            self.resized(storage, before)
        of_nothing = self.deferred.makes(args)  # as in a model that is initialized on meta
        if plan.allocations is not None and not of_nothing and (not self._is_on_host(args, out) or func in _COPIES):
            self._follow(plan, plan.allocations(self.device, args, kwargs, out), args)
        if isinstance(out, Tensor):
            self._see(plan, out, args)
        elif isinstance(out, (list, tuple)):
            for tensor in tensors_of(out):
                self._see(plan, tensor, args)
        if plan.collective is not None:
            self.log.tell(plan.collective, *collectives.told(func, args, out))
        library = None if plan.library is None or of_nothing or self._is_on_host(args, out) else plan.library(args)
        if library is not None:
            self.notes.setdefault(workspaces_of(library))
        if plan.multiplies and (blas := self.rules.blas) is not None and not self._is_on_host(args, out):
            self._workspaces.multiply(plan.name, *cublas.needs(blas, func, args, out, beta=kwargs.get("beta", 1)))
        return out

    def _run_dense(self, func: HigherOrderOperator, args: tuple, kwargs: dict) -> Any:
        """Run an operator of functions, such as flex_attention outside of torch.compile, by its own kernel of plain operators.

        Raises NotImplementedError if it has no such kernel, as PyTorch does.
        """
        dense = func.py_kernels.get(DispatchKey.CompositeExplicitAutograd)
        if dense is None:
            raise NotImplementedError(f"{func.name()} without torch.compile has no kernel of plain operators")
        with self:
            return dense(*args, **kwargs)

    @property
    def sees_inputs(self) -> bool:
        """Return True if operators are also watched by their arguments: host tensors, deferred tensors, or several streams."""
        return bool(self.host or self.host.tells or self.deferred.is_left or self.follow_stream is not None)

    def _view(self, func: Any, args: tuple, kwargs: dict) -> Tensor | None:
        """Return an operator's result if it is a view of a block, without a block and values of its own; else None."""
        if self.sees_inputs:
            return None
        try:
            out = func(*args, **kwargs)
        except (RuntimeError, IndexError, ValueError, TypeError):
            return None  # the operator raises it again
        is_plain = type(out) is Tensor and is_meta(out) and not out.is_sparse
        return out if is_plain and out in self.storages else None

    def _is_on_host(self, args: tuple, out: Any) -> bool:
        """Return True if an operator runs on the host: kernels of the device then hold nothing."""
        if self.host and self.host.makes(args):
            return True
        if self.device.kind == "cpu" or (type(out) is Tensor and is_meta(out)):
            return False
        tensors = tensors_of((args, out))
        return bool(tensors) and not any(map(is_meta, tensors))

    def _plan(self, func: Any) -> _Plan:
        if self.environment is not None and func in cublas.WORKSPACE_USERS and (blas := self.rules.blas) is not None:
            blas = as_environment_says(blas, self.environment, self.device.version)
            self.rules, self.environment = replace(self.rules, blas=blas), None
            self._workspaces.set_product(blas.size)
        rules, name = self.rules, str(func)
        kernel = rules.kernels.get(func)
        plan = _Plan(
            func=func,
            name=name,
            check=rules.checks.get(func) or rules.checks.get(name),
            handler=rules.handlers.get(func)
            or rules.handlers.get(name)
            or composite.python_kernel(func, self.device.kind, rules.known),
            instead=partial(kernel, self.device) if kernel else composite.parts(func, self.device.kind, rules.known),
            shortcut=rules.shortcuts.get(func),
            run=shared(func, self.device.kind, self.device.version, corrects=self.device.kind != "mps"),
            correct=rules.results.get(func),
            multiplies=rules.blas is not None and func in cublas.WORKSPACE_USERS,
            allocations=rules.allocations.get(functional(func)) or rules.allocations.get(name),
            collective=collectives.KINDS.get(name),
            reads=func in _READS,
            resizable=_resizable(func),
            draws=torch.Tag.nondeterministic_seeded in func.tags and func._schema.is_mutable,
            library=rules.libraries.get(functional(func)),
            lifts=func is torch.ops.aten.lift_fresh.default,
        )
        self._plans[id(func)] = plan = replace(plan, views=(func.is_view or func in _VIEWS) and plan.is_plain)
        return plan

    def only_views(self, func: Any) -> bool:
        """Return True if an operator only returns a view of an argument."""
        return self._plan(func).views

    def load(self, module: nn.Module, *, tell_frozen: bool = False) -> None:
        """Log the module's parameters and buffers in the order in which they come to the device.

        With `tell_frozen` parameters that require no gradient have a category of their own.
        """
        for path, tensor, category in tensors_in(module, tell_frozen=tell_frozen):
            self._own(tensor, category, "Module.to", path)
        with _disable_current_modes():  # values are not part of the device's memory
            self.values.recall(module)
        self.paths.name(module)

    def loaded(self, module: nn.Module, *, tell_frozen: bool = False) -> Loading:
        """Return the log of a module's loading under this recorder; tensors of the module that were not seen are logged now."""
        self.load(module, tell_frozen=tell_frozen)
        blocks: dict[str, int] = {}
        for path, tensor, category in tensors_in(module, tell_frozen=tell_frozen):
            for part in parts_of(tensor):
                block = self.block_of(part)
                assert block is not None, "it is loaded"
                blocks[path] = block
                self.log.classify(block, category)
        tensors = {} if self.block_notes is None else self.block_notes.tensors
        return Loading(log=self.log.copy(), blocks=blocks, tensors=tensors)

    def resume(self, loading: Loading, module: nn.Module) -> None:
        """Start with the log of the module's loading."""
        self.log.begin_as(loading.log)
        if self.block_notes is not None:
            self.block_notes.tensors.update(loading.tensors)
        for path, tensor, _ in tensors_in(module):
            for part in parts_of(tensor):
                self.storages.follow(part.untyped_storage(), loading.blocks[path])
        self.values.recall(module)
        self.paths.name(module)

    def place(self, tensor: Tensor) -> Tensor:
        """Return a meta tensor that represents the CPU tensor on the device, logged as input; small tensors keep their values."""
        out = torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
        if is_small(tensor) or tensor.numel() <= LARGEST_INPUT:
            # Hidden from modes, and as a copy if the tensor was logged: values kept for a trace are no part of it.
            with _disable_current_modes():
                real = tensor.contiguous() if self.block_of(tensor) is None else tensor.clone(memory_format=_CONTIGUOUS)
            self.values.remember(out, real)
        self._own(out, "input", "Tensor.to", "")
        return out

    def place_of_data(self, device: torch.device | None) -> AbstractContextManager[None]:
        """Return the context for `torch.tensor(data)`; `device` is the one that code names, None without one."""
        if device is None:
            return self.host.of_no_device()
        return self.deferred.told(True) if self.deferred.names(device) else nullcontext()

    def see_new(self, tensor: Tensor, made_by: str) -> None:
        """Log a tensor that was made where no dispatch mode sees it."""
        self._enter(tensor, made_by, self.paths.current(), "temporary")

    def block_of(self, tensor: Tensor) -> int | None:
        """Return the block that holds the tensor, or None if it was never logged."""
        return self.storages.block_of(tensor)

    def classify(self, tensors: Iterable[Tensor | None], category: str) -> None:
        """Set the category of the blocks that hold the tensors."""
        for tensor in tensors:
            for part in () if tensor is None else parts_of(tensor):
                if (block := self.block_of(part)) is not None:
                    self.log.classify(block, category)

    def note_output(self, output: object) -> None:
        """Note the blocks of a model's output, or of its loss, which a training loop may keep (sizer.tape.loop_choices)."""
        for tensor in cache_tensors(output):
            if (block := self.block_of(tensor)) is not None:
                self.log.note_output(block, half=tensor.dtype in _HALVES)

    def resized(self, storage: torch.UntypedStorage, before: int) -> None:
        """Log that a storage of `before` bytes was resized."""
        blocks = self.storages.resize(storage, before, self.paths.current())
        if blocks is not None and self.block_notes is not None and blocks[0] in self.block_notes.tensors:
            self.block_notes.tensors[blocks[1]] = self.block_notes.tensors[blocks[0]]

    def leave(self, tensor: Tensor) -> None:
        """Log that a tensor's memory has left the device; the tensor itself stays alive."""
        self.storages.leave(tensor)

    def await_stream(self, tensor: Tensor, stream: int) -> None:
        """Note that the tensor's block, once released, is free only after another stream's work."""
        block = self.block_of(tensor)
        if block is not None and self.log.stream_of(block) != stream:
            self.log.awaited[block] = self.log.awaited.get(block, frozenset()) | {stream}

    def keep(self, size: DeferredSize) -> None:
        """Log memory that a library keeps from its first call on."""
        self._workspaces.keep(str(self.at), size)

    def empty_cache(self) -> None:
        """Log a call of `torch.cuda.empty_cache()`."""
        self._workspaces.empty_cache()

    @contextmanager
    def deferring(self, query: Callable[[int], DeferredSize]) -> Iterator[None]:
        """Make the sizes of temporary blocks within the context size queries, which `query` makes from their bytes."""
        start = len(self.log.sizes)
        before = len(self.log.order)
        yield
        stay = set(self.log.alive(before))
        for block in range(start, len(self.log.sizes)):
            if block not in stay:
                self.log.defer(block, query(self.log.sizes[block]))

    def stand_in(self, text: str) -> None:
        """Note an assumption about an unknown value, with the module that used it; the layers of a stack count as one."""
        where = LAYER.sub(".*", self.paths.current())
        self.notes.setdefault(f"{text} (in {where})" if where else text)

    def run_kernel(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Return the result of an operator's meta kernel, memoized if possible."""
        kernel = self._kernels.get(id(func))
        if kernel is None:
            kernel = self._kernels[id(func)] = shared(func, self.device.kind, self.device.version, corrects=False)
        return kernel(*args, **kwargs)

    def run_logged(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Return an operator's result, logged as if called by the dispatcher, which takes several times as long."""
        return self.__torch_dispatch__(func, (), args, kwargs)

    def unlogged(self) -> Recorder:
        """Return a recorder with the same rules and known values, and a log of its own."""
        other = Recorder(copy(self.device), crowded=self.crowded)
        other.values, other.host, other.deferred = self.values, self.host, self.deferred
        other.batch_size, other.mask_limit = self.batch_size, self.mask_limit
        return other

    def corrected(self, func: Any, args: tuple, out: Any) -> Any:
        """Return an operator's result as on the device, by the table RESULTS."""
        correct = self.rules.results.get(func)
        return out if correct is None else correct(args, out)

    def is_unshared(self, tensor: Tensor) -> bool:
        """Return whether only the caller of the running operator holds this tensor's storage."""
        return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == self._sole_owner

    def is_of_node(self, tensor: Tensor) -> bool:
        """Return True if autograd's current node has made the tensor."""
        block = self.block_of(tensor)
        return block is not None and _current_node() == self._node and block >= self._first_of_node

    def _own(self, tensor: Tensor | None, category: str, op: str, module: str) -> None:
        for part in () if tensor is None else parts_of(tensor):
            if (block := self.block_of(part)) is None:
                self._enter(part, op, module, category)
            elif category == "input" or self.log.category(block) == "temporary":
                self.log.classify(block, category)

    def _see(self, plan: _Plan, tensor: Tensor, args: tuple) -> None:
        on_cpu = not is_meta(tensor)
        if tensor.is_sparse and not on_cpu:  # such as gradients of embeddings
            raise sparse_refused(plan.name)
        if (on_cpu and tensor.device.type not in self._device_types) or tensor in self.storages:
            return
        if type(tensor) is not Tensor and is_traceable_wrapper_subclass_type(type(tensor)):
            return  # its storage is no memory; the inner tensors were seen when they were made
        if (
            on_cpu
            and not plan.lifts
            and any(tensor.untyped_storage()._cdata == t.untyped_storage()._cdata for t in tensors_of(args))
        ):
            return  # a view of a tensor from before the step
        if self.host.makes(args) and tensor not in self.host:
            self.host.take(tensor)
        if self.deferred.makes(args):
            self.deferred.take(tensor)
        self._enter(tensor, plan.name, self.paths.current(), "temporary")

    def _enter(self, tensor: Tensor, op: str, module: str, category: str) -> None:
        if torch._is_zerotensor(tensor):
            return  # autograd's zeros have no memory on any device
        storage = tensor.untyped_storage()
        if self.host.holds(storage) or self.deferred.holds(storage):
            return
        block = self.log.allocate(storage.nbytes(), op, module, category)
        if (node := _current_node()) != self._node:
            self._node, self._first_of_node = node, block
        if self.block_notes is not None:
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.block_notes.tensors[block] = NotedTensor(shape=tuple(tensor.shape), dtype=dtype)
        self.storages.follow(storage, block)

    def _on_meta_of_host(self, tensor: Tensor) -> Tensor:
        """Return a meta tensor of the host like a host tensor with values; the values are known if they are few."""
        if is_meta(tensor):
            return tensor
        copy = self.host.copy_of(tensor, pinned=False)
        if is_small(tensor):
            self.values.remember(copy, tensor)
        return copy

    def place_deferred(self, tensors: Iterable[Tensor | None]) -> None:
        """Log tensors that code made on meta by name and never materialized: code computes with them as they are."""
        for tensor in tensors:
            for part in () if tensor is None else parts_of(tensor):
                if self.deferred.place(part):
                    self._enter(part, "", "", "temporary")

    def _follow(self, plan: _Plan, steps: Steps, args: tuple) -> None:
        """Log a kernel's workspaces and results, in its own order."""
        kept: list[int] = []
        for step in steps:
            if isinstance(step, Tensor):
                self._see(plan, step, args)
            elif isinstance(step, During):
                blocks = self._workspaces.allocate(plan.name, step.sizes)
                self._follow(plan, step.steps, args)
                self._workspaces.release(blocks)
            elif isinstance(step, tuple):
                passing = step[0] if step and isinstance(step[0], list) else []
                blocks = self._workspaces.allocate(plan.name, passing)
                kept += self._workspaces.allocate(plan.name, (size for size in step if not isinstance(size, list)))
                self._workspaces.release(blocks)
            else:
                self._workspaces.hold(plan.name, step)
        self._workspaces.release(kept)


def _current_node() -> int | None:
    """Return the number of the node that autograd's engine runs, or None."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def _resizable(func: Any) -> Callable[[tuple, dict], list[Tensor]] | None:
    """Return a function that selects arguments that an operator may resize, such as `out=`. None if there are none."""
    if func in _RESIZING:
        return lambda args, kwargs: [args[0]]
    names = [argument.name for argument in func._schema.arguments if argument.is_out]
    return (lambda args, kwargs: tensors_of(kwargs.get(name) for name in names)) if names else None


def _storages(tensors: Iterable[Tensor]) -> list[tuple[torch.UntypedStorage, int]]:
    """Return the storages on meta of tensors, each with its bytes."""
    storages = (tensor.untyped_storage() for tensor in tensors if is_meta(tensor))
    return [(storage, storage.nbytes()) for storage in storages]

"""The dispatch mode that watches a step run on meta tensors and logs every allocation and release.

A block is a storage: it is logged when an operator first returns a tensor over it and released when the storage dies,
which a weak reference tells at once. What the mode itself would change is undone (`observer.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sizer.tracing import libraries, observer, stand_ins
from sizer.tracing.device import Device
from sizer.tracing.log import BlockLog
from sizer.tracing.modules import ModulePaths
from sizer.tracing.values import KnownValues, tensors_of

_LIFT = torch.ops.aten.lift_fresh.default  # what `torch.tensor(data)` calls last: its argument is new


class Recorder(TorchDispatchMode):
    """Logs the blocks of everything that runs under it, by the rules of one device.

    `log` is the tape in the making, `values` the known values, `paths` the module at work, `notes` the stand-ins used, `at`
    the operator at work. `on_backward` is called for every operator of a backward pass, where somebody wants to know.
    Tensors on the CPU are part of the log only where the device is the CPU itself.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.log = BlockLog()
        self.values = KnownValues()
        self.paths = ModulePaths()
        self.notes: dict[str, None] = {}
        self.at: Any = None
        self.on_backward: Callable[[], None] | None = None
        self._composites: dict[Any, bool] = {}
        self._live: dict[int, tuple[int, weakref.ref]] = {}
        self._handlers = {**stand_ins.HANDLERS, **observer.HANDLERS}
        self._scratch = device.scratch
        self._kernels = device.kernels_by_operator
        self._results = device.results
        self._device_types = ("meta", "cpu") if device.kind == "cpu" else ("meta",)
        self._workspace_users = libraries.WORKSPACE_USERS if device.kind == "cuda" else frozenset()
        self._threads_with_workspace: set[bool] = set()
        self._sole_owner = observer.count_of_a_sole_owner()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        self.at = func
        if self.on_backward is not None and torch._C._current_graph_task_id() != -1:
            self.on_backward()
        handler = self._handlers.get(func)
        out = handler(self, func, args, kwargs) if handler is not None else NotImplemented
        if out is NotImplemented:
            if func in self._kernels:
                return self._redispatch(self._kernels[func], args, kwargs)
            if self._is_composite(func):
                return self._redispatch(func.decompose, args, kwargs)
            out = func(*args, **kwargs)
            if func in self._results:
                out = self._results[func](args, out)
            self.values.follow(func, args, kwargs, out)
        if isinstance(out, Tensor):
            self._see(func, out, args)
        elif isinstance(out, (list, tuple)):
            for tensor in tensors_of(out):
                self._see(func, tensor, args)
        if func in self._workspace_users:
            self._keep_workspace(func)
        scratch = self._scratch.get(func)
        if scratch is not None:
            for sizes in scratch(self.device, args, kwargs, out):
                self._hold(func, sizes)
        return out

    def load(self, module: nn.Module) -> None:
        """Logs the module's parameters and buffers in the order in which `.to(device)` moves them."""
        for path, child in _children_first(module):
            for name, parameter in child._parameters.items():
                self._own(parameter, "parameter", "Module.to", f"{path}.{name}".lstrip("."))
            for name, buffer in child._buffers.items():
                self._own(buffer, "buffer", "Module.to", f"{path}.{name}".lstrip("."))
        self.paths.name(module)

    def place(self, tensor: Tensor) -> Tensor:
        """A meta tensor that stands for the CPU tensor moved to the device, logged as input; integers keep their values."""
        out = torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
        if not tensor.dtype.is_floating_point:
            self.values.remember(out, tensor.contiguous())
        self._own(out, "input", "Tensor.to", "")
        return out

    def block_of(self, tensor: Tensor) -> int | None:
        """The block that holds the tensor, or None if it was never logged."""
        entry = self._live.get(tensor.untyped_storage()._cdata)
        return entry[0] if entry else None

    def classify(self, tensors: Iterable[Tensor | None], category: str) -> None:
        """Sets the category of the blocks that hold the tensors."""
        for tensor in tensors:
            if tensor is not None and (block := self.block_of(tensor)) is not None:
                self.log.classify(block, category)

    def stand_in(self, text: str) -> None:
        """Notes an assumption about an unknown value, with the module that asked."""
        where = self.paths.current()
        self.notes.setdefault(f"{text} (in {where})" if where else text)

    def is_unshared(self, tensor: Tensor) -> bool:
        """Whether nothing but the caller of the running operator holds this tensor's storage."""
        return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == self._sole_owner

    def _is_composite(self, func: Any) -> bool:
        """Whether the operator only calls others: it arrives here undecomposed where inference mode skips autograd's keys."""
        known = self._composites.get(func)
        if known is None:
            known = self._composites[func] = isinstance(func, torch._ops.OpOverload) and func._can_decompose()
        return known

    def _redispatch(self, function: Any, args: tuple, kwargs: dict) -> Any:
        with self:
            return function(*args, **kwargs)

    def _own(self, tensor: Tensor | None, category: str, op: str, module: str) -> None:
        if tensor is not None and tensor.untyped_storage()._cdata not in self._live:
            self._enter(tensor, op, module, category)

    def _see(self, func: Any, tensor: Tensor, args: tuple) -> None:
        if tensor.device.type not in self._device_types or tensor.untyped_storage()._cdata in self._live:
            return
        if (
            tensor.device.type == "cpu"
            and func is not _LIFT
            and any(tensor.untyped_storage()._cdata == t.untyped_storage()._cdata for t in tensors_of(args))
        ):
            return  # a view of a tensor that was there before the step
        self._enter(tensor, _name(func), self.paths.current(), "temporary")

    def _enter(self, tensor: Tensor, op: str, module: str, category: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        block = self.log.allocate(storage.nbytes(), op, module, category)
        self._live[key] = (block, weakref.ref(storage, lambda _: self._released(key, block)))

    def _released(self, key: int, block: int) -> None:
        if self._live.pop(key, None) is not None:
            self.log.release(block)

    def _keep_workspace(self, func: Any) -> None:
        """The first matrix product of a thread (the caller's, autograd's) allocates a cuBLAS workspace that stays."""
        thread = torch._C._current_graph_task_id() != -1
        if thread not in self._threads_with_workspace:
            self._threads_with_workspace.add(thread)
            size = libraries.cublas_workspace_bytes(self.device.capability)
            self.log.allocate(size, _name(func), self.paths.current(), "workspace")

    def _hold(self, func: Any, sizes: Iterable[int]) -> None:
        """Logs a kernel's inner workspaces: all allocated, then all released."""
        blocks = [self.log.allocate(s, _name(func), self.paths.current(), "workspace") for s in sizes if s]
        for block in reversed(blocks):
            self.log.release(block)


def _name(func: Any) -> str:
    return str(func)


def _children_first(module: nn.Module, path: str = "") -> Iterable[tuple[str, nn.Module]]:
    # torch/nn/modules/module.py, Module._apply: children first, then own parameters, then own buffers.
    for name, child in module._modules.items():
        if child is not None:
            yield from _children_first(child, f"{path}.{name}".lstrip("."))
    yield path, module

"""Position of a trace: the path of the module in its forward, and in the backward pass of the module that made the node.

A module's tensors come to a device by `.to(device)`. Quantized tensors come one by one while they are loaded. This loading is
recorded once for a module, and every trace of the module begins with the record.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sizer.architecture.quantization import quantization_states
from sizer.tape.tape import FROZEN
from sizer.tape.tape import Tensor as NotedTensor
from sizer.tracing.log import BlockLog

_NONE = (0, "")


def children_first(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield a module's parts with their paths, in the order of `Module._apply` (torch/nn/modules/module.py), itself last."""
    for name, child in module._modules.items():
        if child is not None:
            yield from children_first(child, f"{path}.{name}".lstrip("."))
    yield path, module


class ModulePaths(AbstractContextManager):
    """Follows the forward passes of a module's children by global hooks.

    In the backward pass, autograd's sequence numbers find them. The hooks are global, not on the modules, because PyTorch's own
    fast paths check for the latter.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._stack: list[str] = []
        self._numbers: list[int] = []
        self._paths: list[str] = []
        self._handles: list[Any] = []
        self._failure = _NONE  # the last error that passed through modules, and the innermost of these

    def name(self, module: nn.Module) -> None:
        """Store the dotted paths of a module and its children."""
        for path, child in module.named_modules():
            self._names.setdefault(id(child), path)

    def current(self) -> str:
        """Return the dotted path of the current module, "" for the root or for code outside any module."""
        if self._stack:
            return self._stack[-1]
        if torch._C._current_graph_task_id() != -1 and (node := torch._C._current_autograd_node()) is not None:
            at = bisect_right(self._numbers, node._sequence_nr()) - 1
            return self._paths[at] if at >= 0 else ""
        return ""

    def of_error(self, error: Exception) -> str:
        """Return the dotted path of the module whose forward raised the error, "" if no module did."""
        return self._failure[1] if self._failure[0] == id(error) else self.current()

    def __enter__(self) -> ModulePaths:
        register = torch.nn.modules.module
        self._handles = [
            register.register_module_forward_pre_hook(self._enter_module),
            register.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        self._failure = _NONE  # an earlier error was caught; another error may get its address
        self._stack.append(self._names.get(id(module), self._stack[-1] if self._stack else ""))
        self._note()

    def _leave_module(self, module: nn.Module, args: Any, result: Any) -> None:
        error = sys.exc_info()[1]
        if error is not None and self._failure[0] != id(error):
            self._failure = (id(error), self.current())
        if self._stack:
            self._stack.pop()
        self._note()

    def _note(self) -> None:
        self._numbers.append(torch.autograd._get_sequence_nr())
        self._paths.append(self._stack[-1] if self._stack else "")


# ------------------------------------------------------------------------------------------------------------- loading


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """Log of loading a module, the block of each of its tensors by path, and the tensors in the blocks, if noted."""

    log: BlockLog
    blocks: dict[str, int]
    tensors: dict[int, NotedTensor]


def tensors_in(module: nn.Module, *, tell_frozen: bool = False) -> Iterator[tuple[str, Tensor, str]]:
    """Yield path, tensor and category of a module's parameters and buffers in the order in which `.to(device)` moves them.

    A quantized weight is followed by the tensors that restore it, in the weight's category. With `tell_frozen` parameters that
    require no gradient have a category of their own.
    """
    for path, child in children_first(module):
        category = "parameter"
        for name, parameter in child._parameters.items():
            if parameter is not None:
                category = FROZEN if tell_frozen and not parameter.requires_grad else "parameter"
                yield f"{path}.{name}".lstrip("."), parameter, category
        for name, state in quantization_states(child):
            yield f"{path}.{name}".lstrip("."), state, category
        for name, buffer in child._buffers.items():
            if buffer is not None:
                yield f"{path}.{name}".lstrip("."), buffer, "buffer"

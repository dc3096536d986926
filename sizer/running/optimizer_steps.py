"""Count the optimizer steps of a script, and note events between its allocations. Imports torch.

PyTorch's global hooks for optimizers, modules and autograd work with any script. A step ends with the last optimizer that steps
before the first one steps again. A GAN's two optimizers are therefore one step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from sizer.architecture.inner_tensors import parts_of
from sizer.running.history import LOAD, phase_of_step


class Stop(BaseException):
    """Raised after the requested number of steps. Not an Exception, so that a script's `except Exception` does not catch it."""


class Steps:
    """Stamp the memory history with a script's modules and optimizer steps (sizer.running.history).

    `done` is the number of steps of the optimizer that stepped most often.
    """

    def __init__(self, limit: int, on_stop: Callable[[], None]) -> None:
        """Stop before step `limit` + 1, never if it is 0; `on_stop` is called if a script continues after that."""
        self.limit, self._on_stop = limit, on_stop
        self._stamp = self._stops = 0
        self.restart()

    def restart(self) -> None:
        """Forget everything but the number of the latest stamp."""
        self.modules: list[tuple[int, str]] = []
        self.labels: list[tuple[int, int, str, str]] = []
        self.backwards: list[tuple[int, bool]] = []
        self._roots: list[weakref.ref[nn.Module]] = []
        self.done = 0
        self._counts = WeakIdKeyDictionary()  # by optimizer: weak references, because a script may delete one with its states
        self._leader: weakref.ref | None = None
        self._led = 1  # the step of the leader
        self._ends: dict[str, int] = {}
        self._paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._owners = WeakIdKeyDictionary()  # by parameter: the paths of their modules
        self._stack: list[str] = []

    @property
    def roots(self) -> list[nn.Module]:
        """Return the root modules that ran and are still alive."""
        return [root for reference in self._roots if (root := reference()) is not None]

    @property
    def phase_ends(self) -> list[tuple[int, str]]:
        """The stamps at which "load" and each step end, ascending."""
        return sorted((stamp, phase) for phase, stamp in self._ends.items())

    def install(self) -> None:
        """Register the hooks, and set the first stamp: events without a stamp come from autograd's threads."""
        self._next()
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        register_module_forward_pre_hook(self._enter)
        register_module_forward_hook(self._leave, always_call=True)
        run = torch.autograd._engine_run_backward

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            self.backwards.append((self._next(), True))
            try:
                return run(*args, **kwargs)
            finally:
                self.backwards.append((self._next(), False))

        for place in (torch.autograd, torch.autograd.graph):
            place._engine_run_backward = run_backward

    def stop(self) -> None:
        """End the run. A script that catches everything and continues is ended at the third attempt."""
        self._stops += 1
        if self._stops > 2:
            self._on_stop()
        raise Stop

    def begin_compiled(self) -> None:
        """Note that compiled code runs, inside which modules are not seen: the first such call ends the setup."""
        if LOAD not in self._ends:
            self._ends[LOAD] = self._next()

    def _next(self) -> int:
        self._stamp += 1
        torch.cuda.memory._set_memory_metadata(str(self._stamp))
        return self._stamp

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if module not in self._paths:
            self._add_root(module)
        self._stack.append(self._paths.get(module, ""))
        stamp = self._next()
        self.modules.append((stamp, self._stack[-1]))
        if len(self._stack) == 1:
            if self._holds_device(module):
                self._ends.setdefault(LOAD, stamp)
            for leaf in pytree.tree_leaves(args):
                if (
                    isinstance(leaf, Tensor)
                    and leaf.is_cuda
                    and leaf.grad_fn is None
                    and not isinstance(leaf, nn.Parameter)
                ):
                    self._label(stamp, leaf, "input")

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._stack:
            return
        self._stack.pop()
        self.modules.append((self._next(), self._stack[-1] if self._stack else ""))

    def _add_root(self, root: nn.Module) -> None:
        inner = {id(module) for module in nn.Module.modules(root)}
        self._roots = [weakref.ref(other) for other in self.roots if id(other) not in inner]
        self._roots.append(weakref.ref(root))
        stamp = self._next()
        for path, module in nn.Module.named_modules(root):
            self._paths[module] = path
            for parameter in nn.Module.parameters(module, recurse=False):  # Megatron's modules have attributes of these names
                self._owners[parameter] = path
                self._label(stamp, parameter, "parameter" if parameter.requires_grad else "frozen parameter", path)
            for buffer in nn.Module.buffers(module, recurse=False):
                self._label(stamp, buffer, "buffer", path)

    @staticmethod
    def _holds_device(module: nn.Module) -> bool:
        return any(parameter.is_cuda for parameter in nn.Module.parameters(module))

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.limit and self._counts.get(optimizer, 0) >= self.limit:
            self.stop()
        if self._leader is None:
            self._leader = weakref.ref(optimizer)
        stamp = self._next()
        if any(parameter.is_cuda for group in optimizer.param_groups for parameter in group["params"]):
            self._ends.setdefault(LOAD, stamp)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                path = self._owners.get(parameter, "")
                self._label(stamp, parameter, "parameter", path)
                self._label(stamp, parameter.grad, "gradient", path)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        count = self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        self.done = max(self.done, count)
        if self._leader is not None and self._leader() is optimizer:
            self._led = count
        stamp = self._next()
        for parameter, state in optimizer.state.items():
            path = self._owners.get(parameter, "") if isinstance(parameter, Tensor) else ""
            for value in pytree.tree_leaves(state):
                self._label(stamp, value, "optimizer state", path)
        self._ends[phase_of_step(self._led)] = stamp

    def _label(self, stamp: int, tensor: object, category: str, module: str = "") -> None:
        if not isinstance(tensor, Tensor):
            return
        with torch._C.DisableTorchFunction():
            for part in parts_of(tensor):
                if part.is_cuda and part.layout == torch.strided:
                    self.labels.append((stamp, part.untyped_storage().data_ptr(), category, module))

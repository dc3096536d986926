"""User-defined step, watched by hooks: its phases, and its blocks of parameters, gradients and optimizer state.

Sizer's own steps report these themselves. For a user's step, PyTorch's global hooks report them: modules register parameters
and buffers, autograd's engine runs or not, optimizers announce their steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from sizer.tape.tape import FROZEN
from sizer.tracing.meta.own_code import refuse_low_bits, refuse_paged
from sizer.tracing.recorder import Recorder


class StepWatcher:
    """Marks the phases of the first step and sets the categories of blocks, from the hooks' reports."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        # Weak references: a module that user code replaces (as adapters do) is freed, and its weights leave the device.
        self._modules: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
        self._start = 0
        self._forward = True

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Enable the hooks within the context."""
        module = torch.nn.modules.module
        with ExitStack() as stack:
            for handle in (
                module.register_module_parameter_registration_hook(self._registered),
                module.register_module_buffer_registration_hook(self._registered),
                module.register_module_module_registration_hook(self._registered),
                register_optimizer_step_pre_hook(self._before_optimizer),
                register_optimizer_step_post_hook(self._after_optimizer),
            ):
                stack.callback(handle.remove)
            stack.enter_context(mock.patch.object(self.recorder, "on_backward", self._backward_begins))
            yield

    def see(self, root: nn.Module) -> None:
        """Note a module that runs, and its parts. PyTorch does not register parameters of a copied or unpickled module."""
        if id(root) in self._modules:
            return
        for module in nn.Module.modules(root):
            self._modules[id(module)] = module
            self._classify(module)

    def loaded(self) -> None:
        """End the setup: tensors of modules are parameters and buffers, all other live blocks are inputs."""
        recorder = self.recorder
        for child in self._modules.values():
            recorder.place_deferred((*child._parameters.values(), *child._buffers.values()))
        for block in recorder.log.alive():
            if recorder.log.category(block) == "temporary":
                recorder.log.classify(block, "input")
        for child in self._modules.values():
            self._classify(child)
        for root in self.roots():
            recorder.paths.name(root)
        recorder.log.mark("load")

    def _classify(self, module: nn.Module) -> None:
        parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
        for category, trained in (("parameter", True), (FROZEN, False)):
            self.recorder.classify((one for one in parameters if one.requires_grad == trained), category)
        self.recorder.classify(module._buffers.values(), "buffer")

    def roots(self) -> list[nn.Module]:
        """Return the modules that are in no other module, in the order of their construction."""
        modules = list(self._modules.values())
        children = {id(child) for module in modules for child in module._modules.values()}
        return [module for module in modules if id(module) not in children]

    def begin_step(self) -> None:
        """Begin a step, before autograd's engine has run in it."""
        self._start = len(self.recorder.log.order)
        self._forward = True

    def end_step(self, phase: str) -> None:
        """End the step with `phase`; missing earlier phases are marked as empty before it."""
        if self._forward:
            self._end_forward()
        if phase != "step2":
            for earlier in ("forward", "backward", "optimizer"):
                self._mark_once(earlier)
        else:
            self.recorder.log.mark(phase)

    def _backward_begins(self) -> None:
        if self._forward:
            self._end_forward()

    def _end_forward(self) -> None:
        """Classify the live blocks of the step so far as activations."""
        self._forward = False
        self.recorder.log.keep_activations(self._start)
        self._mark_once("forward")

    def _mark_once(self, phase: str) -> None:
        if all(phase != marked for _, marked in self.recorder.log.marks):
            self.recorder.log.mark(phase)

    def _registered(self, module: nn.Module, name: str, value: Any) -> None:
        self._modules[id(module)] = module

    @contextmanager
    def low_bits_refused(self) -> Iterator[None]:
        """Raise TraceError if modules hold weights that bitsandbytes has yet to quantize when the context ends, or fails."""
        try:
            yield
        finally:
            for child in list(self._modules.values()):
                refuse_low_bits(child._parameters.values())

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        refuse_paged(optimizer)
        self._mark_once("backward")
        for group in optimizer.param_groups:
            self.recorder.classify(group["params"], "parameter")
            self.recorder.classify((p.grad for p in group["params"]), "gradient")

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for state in optimizer.state.values():
            self.recorder.classify((v for v in tree_leaves(state) if isinstance(v, torch.Tensor)), "optimizer state")

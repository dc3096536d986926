"""Offload activations to the host as TRL's trainers do, and the optimizer as torchao does.

Sources: trl/models/activation_offloading.py, torchao/optim/cpu_offload.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.util import find_spec

from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from sizer.base.errors import BuildError
from sizer.catalogue.recipes import OFFLOAD


class OffloadedActivations:
    """TRL's context for the forward and backward passes of a module, made in its first pass.

    `close` removes the hooks that TRL leaves on the module's head.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._hooks = module, ExitStack()
        self._context: saved_tensors_hooks | None = None

    def __call__(self) -> AbstractContextManager[object]:
        """Return the context of a pass."""
        if self._context is None:
            # As in TRL's trainers. PEFT imports bitsandbytes if it is installed, and TRL then empties the cache at each step.
            import peft  # noqa: F401
            from trl.models.activation_offloading import get_act_offloading_ctx_manager

            for part in self._module.modules():
                for hooks in (part._forward_pre_hooks, part._forward_hooks, part._forward_hooks_always_called):
                    self._hooks.callback(_restore(hooks))
            self._context = get_act_offloading_ctx_manager(self._module, warn_if_no_head=False)
            self._context.virtual_memory_safe_pct = 100  # it warns depending on the memory of the computer on which it runs
        return self._context

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.close()


def check_offloading(activations: str, *, of_optimizer: bool) -> None:
    """Raise BuildError if activations or the optimizer are offloaded, and the package that does it is not installed."""
    for asked, given, package in (
        (activations == OFFLOAD, f"activations={OFFLOAD}", "trl"),
        (of_optimizer, "optimizer_offload=1", "torchao"),
    ):
        if asked and find_spec(package) is None:
            raise BuildError(f"{package} is not installed", given=given, todo=f"pip install {package}")


@contextmanager
def hooks_removed(module: nn.Module) -> Iterator[None]:
    """Remove hooks of accumulated gradients that were added to a module's parameters within the context."""
    before = [(parameter, dict(parameter._post_accumulate_grad_hooks or {})) for parameter in module.parameters()]
    try:
        yield
    finally:
        for parameter, hooks in before:
            if (now := parameter._post_accumulate_grad_hooks) is not None:
                for added in now.keys() - hooks.keys():
                    del now[added]  # autograd has this dict: another one in its place would change nothing


def _restore(hooks: dict) -> Callable[[], None]:
    before = dict(hooks)

    def restore() -> None:
        hooks.clear()
        hooks.update(before)

    return restore

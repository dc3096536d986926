"""Optimizers as PyTorch makes them on a device: which implementation runs by default, and the fused one on meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

_OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 1e-3}),
    "sgd-momentum": ("SGD", {"lr": 1e-3, "momentum": 0.9}),
    "adam": ("Adam", {}),
    "adamw": ("AdamW", {}),
    "adafactor": ("Adafactor", {}),
    "rmsprop": ("RMSprop", {}),
    "adagrad": ("Adagrad", {}),
    "adadelta": ("Adadelta", {}),
    "adamax": ("Adamax", {}),
    "nadam": ("NAdam", {}),
    "radam": ("RAdam", {}),
    "muon": ("Muon", {}),
}
# torch/optim/_adafactor.py and _muon.py do not default to foreach on any device.
_LOOP_BY_DEFAULT = {"adafactor", "muon"}


class Optimizers:
    """Several optimizers that step as one: Muon takes matrices only, AdamW the rest, as its documentation advises."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    def zero_grad(self) -> None:
        """Drops the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def state_tensors(self) -> list[torch.Tensor]:
        """Every tensor that the optimizers keep between steps."""
        return [
            value
            for optimizer in self.optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]


def build_optimizers(name: str, implementation: str | None, module: nn.Module, kind: str) -> Optimizers:
    """The optimizers for a module's trainable parameters as they would be made on a device of this kind.

    Without an implementation, CUDA's default is foreach for all but Adafactor and Muon; the CPU's and MPS's is the loop.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    if name == "none" or not parameters:
        return Optimizers([])
    if name != "muon":
        return Optimizers([_one(name, implementation, parameters, kind)])
    matrices, rest = [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim != 2]
    made = [_one("muon", None, matrices, kind)] if matrices else []
    return Optimizers([*made, *([_one("adamw", implementation, rest, kind)] if rest else [])])


def _one(name: str, implementation: str | None, parameters: list[nn.Parameter], kind: str) -> torch.optim.Optimizer:
    class_name, options = _OPTIMIZERS[name]
    how: dict[str, Any] = {}
    if implementation == "fused":
        how = {"fused": True}
    elif name != "muon" and (implementation == "foreach" or (kind == "cuda" and name not in _LOOP_BY_DEFAULT)):
        how = {"foreach": implementation != "loop"}
    return getattr(torch.optim, class_name)(parameters, **options, **how)


@contextmanager
def fused_on_meta() -> Iterator[None]:
    """Within the context, `fused=True` accepts meta parameters; the kernels themselves allocate nothing.

    The fused kernels (aten/src/ATen/native/cuda/Fused*Kernel.cu) work in place and pack their pointers into kernel arguments.
    """

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    devices: Callable[[], list[str]] = lambda: ["meta", "cuda", "mps", "cpu", "xpu"]  # noqa: E731
    with ExitStack() as stack:
        stack.enter_context(mock.patch("torch.optim.optimizer._get_fused_kernels_supported_devices", devices))
        for kernel in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"):
            stack.enter_context(mock.patch.object(torch, kernel, nothing))
        yield

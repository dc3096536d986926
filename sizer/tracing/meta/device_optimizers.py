"""Optimizers as on a device: the default implementation, and the fused one on meta tensors."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from sizer.architecture.compile_later import answer, compiled_when_called, skipped
from sizer.catalogue.optimizers import OPTIMIZERS, PAGED_FROM


class Optimizers:
    """Several optimizers that step as one: Muon takes matrices only, AdamW the rest, as its documentation advises."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def state_tensors(self) -> list[torch.Tensor]:
        """Return every tensor that the optimizers keep between steps."""
        return [
            value
            for optimizer in self.optimizers
            for state in state_of(optimizer).values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]


def state_of(optimizer: torch.optim.Optimizer) -> Mapping[nn.Parameter, dict[str, object]]:
    """Return the state by parameter, also of an optimizer that wraps others: sharded over ranks, or offloaded."""
    if isinstance(own := getattr(optimizer, "optim_dict", None), dict):
        of_device = optimizer.d_opt.state if optimizer.d_opt is not None else {}
        return {**of_device, **{device: state for device, one in own.items() for state in one.state.values()}}
    return getattr(optimizer, "optim", optimizer).state


def build_optimizers(
    name: str, implementation: str | None, module: nn.Module, *, sharded: bool = False, offloaded: bool = False
) -> Optimizers:
    """Return the optimizers for a module's trainable parameters.

    Args:
        name: Name of the optimizer.
        implementation: Its implementation; None for PyTorch's choice, as on the device.
        module: The module.
        sharded: Whether the state is sharded over the ranks of a world (ZeroRedundancyOptimizer).
        offloaded: Whether the optimizers step on the host (torchao's CPUOffloadOptimizer).
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    return build_optimizers_of(name, implementation, trained, sharded=sharded, offloaded=offloaded)


def build_optimizers_of(
    name: str, implementation: str | None, parameters: list[nn.Parameter], *, sharded: bool = False, offloaded: bool = False
) -> Optimizers:
    """Return the optimizers of parameters, as `build_optimizers` does."""
    if name == "none" or not parameters:
        return Optimizers([])
    if name != "muon":
        return Optimizers([_one(name, implementation, parameters, sharded, offloaded)])
    matrices, rest = [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim != 2]
    made = [_one("muon", None, matrices, sharded)] if matrices else []
    return Optimizers([*made, *([_one("adamw", implementation, rest, sharded)] if rest else [])])


def _one(
    name: str, implementation: str | None, parameters: list[nn.Parameter], sharded: bool = False, offloaded: bool = False
) -> torch.optim.Optimizer:
    row = OPTIMIZERS[name]
    how = {None: {}, "loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}[implementation]
    assert row.class_name is not None, "it steps"
    with compiled_when_called():
        module = importlib.import_module(row.module)
    kind = getattr(module, row.class_name)
    if sharded:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(parameters, kind, **row.options, **how)
    if offloaded:
        from torchao.optim import CPUOffloadOptimizer

        return CPUOffloadOptimizer(parameters, kind, **row.options, **how)
    optimizer = kind(parameters, **row.options, **how)
    if row.paged_bytes:
        _keep_pages_apart(optimizer)
    if row.compiled and parameters[0].is_meta:
        _leave_uncompiled(optimizer)
    return optimizer


def _leave_uncompiled(optimizer: torch.optim.Optimizer) -> None:
    """Skip the compiled function of a torchao optimizer on meta: it works in place, on states created before it.

    torchao/optim/adam.py, 0.18: `step` creates the states, and calls `torch.compile(single_param_adam)` for each parameter.
    """
    step = optimizer.step

    def stepped(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(torch, "compile", lambda function, **options: _computes_nothing):
            return step(*args, **kwargs)

    optimizer.step = stepped


def _computes_nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, in place of a compiled function that writes its results to its arguments."""


def _keep_pages_apart(optimizer: torch.optim.Optimizer) -> None:
    """Keep managed memory of a paged bitsandbytes optimizer outside of PyTorch's allocator on meta too.

    bitsandbytes/functional.py, 0.50: `get_paged` calls the driver (cudaMallocManaged).
    """
    allocate = optimizer.get_state_buffer

    def get_state_buffer(parameter: nn.Parameter, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if not parameter.is_meta or parameter.numel() < PAGED_FROM:
            return allocate(parameter, dtype=dtype)
        with _disable_current_modes():
            return torch.empty(parameter.shape, dtype=dtype, device="meta")

    optimizer.get_state_buffer = get_state_buffer


# Modules that check whether an optimizer may keep its step counters on the device.
_CAPTURABLE = ("adadelta", "adam", "adamax", "asgd", "nadam", "optimizer", "radam", "rmsprop", "rprop")


@contextmanager
def optimizers_on(kind: str, offloads: Callable[[], bool]) -> Iterator[None]:
    """Make optimizers and clipping over meta tensors use the implementation of this kind of device within the context.

    They use the CPU's implementation once the parameters are `offloads()` on the host. `capturable=True` is allowed as on CUDA,
    where most default to foreach (torch/utils/_foreach_utils.py). `fused=True` is allowed: its kernels
    (aten/src/ATen/native/cuda/Fused*Kernel.cu) work in place, with their pointers in kernel arguments, and allocate nothing.
    """

    def foreach() -> list[str]:
        return ["cuda", "meta"] if kind == "cuda" and not offloads() else ["cuda"]

    clips = ["cuda"] if kind == "mps" else ["cuda", "meta"]  # torch.nn.utils.clip_grad, on the CPU too
    fused = ["meta", "cuda", "mps", "cpu", "xpu"]
    with ExitStack() as stack:
        for name, told in (
            ("torch.optim.optimizer._get_foreach_kernels_supported_devices", answer(["cuda"], foreach)),
            ("torch.utils._foreach_utils._get_foreach_kernels_supported_devices", answer(clips)),
            ("torch.optim.optimizer._get_fused_kernels_supported_devices", answer(fused)),
        ):
            stack.enter_context(mock.patch(name, told))
        for module in _CAPTURABLE:
            name = f"torch.optim.{module}._get_capturable_supported_devices"
            stack.enter_context(mock.patch(name, answer(["cuda", "meta"])))
        for kernel in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"):
            stack.enter_context(mock.patch.object(torch, kernel, skipped(getattr(torch, kernel))))
        yield

"""A module that trains together with frozen modules of the same program: a denoiser with encoders, a policy with a reference."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn


class WithFrozenParts(nn.Module):
    """A module that trains and the frozen modules on the same device. A call runs the module that trains.

    Each is a child by its name. `in_float32` are frozen modules that stay in float32 for any dtype.
    """

    def __init__(self, name: str, parts: Mapping[str, nn.Module], *, in_float32: Collection[str] = ()) -> None:
        super().__init__()
        self.trained_name, self.in_float32 = name, tuple(in_float32)
        for child, part in parts.items():
            self.add_module(child, part if child == name else part.requires_grad_(False).eval())

    @property
    def trained(self) -> nn.Module:
        """Return the module that trains."""
        return self.get_submodule(self.trained_name)

    def replace_trained(self, module: nn.Module) -> None:
        """Replace the module that trains, for example by an adapter around it."""
        self.add_module(self.trained_name, module)

    def frozen(self) -> dict[str, nn.Module]:
        """Return the frozen modules by name."""
        return {name: part for name, part in self.named_children() if name != self.trained_name}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module that trains."""
        return self.trained(*args, **kwargs)

    def train(self, mode: bool = True) -> WithFrozenParts:
        """Switch only the module that trains to training mode."""
        self.training = mode
        self.trained.train(mode)
        return self


def trained_part(module: nn.Module) -> nn.Module:
    """Return the module that trains, without frozen modules."""
    return module.trained if isinstance(module, WithFrozenParts) else module


class WithReference(nn.Module):
    """A policy that trains, and a frozen reference model with the same weights. A call runs the policy."""

    def __init__(self, policy: nn.Module, reference: nn.Module) -> None:
        super().__init__()
        self.policy, self.reference = policy, reference.requires_grad_(False).eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the policy."""
        return self.policy(*args, **kwargs)

    def train(self, mode: bool = True) -> WithReference:
        """Switch only the policy to training mode."""
        super().train(mode)
        self.reference.eval()
        return self


def policy_of(module: nn.Module) -> nn.Module:
    """Return the model that trains, without its reference."""
    return module.policy if isinstance(module, WithReference) else module


def reference_in(module: nn.Module) -> nn.Module | None:
    """Return the frozen reference of a policy, None if there is none."""
    return module.reference if isinstance(module, WithReference) else None


def inner(module: nn.Module) -> nn.Module:
    """Return the module that DDP is around; any other is itself."""
    return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module

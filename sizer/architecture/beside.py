"""A module that trains beside frozen modules of the same program: a denoiser beside encoders, a policy beside a reference."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn


class WithFrozenParts(nn.Module):
    """A module that trains and the frozen modules on the same device. Called, it is the module that trains.

    Each is a child by its name. `in_float32` are frozen modules that stay in float32 whatever the dtype.
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
        """Put another module, such as an adapter around it, in the place of the one that trains."""
        self.add_module(self.trained_name, module)

    def frozen(self) -> dict[str, nn.Module]:
        """Return the frozen modules by name."""
        return {name: part for name, part in self.named_children() if name != self.trained_name}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module that trains."""
        return self.trained(*args, **kwargs)

    def train(self, mode: bool = True) -> WithFrozenParts:
        """Switch the module that trains alone to training mode."""
        self.training = mode
        self.trained.train(mode)
        return self


def trained_part(module: nn.Module) -> nn.Module:
    """Return the module that trains, without frozen ones beside it."""
    return module.trained if isinstance(module, WithFrozenParts) else module


class WithReference(nn.Module):
    """A policy that trains, and a frozen model of the same weights beside it. Called, it is the policy."""

    def __init__(self, policy: nn.Module, reference: nn.Module) -> None:
        super().__init__()
        self.policy, self.reference = policy, reference.requires_grad_(False).eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the policy."""
        return self.policy(*args, **kwargs)

    def train(self, mode: bool = True) -> WithReference:
        """Switch the policy alone to training mode."""
        super().train(mode)
        self.reference.eval()
        return self


def policy_of(module: nn.Module) -> nn.Module:
    """Return the model that trains, without the reference beside it."""
    return module.policy if isinstance(module, WithReference) else module


def reference_in(module: nn.Module) -> nn.Module | None:
    """Return the frozen model beside a policy, None if there is none."""
    return module.reference if isinstance(module, WithReference) else None


def inner(module: nn.Module) -> nn.Module:
    """Return the module that DDP is around; any other is itself."""
    return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module

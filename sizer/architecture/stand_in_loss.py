"""The loss of a module that has none of its own."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from sizer.base.errors import TraceError


def stand_in_loss(outputs: object, module: nn.Module) -> Tensor:
    """The sum of the means of every float tensor in the module's outputs that has a gradient, a scalar.

    Raises TraceError where there is none.
    """
    means = [tensor.float().mean() for tensor in _tensors(outputs) if tensor.requires_grad]
    if not means:
        raise TraceError(no_gradient(module))
    return torch.stack(means).sum()


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def no_gradient(module: nn.Module) -> str:
    """Why the outputs of a module that was run for training hold no tensor with a gradient."""
    name = type(module).__name__
    frozen = [not parameter.requires_grad for parameter in module.parameters()]
    if frozen and all(frozen):
        return f"all weights of {name} are frozen, so that no step can train it; mode=inference can be estimated"
    return f"the outputs of {name} hold no tensor with a gradient, so that nothing trains it; mode=inference can be estimated"

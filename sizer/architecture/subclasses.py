"""Tensors inside tensors: what a wrapper subclass (torchao's and quanto's weights are) really holds."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that hold a tensor's bytes: those inside a traceable wrapper subclass, however deep, else itself.

    Under `torch.func.grad`, `vmap` and their kin a tensor stands for the one that it wraps.
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for part in (getattr(tensor, name) for name in names):
        if isinstance(part, Tensor):  # a DTensor names its mesh among them since PyTorch 2.15
            yield from parts_of(part)

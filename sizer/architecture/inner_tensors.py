"""The inner tensors of wrapper subclasses (torchao's and quanto's weights) and of transformers' caches.

transformers is not imported here: a cache exists only if other code has imported it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors with a tensor's bytes: those inside a traceable wrapper subclass, at any depth, else itself.

    Under `torch.func.grad`, `vmap` and similar, a tensor represents the tensor that it wraps. A lazy module's parameter yields
    nothing before the module runs.
    """
    if is_lazy(tensor):
        return
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for part in (getattr(tensor, name) for name in names):
        if isinstance(part, Tensor):  # a DTensor names its mesh among them since PyTorch 2.15
            yield from parts_of(part)


# -------------------------------------------------------------------------------------------------------------- caches


def cache_tensors(cache: object) -> list[Tensor]:
    """Return the tensors of a cache, layer by layer; for an encoder-decoder those of both caches."""
    return [part for tensor in _tensors(cache, set()) for part in parts_of(tensor)]


def _tensors(value: object, seen: set[int]) -> Iterator[Tensor]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, seen)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, seen)
    elif type(value).__module__.startswith("transformers.") and not isinstance(value, (nn.Module, type)):
        for item in vars(value).values():
            yield from _tensors(item, seen)

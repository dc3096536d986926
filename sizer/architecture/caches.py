"""The tensors of transformers' caches. transformers is not imported here: a cache exists only if somebody else has done that."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from sizer.architecture.subclasses import parts_of


def cache_tensors(cache: object) -> list[Tensor]:
    """The tensors that a cache holds, layer by layer; of the caches of an encoder-decoder those of both."""
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

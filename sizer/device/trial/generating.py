"""A generation on a device: transformers' own `generate`, the very one that is traced, and what lives there with its tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sizer.architecture.blueprint import Example
from sizer.architecture.caches import cache_tensors
from sizer.architecture.generation import check_cache, generate
from sizer.tracing.steps import Work, autocast, mover, place, weight_dtype

# Told the number of tokens that each sequence has got, from 1, the inputs on the device and the tensors of the cache.
OnToken = Callable[[int, Example, list[Tensor]], None]


def generate_on(module: nn.Module, example: Example, work: Work, device: torch.device, on_token: OnToken) -> None:
    """Generate the tokens of `work` with a module that is on `device`. Raises RequestError where it has no such cache."""
    check_cache(module, work.cache)
    placed = place(example, weight_dtype(work.dtype), mover(device))

    def told(number: int, cache: object) -> bool:
        if number:
            on_token(number, placed, cache_tensors(cache))
        return number < work.new

    with torch.no_grad(), autocast(device.type, work.dtype)():
        generate(module.eval(), placed, new=work.new, cache=work.cache, on_token=told)

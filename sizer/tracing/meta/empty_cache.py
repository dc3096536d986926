"""Calls that give the allocator's free memory back to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

# The modules whose `empty_cache` empties the cache of a kind of device. The CPU's allocator has none.
_MODULES = {"cuda": (torch.cuda, torch.xpu, torch.accelerator), "mps": (torch.mps, torch.accelerator), "cpu": ()}


@contextmanager
def emptied_caches_seen(kind: str, seen: Callable[[], None]) -> Iterator[None]:
    """Within the context `torch.cuda.empty_cache()` and its like call `seen`, on a machine without such a device, too."""
    with ExitStack() as stack:
        for module in _MODULES[kind]:
            stack.enter_context(mock.patch.object(module, "empty_cache", seen))
        yield

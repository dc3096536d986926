"""Events that a trace notes although no dispatch mode sees them: resized storages, released caches, DDP's buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from sizer.tracing.log import BlockLog


@contextmanager
def resizes_seen(seen: Callable[[torch.UntypedStorage, int], None]) -> Iterator[None]:
    """Call `seen` with every resized storage on meta, and its bytes before, within the context."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        before = storage.nbytes()
        out = resize(storage, size)
        if storage.device.type == "meta":
            seen(storage, before)
        return out

    with mock.patch.object(torch.UntypedStorage, "resize_", resize_):
        yield


# --------------------------------------------------------------------------------------------------------- empty cache


# Modules with an `empty_cache` for the cache of a kind of device. The CPU's allocator has none.
_MODULES = {"cuda": (torch.cuda, torch.xpu, torch.accelerator), "mps": (torch.mps, torch.accelerator), "cpu": ()}


@contextmanager
def emptied_caches_seen(kind: str, seen: Callable[[], None]) -> Iterator[None]:
    """Make `torch.cuda.empty_cache()` and similar functions call `seen` within the context, also without such a device."""
    with ExitStack() as stack:
        for module in _MODULES[kind]:
            stack.enter_context(mock.patch.object(module, "empty_cache", seen))
        yield


# ------------------------------------------------------------------------------------------------------------- buckets


@contextmanager
def buckets_seen(log: BlockLog) -> Iterator[None]:
    """Classify the memory of DDP's reducers as workspace within the context: buckets, created twice.

    They are created with the reducer and again after the first pass.
    Source: torch/csrc/distributed/c10d/reducer.cpp (initialize_buckets), PyTorch 2.11 and 2.15.
    """
    if not dist.is_available():
        yield
        return

    @contextmanager
    def held() -> Iterator[None]:
        start = len(log.order)
        yield
        for block in log.alive(start):
            log.classify(block, "workspace")

    class Reducer(dist.Reducer):
        """PyTorch's reducer, with buckets classified as workspace."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with held():
                super().__init__(*args, **kwargs)

        def _rebuild_buckets(self) -> bool:
            with held():
                log.telling = False  # ranks agree on the order only once
                try:
                    return super()._rebuild_buckets()
                finally:
                    log.telling = True

    with mock.patch.object(dist, "Reducer", Reducer):
        yield

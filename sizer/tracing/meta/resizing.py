"""Storages that change their size: `UntypedStorage.resize_` is no operator, so that no dispatch mode sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def resizes_seen(seen: Callable[[torch.UntypedStorage, int], None]) -> Iterator[None]:
    """Within the context `seen` is told of every storage on meta that was resized, with the bytes that it had before."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        before = storage.nbytes()
        out = resize(storage, size)
        if storage.device.type == "meta":
            seen(storage, before)
        return out

    with mock.patch.object(torch.UntypedStorage, "resize_", resize_):
        yield

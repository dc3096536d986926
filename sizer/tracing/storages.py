"""Which block of the log each storage has: from when it is first seen until it dies, which a weak reference tells at once."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from sizer.memory.tape import RESIZE
from sizer.tracing.log import BlockLog


class Storages:
    """The storages that live on the device, each with its block of a log, which is released when its storage dies."""

    def __init__(self, log: BlockLog) -> None:
        self._log = log
        self._live: dict[int, tuple[int, weakref.ref]] = {}
        self._emptied: set[int] = set()  # of these those that were resized to 0 bytes: their blocks are released

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._live

    def block_of(self, tensor: Tensor) -> int | None:
        """The block that holds the tensor, or None if it was never logged."""
        entry = self._live.get(tensor.untyped_storage()._cdata)
        return entry[0] if entry else None

    def follow(self, storage: torch.UntypedStorage, block: int) -> None:
        """Have a block released when its storage dies."""
        key = storage._cdata
        self._live[key] = (block, weakref.ref(storage, lambda _: self._died(key, block)))

    def leave(self, tensor: Tensor) -> None:
        """Log that the device no longer has what a tensor holds, which goes on living."""
        if (entry := self._live.pop(tensor.untyped_storage()._cdata, None)) is not None:
            self._log.release(entry[0])

    def resize(self, storage: torch.UntypedStorage, before: int, where: str) -> tuple[int, int] | None:
        """Log that a storage had `before` bytes and has others: it gets a new block, then its old one is released.

        `where` is the module at work. Returns the old block and the new one, None where there is no new one.
        """
        key, after = storage._cdata, storage.nbytes()
        if key not in self._live or before == after:
            return None
        block, new = self._live[key][0], None
        if after:
            self._emptied.discard(key)
            new = self._log.allocate(after, RESIZE, where, self._log.category(block))
            self.follow(storage, new)
        if before:
            self._log.release(block)
        if not after:
            self._emptied.add(key)
        return None if new is None else (block, new)

    def _died(self, key: int, block: int) -> None:
        if self._live.pop(key, None) is None:
            return
        if key in self._emptied:
            self._emptied.discard(key)
        else:
            self._log.release(block)

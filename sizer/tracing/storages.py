"""Which block of the log each storage has: from when it is first seen until it dies, which a weak reference tells at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from sizer.tape.tape import RESIZE
from sizer.tracing.log import BlockLog


class Storages:
    """The storages that live on the device, each with its block of a log, which is released when its storage dies."""

    def __init__(self, log: BlockLog) -> None:
        self._log = log
        self.overwritten: dict[int, str] = {}  # by `_cdata`, the error of who reads a storage whose memory is another's now
        self._live: dict[int, tuple[int, weakref.ref]] = {}
        # Of these those whose blocks are released: they were resized to 0 bytes, or their memory is not theirs.
        self._emptied: set[int] = set()

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._live

    def block_of(self, tensor: Tensor) -> int | None:
        """The block that holds the tensor, or None if it was never logged."""
        return self.block_in(tensor.untyped_storage())

    def block_in(self, storage: torch.UntypedStorage) -> int | None:
        """The block of a storage, or None if it was never logged."""
        entry = self._live.get(storage._cdata)
        return entry[0] if entry else None

    def follow(self, storage: torch.UntypedStorage, block: int) -> None:
        """Have a block released when its storage dies."""
        key = storage._cdata
        self._live[key] = (block, weakref.ref(storage, lambda _: self._died(key, block)))

    def follow_unowned(self, storage: torch.UntypedStorage, block: int) -> None:
        """Take a storage for what a block holds that is released elsewhere, or was."""
        self.follow(storage, block)
        self._emptied.add(storage._cdata)

    def owns(self, key: int) -> bool:
        """Return True if the storage with this `_cdata` has a block of its own."""
        return key in self._live and key not in self._emptied

    def release_early(self, key: int) -> None:
        """Log that the storage with this `_cdata` has no memory any more; it goes on living."""
        if self.owns(key):
            self._emptied.add(key)
            self._log.release(self._live[key][0])

    def own(self, key: int, block_of: Callable[[torch.UntypedStorage], int]) -> None:
        """Have the storage with this `_cdata` own a block from here on, unless it owns one."""
        if key in self._emptied and (storage := self._live[key][1]()) is not None:
            self._emptied.discard(key)
            self.follow(storage, block_of(storage))

    def check_readable(self, tensors: Iterable[Tensor | None]) -> None:
        """Raise RuntimeError, as PyTorch does, if a tensor's memory is another's now."""
        for tensor in tensors:
            if tensor is not None and (message := self.overwritten.get(tensor.untyped_storage()._cdata)):
                raise RuntimeError(message)

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
        self.overwritten.pop(key, None)
        if self._live.pop(key, None) is None:
            return
        if key in self._emptied:
            self._emptied.discard(key)
        else:
            self._log.release(block)

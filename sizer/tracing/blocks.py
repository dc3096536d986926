"""Blocks of the log: which block each storage has, and what kernels hold beside their results.

Which block of the log each storage has: from when it is first seen until it dies, which a weak reference tells at once.

What kernels hold beside their results, in the log around the operator that calls them, and what cuBLAS keeps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from sizer.tape.size_queries import Asked
from sizer.tape.tape import RESIZE
from sizer.tracing.allocations import PRODUCT
from sizer.tracing.log import BlockLog, DeferredSize
from sizer.tracing.modules import ModulePaths


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


# ---------------------------------------------------------------------------------------------------------- workspaces


class Workspaces:
    """Logs the workspaces of operators, each under the operator's name and the module at work.

    `product` is what cuBLAS takes for a product within a kernel, in bytes, or None where no library multiplies; `kept` says whether
    it keeps that from a thread's first product on.
    """

    def __init__(self, log: BlockLog, paths: ModulePaths, *, product: int | None, kept: bool) -> None:
        self._log, self._paths = log, paths
        self._product, self._keeps = product or 0, kept
        self._kept: set[tuple[bool, int, int]] = set()  # by whether it is autograd's thread, bytes, and stream
        self._of_libraries: set[str] = set()  # kinds of what libraries keep
        self._tried: set[tuple[bool, Asked]] = set()  # by whether it is autograd's thread

    def set_product(self, size: int) -> None:
        """Set what cuBLAS takes for a product within a kernel, in bytes."""
        self._product = size

    def allocate(self, name: str, sizes: Iterable[int]) -> list[int]:
        """New blocks of workspace; none for 0 bytes unless a size query decides them later."""
        where = self._paths.current()
        return [self._log.allocate(s, name, where, "workspace") for s in sizes if s or isinstance(s, DeferredSize)]

    def hold(self, name: str, sizes: Iterable[int | tuple[DeferredSize]]) -> None:
        """Log a kernel's inner workspaces: all allocated, then all released but what cuBLAS keeps from its first product on."""
        blocks: list[int] = []
        for size in sizes:
            if isinstance(size, tuple):
                self._try(name, *size)
            elif size == PRODUCT and self._keeps:
                self._keep(name, (self._product,))
            else:
                blocks += self.allocate(name, (self._product if size == PRODUCT else size,))
        self.release(blocks)

    def multiply(self, name: str, called: Iterable[int], kept: Iterable[int]) -> None:
        """Log what a matrix product holds beside its result: for the time of the call (`called`), or from the first product of a
        thread (the caller's, autograd's) on (`kept`)."""
        blocks = self.allocate(name, called)
        self._keep(name, kept)
        self.release(blocks)

    def release(self, blocks: list[int]) -> None:
        """Log that blocks are free, the last first."""
        for block in reversed(blocks):
            self._log.release(block)

    def _try(self, name: str, size: DeferredSize) -> None:
        """Log a workspace that is released with all of the cache, the first time that a thread asks for it.

        Source: BenchmarkCache and run_single_conv, aten/src/ATen/native/cudnn/Conv_v8.cpp (2.15).
        """
        asked = (torch._C._current_graph_task_id() != -1, (size.kind, size.words, size.numbers))
        if asked not in self._tried:
            self._tried.add(asked)
            self.release(self.allocate(name, (size,)))
            self.empty_cache()

    def keep(self, name: str, size: DeferredSize) -> None:
        """Log what a library keeps from its first call on, for all threads and streams."""
        if size.kind not in self._of_libraries:
            self._of_libraries.add(size.kind)
            self.allocate(name, (size,))

    def empty_cache(self) -> None:
        """Log that the allocator returns what it caches."""
        self._log.empty_cache(self._paths.current())

    def _keep(self, name: str, sizes: Iterable[int]) -> None:
        """Log cuBLAS's workspaces that stay from a thread's first product on a stream on."""
        thread = torch._C._current_graph_task_id() != -1
        for size in sizes:
            if (thread, size, self._log.stream) not in self._kept:
                self._kept.add((thread, size, self._log.stream))
                self._log.allocate(size, name, self._paths.current(), "workspace")

"""Blocks of the log: the block of each storage, and workspaces of kernels.

A storage has its block from its first use until it is freed, which a weak reference reports at once. Workspaces are logged
around the operator that uses them; cuBLAS's kept workspaces are never released.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from sizer.tape.size_queries import SizeQueryKey
from sizer.tape.tape import RESIZE
from sizer.tracing.allocations import PRODUCT
from sizer.tracing.log import BlockLog, DeferredSize
from sizer.tracing.modules import ModulePaths


class Storages:
    """Live storages of the device, each with its block of a log. The block is released when its storage is freed."""

    def __init__(self, log: BlockLog) -> None:
        self._log = log
        # by `_cdata`, the error for reading a storage with memory that another storage uses now
        self.overwritten: dict[int, str] = {}
        self._live: dict[int, tuple[int, weakref.ref]] = {}
        # Storages with released blocks: they were resized to 0 bytes, or their memory belongs to others.
        self._emptied: set[int] = set()

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._live

    def block_of(self, tensor: Tensor) -> int | None:
        """Return the block that holds the tensor, or None if it was never logged."""
        return self.block_in(tensor.untyped_storage())

    def block_in(self, storage: torch.UntypedStorage) -> int | None:
        """Return the block of a storage, or None if it was never logged."""
        entry = self._live.get(storage._cdata)
        return entry[0] if entry else None

    def follow(self, storage: torch.UntypedStorage, block: int) -> None:
        """Release a block when its storage is freed."""
        key = storage._cdata
        self._live[key] = (block, weakref.ref(storage, lambda _: self._died(key, block)))

    def follow_unowned(self, storage: torch.UntypedStorage, block: int) -> None:
        """Assign a storage to a block that is or was released elsewhere."""
        self.follow(storage, block)
        self._emptied.add(storage._cdata)

    def owns(self, key: int) -> bool:
        """Return True if the storage with this `_cdata` has a block of its own."""
        return key in self._live and key not in self._emptied

    def release_early(self, key: int) -> None:
        """Log that the storage with this `_cdata` has no memory any more; the storage itself stays alive."""
        if self.owns(key):
            self._emptied.add(key)
            self._log.release(self._live[key][0])

    def own(self, key: int, block_of: Callable[[torch.UntypedStorage], int]) -> None:
        """Give the storage with this `_cdata` a block from here on, unless it owns one."""
        if key in self._emptied and (storage := self._live[key][1]()) is not None:
            self._emptied.discard(key)
            self.follow(storage, block_of(storage))

    def check_readable(self, tensors: Iterable[Tensor | None]) -> None:
        """Raise RuntimeError, as PyTorch does, if a tensor's memory is used by another storage now."""
        for tensor in tensors:
            if tensor is not None and (message := self.overwritten.get(tensor.untyped_storage()._cdata)):
                raise RuntimeError(message)

    def forget(self, storage: torch.UntypedStorage) -> None:
        """Forget a storage with a block that was logged as released."""
        self._live.pop(storage._cdata, None)

    def leave(self, tensor: Tensor) -> None:
        """Log that a tensor's memory has left the device; the tensor itself stays alive."""
        if (entry := self._live.pop(tensor.untyped_storage()._cdata, None)) is not None:
            self._log.release(entry[0])

    def resize(self, storage: torch.UntypedStorage, before: int, where: str) -> tuple[int, int] | None:
        """Log that a storage of `before` bytes was resized: it gets a new block, then its old one is released.

        `where` is the current module. Returns the old block and the new one, None if there is no new one.
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
    """Logs the workspaces of operators, each under the operator's name and the current module.

    `product` is cuBLAS's workspace for a product within a kernel, in bytes, or None if no library multiplies; `kept` says
    whether cuBLAS keeps it from a thread's first product on.
    """

    def __init__(self, log: BlockLog, paths: ModulePaths, *, product: int | None, kept: bool) -> None:
        self._log, self._paths = log, paths
        self._product, self._keeps = product or 0, kept
        self._kept: set[tuple[bool, int, int]] = set()  # by whether it is autograd's thread, bytes, and stream
        self._of_libraries: set[str] = set()  # kinds of memory that libraries keep
        self._tried: set[tuple[bool, SizeQueryKey]] = set()  # by whether it is autograd's thread

    def set_product(self, size: int) -> None:
        """Set cuBLAS's workspace for a product within a kernel, in bytes."""
        self._product = size

    def allocate(self, name: str, sizes: Iterable[int]) -> list[int]:
        """Return new blocks of workspace; none for 0 bytes unless a size query determines them later."""
        where = self._paths.current()
        return [self._log.allocate(s, name, where, "workspace") for s in sizes if s or isinstance(s, DeferredSize)]

    def hold(self, name: str, sizes: Iterable[int | tuple[DeferredSize]]) -> None:
        """Log a kernel's inner workspaces: all allocated, then all released, except cuBLAS's kept workspace."""
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
        """Log the workspaces of a matrix product: for the time of the call (`called`), or kept (`kept`).

        Kept workspaces last from the first product of a thread on: the caller's thread, or autograd's.
        """
        blocks = self.allocate(name, called)
        self._keep(name, kept)
        self.release(blocks)

    def release(self, blocks: list[int]) -> None:
        """Log that blocks are free, the last first."""
        for block in reversed(blocks):
            self._log.release(block)

    def _try(self, name: str, size: DeferredSize) -> None:
        """Log a workspace that is released together with the whole cache, the first time that a thread requests it.

        Source: BenchmarkCache and run_single_conv, aten/src/ATen/native/cudnn/Conv_v8.cpp (2.15).
        """
        asked = (torch._C._current_graph_task_id() != -1, (size.kind, size.words, size.numbers))
        if asked not in self._tried:
            self._tried.add(asked)
            self.release(self.allocate(name, (size,)))
            self.empty_cache()

    def keep(self, name: str, size: DeferredSize) -> None:
        """Log memory that a library keeps from its first call on, for all threads and streams."""
        if size.kind not in self._of_libraries:
            self._of_libraries.add(size.kind)
            self.allocate(name, (size,))

    def empty_cache(self) -> None:
        """Log that the allocator releases its cached memory."""
        self._log.empty_cache(self._paths.current())

    def _keep(self, name: str, sizes: Iterable[int]) -> None:
        """Log cuBLAS's kept workspaces, at a thread's first product on a stream."""
        thread = torch._C._current_graph_task_id() != -1
        for size in sizes:
            if (thread, size, self._log.stream) not in self._kept:
                self._kept.add((thread, size, self._log.stream))
                self._log.allocate(size, name, self._paths.current(), "workspace")

"""What kernels hold beside their results, in the log around the operator that calls them, and what cuBLAS keeps."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sizer.tape.size_queries import Asked
from sizer.tape.tape import EMPTY_CACHE
from sizer.tracing.allocations import PRODUCT
from sizer.tracing.log import BlockLog, DeferredSize
from sizer.tracing.modules import ModulePaths


class Workspaces:
    """Logs the workspaces of operators, each under the operator's name and the module at work.

    `product` is what cuBLAS takes for a product within a kernel, in bytes, or None where no library multiplies; `kept` says whether
    it keeps that from a thread's first product on.
    """

    def __init__(self, log: BlockLog, paths: ModulePaths, *, product: int | None, kept: bool) -> None:
        self._log, self._paths = log, paths
        self._product, self._keeps = product or 0, kept
        self._kept: set[tuple[bool, int, int]] = set()  # by whether it is autograd's thread, bytes, and stream
        self._tried: set[tuple[bool, Asked]] = set()  # by whether it is autograd's thread

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

    def empty_cache(self) -> None:
        """Log that the allocator returns what it caches."""
        self._log.release(self._log.allocate(0, EMPTY_CACHE, self._paths.current(), "workspace"))

    def _keep(self, name: str, sizes: Iterable[int]) -> None:
        """Log cuBLAS's workspaces that stay from a thread's first product on a stream on."""
        thread = torch._C._current_graph_task_id() != -1
        for size in sizes:
            if (thread, size, self._log.stream) not in self._kept:
                self._kept.add((thread, size, self._log.stream))
                self._log.allocate(size, name, self._paths.current(), "workspace")

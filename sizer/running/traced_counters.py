"""PyTorch's memory counters on route meta: when the script reads them, the allocations so far are replayed. Imports torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

from sizer.allocator.allocator import replay_events
from sizer.catalogue.gpus import Gpu
from sizer.distributed.described_gpus import statistics
from sizer.tape.size_queries import SizeOracle
from sizer.tracing.log import BlockLog

_COUNTERS = ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes")


class TracedCounters:
    """The bytes allocated and reserved, now and at the peak since the script's last reset."""

    def __init__(self, log: BlockLog, gpu: Gpu, oracle: SizeOracle | None) -> None:
        """Read a GPU's log of blocks; the oracle resolves their sizes."""
        self._log, self._gpu, self._oracle = log, gpu, oracle
        conf = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
        self._expandable = "expandable_segments:True" in conf
        self._from = 0  # position in the log of the last reset
        self._read = -1  # position that `_found` is of
        self._found = (np.zeros(1, np.int64), np.zeros(1, np.int64))

    def stats(self, device: Any = None) -> dict[str, int]:
        """Stand in for torch.cuda.memory_stats. Other counters are 0."""
        allocated, reserved = self._levels()
        found = statistics()
        for name in _COUNTERS:
            levels = reserved if name == "reserved_bytes" else allocated
            rises = np.maximum(np.diff(levels), 0).sum()
            found[f"{name}.all.current"] = int(levels[-1])
            found[f"{name}.all.peak"] = int(levels[min(self._from, len(levels) - 1) :].max())
            found[f"{name}.all.allocated"] = int(rises)
            found[f"{name}.all.freed"] = int(rises - levels[-1])
        return found

    def in_use(self) -> tuple[int, int]:
        """Return the bytes allocated and reserved now."""
        allocated, reserved = self._levels()
        return int(allocated[-1]), int(reserved[-1])

    def nested(self, device: Any = None) -> dict[str, Any]:
        """Stand in for torch.cuda.memory_stats_as_nested_dict."""
        found: dict[str, Any] = {}
        for name, value in self.stats().items():
            *outer, last = name.split(".")
            place = found
            for part in outer:
                place = place.setdefault(part, {})
            place[last] = value
        return found

    def reset_peak(self, device: Any = None) -> None:
        """Stand in for torch.cuda.reset_peak_memory_stats."""
        self._from = len(self._log.order)

    def free_and_total(self, device: Any = None) -> tuple[int, int]:
        """Stand in for torch.cuda.mem_get_info."""
        total = self._gpu.total_bytes
        return max(0, total - self._gpu.context_bytes - int(self._levels()[1][-1])), total

    def _levels(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes allocated and reserved before the first event and after each."""
        position = len(self._log.order)
        if position and position != self._read:
            tape = self._log.tape_so_far().resolve(self._oracle)
            done = replay_events(tape, self._gpu.backend, None, self._expandable)
            self._read = position
            self._found = (np.concatenate(([0], np.cumsum(done.changes))), np.concatenate(([0], done.reserved)))
        return self._found

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Make torch.cuda and torch.accelerator answer with these counters, within the context."""
        answers: dict[str, Any] = {
            "memory_stats": self.stats,
            "memory_stats_as_nested_dict": self.nested,
            "mem_get_info": self.free_and_total,
            **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"), self.reset_peak),
        }
        of_accelerators = {name: answers[name] for name in ("memory_stats", "reset_peak_memory_stats")}
        with ExitStack() as stack:
            for module in (torch.cuda, torch.cuda.memory):
                stack.enter_context(mock.patch.multiple(module, **answers, memory_summary=_SUMMARY))
            for module in (torch.accelerator, torch.accelerator.memory):
                stack.enter_context(mock.patch.multiple(module, **of_accelerators))
            yield


_SUMMARY = torch.cuda.memory.memory_summary

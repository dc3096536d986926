"""PyTorch's memory counters on route meta: when the script reads them, the allocations so far are replayed. Imports torch.

They are torch.cuda's, and torch.mps as it answers on a Mac, for a script that is traced elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest import mock

import numpy as np
import torch

from sizer.allocator.allocator import replay_events
from sizer.base.errors import TraceError
from sizer.catalogue.gpus import Gpu
from sizer.distributed.described_gpus import Generator, statistics
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


class _Queue:
    """Stand in for torch.mps.Event and torch.mps.Stream: all work is complete, and took no time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make one."""

    def _nothing(self, *args: Any) -> None:
        """Return at once."""

    record = wait = synchronize = wait_event = wait_stream = __exit__ = _nothing

    def __enter__(self) -> _Queue:
        return self

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def is_capturing(self) -> bool:
        """Return False: a chip of Apple's has no graphs to capture."""
        return False

    def elapsed_time(self, end_event: _Queue) -> float:
        """Return the milliseconds up to another event."""
        return 0.0

    def record_event(self, event: _Queue | None = None) -> _Queue:
        """Return the event that was given, or a new one."""
        return event or _Queue()


@contextmanager
def mps_answers(gpu: Gpu, counters: TracedCounters) -> Iterator[None]:
    """Make torch.mps, its backend and torch.accelerator answer for an Apple chip without CUDA, within the context.

    Memory in use is that of the counters. `recommended_max_memory` is the memory of the catalogue, in bytes.
    """

    def nothing(*args: Any, **kwargs: Any) -> None:
        """Return at once."""

    def refused(name: str) -> Callable[..., NoReturn]:
        def called(*args: Any, **kwargs: Any) -> NoReturn:
            raise TraceError(f"torch.mps.{name} is not traced", given="a call of it", allowed="PyTorch's own operators")

        return called

    of_mps: dict[str, Any] = {
        **dict.fromkeys(("synchronize", "manual_seed", "seed", "set_rng_state", "set_per_process_memory_fraction"), nothing),
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_rng_state": lambda: torch.zeros(16, dtype=torch.uint8, device="cpu"),
        "current_allocated_memory": lambda: counters.in_use()[0],
        "driver_allocated_memory": lambda: counters.in_use()[1],
        "recommended_max_memory": lambda: gpu.total_bytes,
        **dict.fromkeys(("Event", "Stream", "stream", "current_stream", "default_stream"), _Queue),
        "set_stream": nothing,
        "compile_shader": refused("compile_shader"),
    }
    of_accelerators: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        **dict.fromkeys(("synchronize", "set_stream"), nothing),
        "current_stream": _Queue,
        "get_memory_info": lambda device=None: (gpu.total_bytes - counters.in_use()[1], gpu.total_bytes),
        **dict.fromkeys(("current_device_index", "current_device_idx"), lambda: 0),
        **dict.fromkeys(("set_device_index", "set_device_idx"), nothing),
    }
    of_backend: dict[str, Any] = dict.fromkeys(("is_available", "is_built", "is_macos13_or_newer"), lambda *args: True)
    of_cuda: dict[str, Any] = {"is_available": lambda: False, "device_count": lambda: 0}
    places = (torch.mps, of_mps), (torch.accelerator, of_accelerators), (torch.backends.mps, of_backend), (torch.cuda, of_cuda)
    with ExitStack() as stack:
        for module, answers in places:
            for name in answers.keys() & vars(module).keys():
                stack.enter_context(mock.patch.object(module, name, answers[name]))
        stack.enter_context(mock.patch.object(torch, "Generator", Generator))
        yield

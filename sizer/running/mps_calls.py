"""torch.mps as it answers on a Mac, for a script that is traced elsewhere. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest import mock

import torch

from sizer.base.errors import TraceError
from sizer.catalogue.gpus import Gpu
from sizer.distributed.described_gpus import Generator
from sizer.running.traced_counters import TracedCounters


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

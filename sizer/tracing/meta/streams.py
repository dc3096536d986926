"""Streams where there is no device: a trace runs everything in one order, and notes for which stream each block is allocated.

`torch.Stream()` and `torch.cuda.current_stream()` ask the driver, which a machine without a GPU does not have. What stands in for
them waits for nothing: what another stream was asked for is done. CUDA's allocator keeps the blocks of its streams apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any, ClassVar
from unittest import mock

import torch

from sizer.tracing.log import BlockLog

# c10/cuda/CUDAStream.cpp (kStreamsPerPoolBits, max_compile_time_stream_priorities), PyTorch 2.6 to 2.15: new streams of a priority
# are taken in turn from a pool of so many.
PER_PRIORITY, PRIORITIES = 32, 4

BACKWARD = "the backward pass of what ran on a second stream was taken to run on the stream that asked for it"


class Event:
    """An event that has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> Event:
        """This event."""
        return self

    def wait(self, stream: Any = None) -> None:
        """Wait for nothing."""

    def synchronize(self) -> None:
        """Wait for nothing."""

    def query(self) -> bool:
        """Whether it has happened: always."""
        return True

    def elapsed_time(self, other: Event) -> float:
        """No time at all, in milliseconds."""
        return 0.0


class Stream:
    """A stream by its number, 0 for the default one; work on it is done at once. Each trace has a class of its own."""

    device_type = 1  # c10::DeviceType::CUDA
    device_index = 0
    log: ClassVar[BlockLog]
    next_number: ClassVar[Callable[[int], int]]

    def __init__(self, device: Any = None, priority: int = 0, *, stream_id: int | None = None, **kwargs: Any) -> None:
        self.stream_id = self.cuda_stream = self.next_number(priority) if stream_id is None else stream_id
        self.device = torch.device("cuda", 0)
        self._entered: list[int] = []

    def __enter__(self) -> Stream:
        self._entered.append(self.log.stream)
        self.log.stream = self.stream_id
        return self

    def __exit__(self, *exc: object) -> None:
        self.log.stream = self._entered.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def wait_stream(self, stream: Any) -> None:
        """Wait for nothing."""

    def wait_event(self, event: Any) -> None:
        """Wait for nothing."""

    def synchronize(self) -> None:
        """Wait for nothing."""

    def query(self) -> bool:
        """Whether all work is done: always."""
        return True

    def is_capturing(self) -> bool:
        """Whether a graph is being captured: never."""
        return False

    def record_event(self, event: Event | None = None) -> Event:
        """An event that has happened."""
        return event or Event()


def _numbers(kind: str) -> Callable[[int], int]:
    """A function that gives the next stream of a priority (0, or below it for a higher one) its number; where a kind of device has
    no streams, that of the default one."""
    if kind != "cuda":
        return lambda priority: 0
    made = [count() for _ in range(PRIORITIES)]

    def next_number(priority: int) -> int:
        pool = min(max(-priority, 0), PRIORITIES - 1)
        return 1 + pool * PER_PRIORITY + next(made[pool]) % PER_PRIORITY

    return next_number


@contextmanager
def streams_seen(
    log: BlockLog, kind: str, stand_in: Callable[[str], None], awaited: Callable[[torch.Tensor, Stream], None]
) -> Iterator[None]:
    """Within the context streams and events can be made, entered and waited for, and the log knows which stream is at work.

    `stand_in` notes what was assumed, `awaited` is told of each `Tensor.record_stream`.
    """
    own = type("Stream", (Stream,), {"log": log, "next_number": staticmethod(_numbers(kind))})

    def set_stream(stream: Stream | None) -> None:
        if stream is not None:
            log.stream = stream.stream_id

    @contextmanager
    def entered(stream: Stream | None) -> Iterator[None]:
        before = log.stream
        if stream is not None and stream.stream_id != before:
            if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
                stand_in(BACKWARD)
            log.stream = stream.stream_id
        try:
            yield
        finally:
            log.stream = before

    places = {
        torch: {"Stream": own, "Event": Event},
        torch.cuda: {
            "Stream": own,
            "Event": Event,
            "current_stream": lambda device=None: own(stream_id=log.stream),
            "default_stream": lambda device=None: own(stream_id=0),
            "set_stream": set_stream,
            "stream": entered,
            "synchronize": lambda device=None: None,
        },
        torch.Tensor: {"record_stream": lambda tensor, stream: awaited(tensor, stream)},
    }
    with ExitStack() as stack:
        for module, names in places.items():
            for name, value in names.items():
                stack.enter_context(mock.patch.object(module, name, value))
        yield

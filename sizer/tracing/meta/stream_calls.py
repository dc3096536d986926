"""Streams without a device: a trace runs all work in one order, and records the stream of each block.

`torch.Stream()` and `torch.cuda.current_stream()` call the driver, which a machine without a GPU lacks. Their replacements wait
for nothing: work on another stream has already run. The point at which it is guaranteed to be done is recorded separately
(sizer.tracing.log). CUDA's allocator keeps the blocks of its streams apart.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any, ClassVar, Protocol
from unittest import mock

import torch

from sizer.tracing.log import BlockLog, Mark
from sizer.tracing.values.known import tensors_of

# c10/cuda/CUDAStream.cpp (kStreamsPerPoolBits, max_compile_time_stream_priorities), PyTorch 2.6 to 2.15: new streams of a
# priority are taken in turn from a pool of this size.
PER_PRIORITY, PRIORITIES = 32, 4
_FIRST = torch.device("cuda", 0)

_ACCUMULATES = (
    2**64 - 1
)  # the number of every node that accumulates a gradient (torch/csrc/autograd/functions/accumulate_grad.h)


class Recording(Protocol):
    """Parts of a trace's recorder that streams use.

    `follow_stream` is called with the arguments of each operator if there are several streams.
    """

    log: BlockLog
    follow_stream: Callable[[tuple], None] | None

    def block_of(self, tensor: torch.Tensor) -> int | None:
        """Return the block that holds a tensor."""

    def await_stream(self, tensor: torch.Tensor, stream: int) -> None:
        """Note that another stream uses a tensor."""


class AtWork:
    """The current stream: entered by code, or in the backward pass the stream on which autograd has made the node.

    A node has the stream that was current when it was made (torch/csrc/autograd/input_metadata.h), and runs on it (node.h).
    Nodes are numbered in the order of their creation, so the node numbers at which another stream is entered determine each
    node's stream.

    *Known limitation*: a node that accumulates a gradient is assumed to run on the stream of the node before it.
    """

    def __init__(self, recorder: Recording) -> None:
        self._recorder = recorder
        self._changes: list[int] = []  # the next node's number when another stream is entered
        self._entered: list[int] = []
        self._node: tuple[int, str] | None = None  # its number and name
        self._of_node = 0  # its stream, if code that it calls enters no other
        self._outside = 0  # the current stream when the backward pass was started
        self._begun = 0  # the first block of the backward pass
        self._by_code: list[int] = []  # first blocks of alternating ranges: on a stream that code entered, and on others
        self._of_leaves: set[int] = set()

    @property
    def stream(self) -> int:
        """Number of the current stream."""
        self.follow()
        return self._recorder.log.stream

    def enter(self, stream: int) -> None:
        """Make a stream the current one."""
        self._recorder.follow_stream = self.follow
        self.follow()
        if self._node is not None and (stream == self._of_node) == bool(len(self._by_code) % 2):
            self._by_code.append(len(self._recorder.log.sizes))
        self._change(stream)

    def follow(self, given: tuple = ()) -> None:
        """Make the stream of autograd's next node current when the engine has moved on to it.

        If a node is `given` a tensor that another node has made on another stream, it waits for that stream and uses the tensor
        (torch/csrc/autograd/input_buffer.h).
        """
        if self._recorder.follow_stream is None:
            return  # no stream has been entered
        node = torch._C._current_autograd_node()
        key = None if node is None else (node._sequence_nr(), node.name())
        if key != self._node:
            self._go_on(key)
        if key is not None and self._recorder.log.stream == self._of_node:
            self._take(given)

    def _go_on(self, key: tuple[int, str] | None) -> None:
        log = self._recorder.log
        if key is None:
            for stream in self._of_leaves - {self._outside}:
                log.stream_order.wait(self._outside, log.stream_order.record(stream))
            self._of_leaves.clear()
            self._change(self._outside)
        else:
            if self._node is None:
                self._outside, self._begun = log.stream, len(log.sizes)
            if key[0] == _ACCUMULATES:
                self._of_leaves.add(log.stream)
            else:
                self._change(self._made_on(key[0]))
            self._of_node = log.stream
        self._node = key

    def _take(self, given: tuple) -> None:
        log = self._recorder.log
        for tensor in tensors_of(given):
            block = self._recorder.block_of(tensor)
            if block is None or block < self._begun or bisect_right(self._by_code, block) % 2:
                continue
            if (made_on := log.stream_of(block)) != log.stream:
                log.stream_order.wait(log.stream, log.stream_order.record(made_on))
                self._recorder.await_stream(tensor, log.stream)

    def _made_on(self, number: int) -> int:
        place = bisect_right(self._changes, number)
        return self._entered[place - 1] if place else 0

    def _change(self, stream: int) -> None:
        log = self._recorder.log
        if stream != log.stream:
            log.stream = stream
            self._changes.append(torch._C._autograd._get_sequence_nr())
            self._entered.append(stream)


class Event:
    """Event that has already happened. Each trace has its own class."""

    at_work: ClassVar[AtWork]
    log: ClassVar[staticmethod[[], BlockLog]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._mark: Mark = {}
        self.device = _FIRST
        self.cuda_event = self.event_id = id(self)

    def record(self, stream: Any = None) -> None:
        """Record the work that a stream, by default the current one, has queued."""
        self._mark = self.log().stream_order.record(_number(stream, self.at_work))

    def _after(self, stream: Any) -> Event:
        self.record(stream)
        return self

    def wait(self, stream: Any = None) -> None:
        """Make a stream wait."""
        self.log().stream_order.wait(_number(stream, self.at_work), self._mark)

    def synchronize(self) -> None:
        """Make the host wait."""
        self.log().synchronize(self._mark)

    def query(self) -> bool:
        """Return True: the event has always happened."""
        return True

    def elapsed_time(self, other: Event) -> float:
        """Return one millisecond, as with the null driver: code divides by it."""
        return 1.0

    def ipc_handle(self) -> bytes:
        """Return a handle of 64 bytes (cudaIpcEventHandle_t)."""
        return bytes(64)


class Stream:
    """Stream with its number, 0 for the default stream; its work is done at once. Each trace has its own class."""

    device_type = 1  # c10::DeviceType::CUDA
    device_index = 0
    at_work: ClassVar[AtWork]
    event: ClassVar[type[Event]]
    next_number: ClassVar[staticmethod[[int], int]]

    def __init__(self, device: Any = None, priority: int = 0, *, stream_id: int | None = None, **kwargs: Any) -> None:
        self.stream_id = self.cuda_stream = self.next_number(priority) if stream_id is None else stream_id
        self.native_handle, self.priority = self.stream_id, max(min(priority, 0), 1 - PRIORITIES)
        self.device = _FIRST
        self._before: list[int] = []

    def __enter__(self) -> Stream:
        self._before.append(self.at_work.stream)
        self.at_work.enter(self.stream_id)
        return self

    def __exit__(self, *exc: object) -> None:
        self.at_work.enter(self._before.pop())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.cuda_stream

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the lowest and the highest priority."""
        return 0, 1 - PRIORITIES

    def wait_stream(self, stream: Any) -> None:
        """Wait for the work of another stream."""
        self.event()._after(stream).wait(self)

    def wait_event(self, event: Any) -> None:
        """Wait for an event."""
        event.wait(self)

    def synchronize(self) -> None:
        """Make the host wait for this stream's work."""
        self.event()._after(self).synchronize()

    def query(self) -> bool:
        """Return True: all work is always done."""
        return True

    def is_capturing(self) -> bool:
        """Return False: a graph is never being captured."""
        return False

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event that happens once this stream's work is done."""
        return (event or self.event())._after(self)


def _number(stream: Any, at_work: AtWork) -> int:
    return at_work.stream if stream is None else stream.stream_id


def _numbers(kind: str) -> Callable[[int], int]:
    """Return a function that returns the number of the next stream of a priority (0, or less for a higher priority).

    For a kind of device without streams, it returns the number of the default stream.
    """
    if kind != "cuda":
        return lambda priority: 0
    made = [count() for _ in range(PRIORITIES)]

    def next_number(priority: int) -> int:
        pool = min(max(-priority, 0), PRIORITIES - 1)
        return 1 + pool * PER_PRIORITY + next(made[pool]) % PER_PRIORITY

    return next_number


@contextmanager
def streams_seen(recorder: Recording, kind: str) -> Iterator[None]:
    """Make streams and events available within the context, and record the current stream in the recorder's log.

    The log also records blocks that wait for other streams (`Tensor.record_stream`).
    """
    at_work = AtWork(recorder)
    told = {"at_work": at_work, "log": staticmethod(lambda: recorder.log)}
    events = type("Event", (Event,), told)
    own = type("Stream", (Stream,), told | {"event": events, "next_number": staticmethod(_numbers(kind))})

    def set_stream(stream: Stream | None) -> None:
        if stream is not None:
            at_work.enter(stream.stream_id)

    @contextmanager
    def entered(stream: Stream | None) -> Iterator[None]:
        before = at_work.stream
        if stream is not None:
            at_work.enter(stream.stream_id)
        try:
            yield
        finally:
            at_work.enter(before)

    def synchronize(device: Any = None) -> None:
        order = recorder.log.stream_order
        for stream in order.all_streams():
            recorder.log.synchronize(order.record(stream))

    def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
        recorder.await_stream(tensor, stream.stream_id)

    def external(stream_ptr: int, device: Any = None, **kwargs: Any) -> Stream:
        """Replace torch.cuda.ExternalStream: return a stream by its number."""
        return own(stream_id=stream_ptr)

    places: dict[Any, dict[str, Any]] = {
        torch: {"Stream": own, "Event": events},
        torch.cuda.streams: {"Stream": own, "Event": events, "ExternalStream": external},
        torch.accelerator: {"set_stream": set_stream},
        torch.cuda: {
            "Stream": own,
            "Event": events,
            "ExternalStream": external,
            "get_stream_from_external": external,
            "current_stream": lambda device=None: own(stream_id=at_work.stream),
            "default_stream": lambda device=None: own(stream_id=0),
            "set_stream": set_stream,
            "stream": entered,
            "synchronize": synchronize,
            "is_current_stream_capturing": lambda: False,
        },
        torch.Tensor: {"record_stream": record_stream},
    }
    with ExitStack() as stack:
        for module, names in places.items():
            for name, value in names.items():
                stack.enter_context(mock.patch.object(module, name, value))
        yield

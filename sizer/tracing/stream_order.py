"""Which work of streams is done for certain: a stream does its own in order, waits for others where it is told to, and the host
waits for some of it.

CUDA's allocator records an event on each stream that uses a block (`Tensor.record_stream`) as the block is released, and gives the
block out again once all of them have happened (c10/cuda/CUDACachingAllocator.cpp, insert_events and process_events). They have for
certain only where the host has waited for them: `Event.synchronize()`, `Stream.synchronize()`, `torch.cuda.synchronize()`, or a
value that is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy

Mark = dict[int, int]  # by stream, how many of the events recorded on it have happened where this one has


class StreamOrder:
    """What the streams of a trace wait for, and which released blocks wait for them. Streams go by their numbers."""

    def __init__(self) -> None:
        self._after: dict[int, Mark] = {}  # by stream, what has happened where its work so far is done
        self._done: Mark = {}
        self._waiting: dict[int, Mark] = {}  # by block

    def __copy__(self) -> StreamOrder:
        made = StreamOrder()
        vars(made).update(deepcopy(vars(self)))
        return made

    def record(self, stream: int) -> Mark:
        """An event on a stream."""
        after = self._after.setdefault(stream, {})
        after[stream] = after.get(stream, 0) + 1
        return dict(after)

    def wait(self, stream: int, mark: Mark) -> None:
        """Have a stream wait for an event."""
        _merge(self._after.setdefault(stream, {}), mark)

    def release(self, block: int, streams: Iterable[int]) -> None:
        """Have a released block wait for what streams have been asked for until now."""
        self._waiting[block] = {stream: self.record(stream)[stream] for stream in streams}

    def synchronize(self, mark: Mark) -> Iterator[int]:
        """Have the host wait for an event; yields the blocks that wait no longer."""
        _merge(self._done, mark)
        for block, needed in list(self._waiting.items()):
            if all(self._done.get(stream, 0) >= number for stream, number in needed.items()):
                del self._waiting[block]
                yield block

    def all_streams(self) -> tuple[int, ...]:
        """The streams of which there is an event."""
        return tuple(self._after)


def _merge(mark: Mark, other: Mark) -> None:
    for stream, number in other.items():
        mark[stream] = max(mark.get(stream, 0), number)

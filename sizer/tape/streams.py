"""Tapes of several streams: the events of each stream, and blocks that several streams use.

CUDA's allocator has separate free blocks for each stream: a block allocated for one stream is never given to another
(c10/cuda/CUDACachingAllocator.cpp, BlockComparatorSize). A block that other streams also use (`Tensor.record_stream`) is free
once these have done their work up to its release. Timing decides whether they have when the next block is requested. A replay
assumes that they have, which gives the least reserved memory. They have at the latest when the host waits for them.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from sizer.tape.tape import Tape


def by_stream(tape: Tape, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the events from `begin` to `end` of a tape's order in runs of one stream: (begin, end, stream)."""
    if not tape.streams or begin == end:
        yield begin, end, 0
        return
    events = np.asarray(tape.order[begin:end], np.int64)
    streams = np.frombuffer(tape.streams, np.uint8)[np.where(events >= 0, events, ~events)]
    bounds = [0, *(np.flatnonzero(np.diff(streams)) + 1).tolist(), end - begin]
    for first, last in pairwise(bounds):
        yield begin + first, begin + last, int(streams[first])


def stream_of(tape: Tape, block: int) -> int:
    """Return the number of the stream for which a block was allocated."""
    return tape.streams[block] if tape.streams else 0


def streams_behind(tape: Tape) -> Tape:
    """Return the tape in which streams finish as late as possible: the most that may be reserved. Unchanged if no block waits.

    A block then waits until the host waits for its streams, or cached memory is released, which waits for all of them.
    """
    if not tape.awaited:
        return tape
    empties, order = tape.empties(), array("q")
    settled = defaultdict(list)
    for position, block in tape.settled:
        settled[position].append(block)
    waiting: dict[int, None] = {}
    done: set[int] = set()
    for position, event in enumerate(tape.order):
        for block in settled.get(position, ()):
            done.add(block)
            if block in waiting:
                del waiting[block]
                order.append(~block)
        if event < 0 and ~event in tape.awaited and ~event not in done:
            waiting[~event] = None
            continue
        if event in empties:
            order.extend(~block for block in waiting)
            waiting.clear()
        order.append(event)
    order.extend(~block for block in waiting)
    return replace(tape, order=order)

"""Tapes of several streams: which events concern which, and what becomes of blocks that streams share.

CUDA's allocator keeps the free blocks of each stream apart: what was allocated for one is never given to another
(c10/cuda/CUDACachingAllocator.cpp, BlockComparatorSize). A block that other streams use as well (`Tensor.record_stream`) is free
once these have done what they were asked for until then. Whether they have when the next block is asked for, timing decides: a
replay takes them to have, which is the least that is reserved. They have at the latest where the host waits for them.
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
    """The events from `begin` to `end` of a tape's order in runs that concern the blocks of one stream: (begin, end, stream)."""
    if not tape.streams or begin == end:
        yield begin, end, 0
        return
    events = np.asarray(tape.order[begin:end], np.int64)
    streams = np.frombuffer(tape.streams, np.uint8)[np.where(events >= 0, events, ~events)]
    bounds = [0, *(np.flatnonzero(np.diff(streams)) + 1).tolist(), end - begin]
    for first, last in pairwise(bounds):
        yield begin + first, begin + last, int(streams[first])


def stream_of(tape: Tape, block: int) -> int:
    """The number of the stream for which a block was allocated."""
    return tape.streams[block] if tape.streams else 0


def streams_behind(tape: Tape) -> Tape:
    """The tape where no stream has done what blocks wait for before the host waits for that, or cached memory is given back, which
    waits for all of them: the most that may be reserved. The tape itself where no block waits."""
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

"""Windows of a tape: spans of steps that come again as a whole, as those between two times that a cache is quantised anew."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np

from sizer.tape.loops import NotRepeatedError
from sizer.tape.size_queries import by_block, gather
from sizer.tape.tape import CATEGORIES, Loop, Tape

ALIKE = 3  # windows that show a line: two growths, which must be the same

Values = TypeVar("Values", "array[int]", bytes)  # by block


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """The events from `begin` to `end` of a tape's order, which make the blocks from `first` to `last`, and the loops there."""

    begin: int
    end: int
    first: int
    last: int
    loops: tuple[Loop, ...]
    events: np.ndarray
    sizes: np.ndarray

    def events_after(self, blocks: int) -> np.ndarray:
        """Return the events with each block's number greater by `blocks`."""
        return np.where(self.events >= 0, self.events + blocks, self.events - blocks)


def kept_blocks(tape: Tape, other: Tape, *, of: str, before: tuple[int, int], at: tuple[int, int]) -> dict[int, int]:
    """Return the tape's blocks by another tape's: blocks of a category made before an event and held at another.

    Blocks of each module are matched in the order in which they were made. Raises NotRepeatedError if their bytes or sources
    differ.
    """
    mine, theirs = _held(tape, of, before[0], at[0]), _held(other, of, before[1], at[1])
    if [*mine.values()] != [*theirs.values()]:
        raise NotRepeatedError(f"blocks of the {of} at event {at[0]} differ from those of a shorter generation")
    return dict(zip(theirs, mine, strict=True))


def _held(tape: Tape, category: str, before: int, at: int) -> dict[int, tuple[str, str, int]]:
    """Return module, operator and bytes of a category's blocks that are made before an event and alive at another, by module."""
    number = CATEGORIES.index(category)
    released = {~event for event in tape.order[:at] if event < 0}
    held = {
        block: (tape.module_names[tape.modules[block]], tape.op_names[tape.ops[block]], tape.sizes[block])
        for block in tape.order[:before]
        if block >= 0 and tape.categories[block] == number and block not in released
    }
    return dict(sorted(held.items(), key=lambda item: item[1][0]))


def append_windows(tape: Tape, begins: Sequence[int], count: int, *, rest: int = 0, rest_count: int = 0) -> Tape:
    """Return the tape with its last window appended `count` times.

    The last ALIKE windows begin in its order at `begins`. The last one ends with the order and, if it has a loop, with that.
    After them come the first `rest` events once more and, if these are all events, the loop `rest_count` times. Raises
    NotRepeatedError unless the windows are equal in all but their sizes, and these grow by the same bytes.
    """
    ends = [*begins[1:], len(tape.order)]
    windows = [_window(tape, begin, end) for begin, end in zip(begins, ends, strict=True)]
    growth = _growth(tape, windows)
    last = windows[-1]
    made, length = last.last - last.first, last.end - last.begin
    part = int((last.events[:rest] >= 0).sum())

    def more(values: Values) -> Values:
        return values + values[last.first : last.last] * count + values[last.first : last.first + part]

    order, sizes = tape.order[:], tape.sizes[:]
    for time in range(1, count + 1):
        order.frombytes(last.events_after(time * made).astype(np.int64).tobytes())
        sizes.frombytes((last.sizes + time * growth).astype(np.int64).tobytes())
    order.frombytes(last.events_after((count + 1) * made)[:rest].astype(np.int64).tobytes())
    sizes.frombytes((last.sizes + (count + 1) * growth)[:part].astype(np.int64).tobytes())
    loops = [_moved(loop, time * length) for time in range(1, count + 1) for loop in last.loops]
    if rest_count:
        loops += [replace(_moved(loop, (count + 1) * length), count=rest_count) for loop in last.loops]
    queries = by_block(tape.size_queries)
    asked = {
        block + time * made: queries[block]
        for time in range(1, count + 2)
        for block in range(last.first, last.last if time <= count else last.first + part)
        if block in queries
    }
    return replace(
        tape,
        order=order,
        sizes=sizes,
        categories=more(tape.categories),
        streams=more(tape.streams),
        ops=more(tape.ops),
        modules=more(tape.modules),
        marks=tuple((len(order) if place == last.end else place, phase) for place, phase in tape.marks),
        size_queries=gather(queries | asked),
        loops=(*tape.loops, *loops),
    )


def _moved(loop: Loop, by: int) -> Loop:
    return replace(loop, begin=loop.begin + by, end=loop.end + by)


def _window(tape: Tape, begin: int, end: int) -> _Window:
    events = np.asarray(tape.order[begin:end], np.int64)
    blocks = events[events >= 0]
    first, last = int(blocks[0]), int(blocks[-1]) + 1
    return _Window(
        begin=begin,
        end=end,
        first=first,
        last=last,
        loops=tuple(loop for loop in tape.loops if begin < loop.end <= end),
        events=events,
        sizes=np.asarray(tape.sizes[first:last], np.int64),
    )


def _growth(tape: Tape, windows: Sequence[_Window]) -> np.ndarray:
    """Return the bytes by which the blocks of a window grow from one window to the next."""
    shapes = [(one.events_after(-one.first).tolist(), [loop.count for loop in one.loops]) for one in windows]
    columns = (tape.ops, tape.modules, tape.categories)
    sources = [(*(column[one.first : one.last] for column in columns), (one.events >= 0).tolist()) for one in windows]
    # the first window may release blocks that no window before it made
    if any(shape != shapes[-1] for shape in shapes[1:]) or any(source != sources[-1] for source in sources):
        raise NotRepeatedError(f"the window at event {windows[-1].begin} does not repeat the window before it")
    *earlier, growth = (after.sizes - before.sizes for before, after in pairwise(windows))
    asked = by_block(tape.size_queries)  # a library's answers are on no line: they stay as they are
    grows = np.asarray([block not in asked for block in range(windows[-1].first, windows[-1].last)], bool)
    if (wrong := np.flatnonzero((growth != earlier[-1]) & grows)).size:
        block = windows[-1].first + int(wrong[0])
        raise NotRepeatedError(f"{tape.describe(block)} does not grow by the same bytes from window to window")
    return growth * grows

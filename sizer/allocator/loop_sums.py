"""Sums over the steps of a loop: bytes by category, as an allocator does one step after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sizer.allocator.replay import LoopReplay, sums_by_category
from sizer.tape.loops import DEPTH, Repetition
from sizer.tape.tape import CATEGORIES, Tape

Row = tuple[int, int, np.ndarray, np.ndarray, int, int]


class Sums:
    """Steps and bytes of a loop, by category."""

    def __init__(self, tape: Tape, again: Repetition, before: np.ndarray, taken: np.ndarray) -> None:
        made = len(again.blocks)
        place_of = {block: place for place, block in enumerate(again.blocks.tolist())}
        place_of |= {block: steps * made + place for block, steps, place in again.earlier}
        blocks = np.where(again.events >= 0, again.events, ~again.events)
        self._again = again
        self._places = np.asarray([place_of[block] for block in blocks.tolist()], np.int64)
        self._signs = np.where(again.events >= 0, 1, -1)
        self.categories = np.frombuffer(tape.categories, np.uint8)[blocks]
        self._level = before.astype(np.int64)
        # bytes taken by block, in the last step and earlier ones
        self._history = [np.zeros(made, np.int64) for _ in range(DEPTH)]
        self._history[0][:] = taken[again.blocks]
        successor = dict(again.moves.tolist())
        for block, steps, place in again.earlier:
            self._history[steps - 1][place] = taken[successor[block]]
        self._rows: list[Row] = []
        self._refused: tuple[int, int] | None = None

    def add(self, taken: np.ndarray, reserved: int, grown: list[tuple[int, int]]) -> None:
        """Add a step with blocks of `taken` bytes.

        `reserved` are the reserved bytes before it; `grown` has the positions in it from which they changed.
        """
        changes = self.changes((taken, *self._history))
        self._history = [taken, *self._history[:-1]]
        levels = np.cumsum(changes)
        at = int(levels.argmax()) + 1
        peak = self._level + sums_by_category(changes[:at], self.categories[:at])
        self._level = self._level + sums_by_category(changes, self.categories)
        at_peak = next((held for place, held in reversed(grown) if place < at), reserved)
        self._rows.append((len(self._rows) + 1, at, peak, self._level, at_peak, grown[-1][1] if grown else reserved))

    def refused(self, taken: np.ndarray, place: int) -> None:
        """Note the request, at a place in the step, that found no room."""
        asked = self._again.sizes_at(len(self._rows) + 1)[self._places[place]]
        self._refused = int(asked), int(self._level.sum() + self.changes((taken, *self._history))[:place].sum())

    def found(self) -> LoopReplay:
        """Return the result of the added steps."""
        return loop_replay(len(self._again.events), self._rows, self._refused)

    def changes(self, sizes: Sequence[np.ndarray]) -> np.ndarray:
        """Return the bytes by which each event of a step changes the bytes alive.

        `sizes` are those of its blocks and of earlier steps' blocks.
        """
        return self._signs * np.concatenate(sizes)[self._places]


def loop_replay(events: int, rows: list[Row], refused: tuple[int, int] | None) -> LoopReplay:
    """Return the result of rows.

    A row has: repetition, events up to the peak, bytes by category then and at the end, reserved bytes then and at the end.
    """
    none = np.zeros((0, len(CATEGORIES)), np.int64)
    times, at, peaks, levels, at_peak, reserved = zip(*rows, strict=True) if rows else ((),) * 6
    return LoopReplay(
        events=events,
        times=np.asarray(times, np.int64),
        peak_after=np.asarray(at, np.int64),
        peaks=np.stack(peaks) if peaks else none,
        levels=np.stack(levels) if levels else none,
        reserved_at_peak=np.asarray(at_peak, np.int64),
        reserved=np.asarray(reserved, np.int64),
        refused=refused,
    )

"""Moments of a replay with known memory: after each event of the tape, and two in each step of its loops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sizer.allocator.replay import LoopReplay, Replay, sums_up_to
from sizer.tape.tape import CATEGORIES, Tape


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """The start, and the moments after events, in the order of time; all are int64 arrays of one length.

    Args:
        positions: Number of events done, with those of loops counted in each repetition.
        events: The last event done, as an index into the order of the tape.
        levels, reserved: Bytes allocated and reserved.
        sources: Number of the tape's events done. If negative, `rows[~source]` has the bytes by category at a repeated step's
            peak or end.
        phase_ends: Number of the last moment of each phase that was begun.
    """

    positions: np.ndarray
    events: np.ndarray
    levels: np.ndarray
    reserved: np.ndarray
    sources: np.ndarray
    rows: np.ndarray
    phase_ends: tuple[int, ...]

    def by_category(self, tape: Tape, replayed: Replay, numbers: list[int]) -> np.ndarray:
        """Return the bytes allocated by category at some moments, int64 [moments, categories]."""
        events = np.asarray(tape.order, np.int64)
        categories = np.frombuffer(tape.categories, np.uint8)[np.where(events >= 0, events, ~events)]
        loops = [*zip((loop.end for loop in tape.loops), replayed.loops, strict=False)]
        sources = self.sources[numbers]
        held = sources >= 0
        bounds = np.unique([0, *(end for end, _ in loops), *sources[held]])
        sums = sums_up_to(bounds, replayed.changes, categories)
        found = np.empty((len(sources), len(CATEGORIES)), np.int64)
        found[~held] = self.rows[~sources[~held]]
        found[held] = sums[np.searchsorted(bounds, sources[held])]
        more = np.zeros_like(found)  # bytes of repeated loops, which the sums lack
        for end, loop in loops:
            if (after := held & (sources > end)).any():
                more[after] = loop.levels[-1] - sums[np.searchsorted(bounds, end)]
        return found + more


def read_moments(tape: Tape, replayed: Replay) -> Moments:
    """Return the moments of a replay, up to the refused request."""
    parts, phase_at = [_start()], {0: 0}
    count, position, level, begin, rows = 1, 0, 0, 0, 0
    for end, loop in _slices(tape, replayed):
        if end > begin:
            parts.append(_events(replayed, begin, end, position, level))
        phase_at |= {mark: count + mark - begin - 1 for mark, _ in tape.marks if begin < mark <= end}
        count, position, level, begin = count + end - begin, position + end - begin, int(parts[-1][2][-1]), end
        if loop is not None and (done := len(loop.levels)):
            length = loop.events
            parts.append(_steps(loop, end - length, end, position, rows))
            rows, count, position = rows + 2 * done, count + 2 * done, position + loop.done * length
            level = int(parts[-1][2][-1])
        if loop is not None and loop.refused is not None:
            phase_at.pop(end, None)
        elif end in phase_at:
            phase_at[end] = count - 1
    positions, events, levels, reserved, sources = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Moments(
        positions=positions,
        events=events,
        levels=levels,
        reserved=reserved,
        sources=sources,
        rows=np.concatenate([np.zeros((0, len(CATEGORIES)), np.int64), *map(_rows, replayed.loops)]),
        phase_ends=tuple(_phase_ends(tape, phase_at, count - 1)),
    )


def _slices(tape: Tape, replayed: Replay) -> Iterator[tuple[int, LoopReplay | None]]:
    """Yield the event at which the tape reaches each of its loops, with the loop, and the last event."""
    for loop, found in zip(tape.loops, replayed.loops, strict=False):
        yield loop.end, found
        if found.refused is not None:
            return
    yield len(tape.order) if replayed.failed_at is None else replayed.failed_at, None


def _phase_ends(tape: Tape, phase_at: dict[int, int], last: int) -> Iterator[int]:
    """Yield the last moment of each phase, up to the phase in which the work ended early."""
    for mark, _ in tape.marks:
        yield phase_at.get(mark, last)
        if mark not in phase_at:
            return


def _start() -> tuple[np.ndarray, ...]:
    return tuple(np.asarray([value], np.int64) for value in (0, -1, 0, 0, 0))


def _events(replayed: Replay, begin: int, end: int, position: int, level: int) -> tuple[np.ndarray, ...]:
    done = np.arange(1, end - begin + 1)
    return (
        position + done,
        begin + done - 1,
        level + np.cumsum(replayed.changes[begin:end]),
        replayed.reserved[begin:end],
        begin + done,
    )


def _steps(loop: LoopReplay, begin: int, end: int, position: int, rows: int) -> tuple[np.ndarray, ...]:
    """Return the peak and the end of each step."""
    times = (loop.times - 1) * (end - begin)
    return (
        _alternating(position + times + loop.peak_after, position + times + end - begin),
        _alternating(begin + loop.peak_after - 1, np.full(len(times), end - 1)),
        _alternating(loop.peaks.sum(1), loop.levels.sum(1)),
        _alternating(loop.reserved_at_peak, loop.reserved),
        ~(rows + np.arange(2 * len(times))),
    )


def _rows(loop: LoopReplay) -> np.ndarray:
    rows = np.empty((2 * len(loop.levels), len(CATEGORIES)), np.int64)
    rows[0::2], rows[1::2] = loop.peaks, loop.levels
    return rows


def _alternating(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    both = np.empty(2 * len(first), np.int64)
    both[0::2], both[1::2] = first, second
    return both

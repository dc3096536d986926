"""Result of a replay: memory at each moment and phase, the peak and its origin, and a curve short enough to draw."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from sizer.allocator.loop_replay import unplaced
from sizer.allocator.replay import LoopReplay, Replay, changes_of, sums_up_to
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


CURVE_POINTS, PHASE_POINTS = 160, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseUse:
    """Bytes allocated and reserved at a phase's end, and the most that was allocated at any time in it.

    The most includes the level at the phase's start, as torch's counters do after reset_peak_memory_stats.
    """

    phase: str
    allocated_bytes: int
    peak_allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """Allocated bytes per category (in the order of CATEGORIES) after `position` events of the tape."""

    position: int
    phase: str
    by_category: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points of a curve by columns, which are faster to pack and read; `by_category` has a column for each of CATEGORIES.

    `phases` are those of the points, each with the number of its points.
    """

    positions: tuple[int, ...] = ()
    phases: tuple[tuple[str, int], ...] = ()
    by_category: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of_points(cls, points: Sequence[CurvePoint]) -> Curve:
        """Return the curve through some points."""
        return cls(
            positions=tuple(point.position for point in points),
            phases=runs_of([point.phase for point in points]),
            by_category=tuple(zip(*(point.by_category for point in points), strict=True)),
        )

    def is_even(self) -> bool:
        """Return whether all columns are of as many points."""
        counts = {len(self.positions), sum(count for _, count in self.phases), *map(len, self.by_category)}
        return len(counts) == 1

    def __len__(self) -> int:
        """Return the number of points."""
        return len(self.positions)

    def __iter__(self) -> Iterator[CurvePoint]:
        """Yield the points, in the order of time."""
        phases = (phase for phase, count in self.phases for _ in range(count))
        rows = zip(self.positions, phases, zip(*self.by_category, strict=True), strict=True)
        return (CurvePoint(position=position, phase=phase, by_category=split) for position, phase, split in rows)


def runs_of(phases: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """Return consecutive phases, each once with the length of its run."""
    return tuple((phase, len([*same])) for phase, same in groupby(phases))


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """The request (bytes) that the device could not meet, its operator and module, and the memory in use then."""

    op: str
    module: str
    phase: str
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Memory of one replay in bytes, as the device's own counters would show it.

    `at_peak` splits `peak_allocated_bytes` by category, after rounding, and sums to it exactly. `peak_op`, `peak_module` and
    `peak_phase` name the block with the allocation that made the peak; `reserved_at_peak_bytes` is reserved then. `retries`
    counts the releases of cached memory for a request (num_alloc_retries). If `out_of_memory` is not None, all other fields
    describe the work up to the failed request.
    """

    phases: tuple[PhaseUse, ...]
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_requested_bytes: int
    peak_phase: str
    peak_op: str
    peak_module: str
    at_peak: dict[str, int]
    curve: Curve
    reserved_at_peak_bytes: int = 0
    retries: int = 0
    out_of_memory: OutOfMemory | None = None


def read_timeline(tape: Tape, replayed: Replay) -> Timeline:
    """Return the timeline (bytes) of a tape with blocks placed by an allocator."""
    moments = read_moments(tape, replayed)
    peak = int(moments.levels.argmax())  # the last event before it made the peak
    numbers = _curve_moments(moments, peak)
    splits = moments.by_category(tape, replayed, numbers)
    event = int(moments.events[peak])
    block = tape.order[event] if event >= 0 else None
    return Timeline(
        phases=_phases(tape, moments),
        peak_allocated_bytes=int(moments.levels[peak]),
        peak_reserved_bytes=int(max([moments.reserved.max(), *replayed.reserved[-1:]])),
        peak_requested_bytes=peak_requested_bytes(tape, until=replayed),
        peak_phase=_phase(tape, event),
        peak_op="" if block is None else tape.op_names[tape.ops[block]],
        peak_module="" if block is None else tape.module_names[tape.modules[block]],
        at_peak=dict(zip(CATEGORIES, splits[numbers.index(peak)].tolist(), strict=True)),
        curve=Curve(
            positions=tuple(moments.positions[numbers].tolist()),
            phases=runs_of(_phases_of(tape, moments.events[numbers])),
            by_category=tuple(map(tuple, splits.T.tolist())),
        ),
        reserved_at_peak_bytes=int(moments.reserved[peak]),
        retries=replayed.retries,
        out_of_memory=read_failure(tape, replayed),
    )


def read_failure(tape: Tape, replayed: Replay) -> OutOfMemory | None:
    """Return the request (bytes) that an allocator could not meet, None if it met all."""
    if replayed.failed_at is None:
        return None
    block = tape.order[replayed.failed_at]
    refused = replayed.loops[-1].refused if replayed.loops else None
    requested, allocated = refused or (tape.sizes[block], int(read_moments(tape, replayed).levels[-1]))
    return OutOfMemory(
        op=tape.op_names[tape.ops[block]],
        module=tape.module_names[tape.modules[block]],
        phase=_phase(tape, replayed.failed_at),
        requested_bytes=requested,
        allocated_bytes=allocated,
        reserved_bytes=int(replayed.reserved[-1]),
    )


def running_bytes(order: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return the result of `bytes_alive` as a list."""
    return bytes_alive(order, sizes).tolist()


def bytes_alive(order: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
    """Return the bytes alive before the first event and after each one (int64); block i counts `sizes[i]` bytes."""
    return np.concatenate(([0], np.cumsum(changes_of(order, sizes))))


def peak_bytes(order: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the most bytes alive at once; block i counts `sizes[i]` bytes."""
    return int(bytes_alive(order, sizes).max())


def peak_requested_bytes(tape: Tape, *, until: Replay | None = None) -> int:
    """Return the most tensor bytes (as requested, not rounded) alive at once, also in steps of loops.

    It counts up to the refused request of another replay.
    """
    return int(read_moments(tape, unplaced(tape, until=until)).levels.max())


def live_by_category(tape: Tape) -> dict[str, dict[str, int]]:
    """Tensor bytes (as requested, not rounded) alive at each phase's end: phase -> category -> bytes."""
    asked = unplaced(tape)
    moments = read_moments(tape, asked)
    splits = moments.by_category(tape, asked, list(moments.phase_ends))
    return {
        phase: dict(zip(CATEGORIES, split, strict=True))
        for (_, phase), split in zip(tape.marks, splits.tolist(), strict=True)
    }


def _phases(tape: Tape, moments: Moments) -> tuple[PhaseUse, ...]:
    """Return one row per phase that was begun; a phase cut short by a lack of memory ends with the work."""
    rows, begin = [], 0
    for (_, phase), end in zip(tape.marks, moments.phase_ends, strict=False):
        rows.append(
            PhaseUse(
                phase=phase,
                allocated_bytes=int(moments.levels[end]),
                peak_allocated_bytes=int(moments.levels[begin : end + 1].max()),
                reserved_bytes=int(moments.reserved[end]),
            )
        )
        begin = end
    return tuple(rows)


def _curve_moments(moments: Moments, peak: int) -> list[int]:
    """Return at most CURVE_POINTS moments, ascending: start, phase ends, the peak, and the highest of slices of the events.

    Slices are equal within a phase. A short phase has about PHASE_POINTS of them: a prefill is a small part of the events of a
    generation.
    """
    last = len(moments.levels) - 1
    chosen = {0, peak, last, *moments.phase_ends}
    slices = CURVE_POINTS - len(chosen)
    ends = sorted({*moments.phase_ends, last})
    spans = [(begin, end) for begin, end in pairwise([0, *ends]) if begin < end]
    least = min(PHASE_POINTS, slices // max(len(spans), 1))
    whole = int(moments.positions[last]) + 1
    for begin, end in spans:
        start, stop = int(moments.positions[begin]), int(moments.positions[end])
        count = least + (slices - least * len(spans)) * (stop - start) // whole
        width = max(1, -(-(stop - start) // max(count, 1)))
        bounds = np.searchsorted(moments.positions[begin : end + 1], range(start + 1, stop + width, width)) + begin
        chosen |= {one + int(moments.levels[one:two].argmax()) for one, two in pairwise(bounds.tolist()) if one < two}
    return sorted(chosen)


def _phase(tape: Tape, event: int) -> str:
    """Return the phase of the event at this index."""
    return _phases_of(tape, np.asarray([event]))[0]


def _phases_of(tape: Tape, events: np.ndarray) -> list[str]:
    """Return the phases of the events at some indices; events after the last mark belong to the last phase."""
    ends, names = zip(*tape.marks, strict=True) if tape.marks else ((), ("",))
    found = np.searchsorted(ends, events, side="right")
    return [names[min(place, len(names) - 1)] for place in found.tolist()]

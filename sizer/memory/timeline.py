"""What a replay found: memory per phase, the peak and who made it, and a curve short enough to draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sizer.memory.tape import CATEGORIES, Tape

CURVE_POINTS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What an allocator did with a tape, in bytes: `taken` per block, `reserved` after each event.

    `addresses` are per block, the allocator's own; those of blocks that took nothing mean nothing.
    `failed_at` is the position of the first request that could not be met, None where all were; the last of
    `reserved` is then what was still held after every free segment went back.
    """

    taken: list[int]
    addresses: list[int]
    reserved: list[int]
    retries: int
    failed_at: int | None


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
class OutOfMemory:
    """The request (bytes) that the device could not give, who made it, and what was in use then."""

    op: str
    module: str
    phase: str
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Memory of one replay in bytes, as the device's own counters would show it.

    `at_peak` splits `peak_allocated_bytes` by category, after rounding, and sums to it exactly. `peak_op`,
    `peak_module` and `peak_phase` name the block whose allocation made the peak; `reserved_at_peak_bytes` is what was
    reserved then. `retries` counts how often cached memory had to be given back (num_alloc_retries). Where
    `out_of_memory` is not None, everything else describes the work up to the request that failed.
    """

    phases: tuple[PhaseUse, ...]
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_requested_bytes: int
    peak_phase: str
    peak_op: str
    peak_module: str
    at_peak: dict[str, int]
    curve: tuple[CurvePoint, ...]
    reserved_at_peak_bytes: int = 0
    retries: int = 0
    out_of_memory: OutOfMemory | None = None


def read_timeline(tape: Tape, replayed: Replay) -> Timeline:
    """The timeline (bytes) of a tape whose blocks an allocator has placed."""
    end = len(tape.order) if replayed.failed_at is None else replayed.failed_at
    order = tape.order[:end]
    changes = _changes(order, replayed.taken)
    allocated = _levels(changes)
    position = int(allocated.argmax())  # number of events done; the last of them made the peak
    positions = _curve_positions(tape, allocated, position)
    splits = _by_category(tape, order, changes, positions)
    curve = tuple(
        CurvePoint(position=at, phase=_phase(tape, at - 1), by_category=split)
        for at, split in zip(positions, splits, strict=True)
    )
    block = order[position - 1] if position else None
    return Timeline(
        phases=_phases(tape, allocated, replayed.reserved),
        peak_allocated_bytes=int(allocated[position]),
        peak_reserved_bytes=max(replayed.reserved, default=0),
        peak_requested_bytes=peak_bytes(order, tape.sizes),
        peak_phase=_phase(tape, position - 1),
        peak_op="" if block is None else tape.op_names[tape.ops[block]],
        peak_module="" if block is None else tape.module_names[tape.modules[block]],
        at_peak=dict(zip(CATEGORIES, splits[positions.index(position)], strict=True)),
        curve=curve,
        reserved_at_peak_bytes=replayed.reserved[position - 1] if position else 0,
        retries=replayed.retries,
        out_of_memory=read_failure(tape, replayed),
    )


def read_failure(tape: Tape, replayed: Replay) -> OutOfMemory | None:
    """The request (bytes) that an allocator could not meet, None where it met them all."""
    if replayed.failed_at is None:
        return None
    block = tape.order[replayed.failed_at]
    return OutOfMemory(
        op=tape.op_names[tape.ops[block]],
        module=tape.module_names[tape.modules[block]],
        phase=_phase(tape, replayed.failed_at),
        requested_bytes=tape.sizes[block],
        allocated_bytes=running_bytes(tape.order[: replayed.failed_at], replayed.taken)[-1],
        reserved_bytes=replayed.reserved[-1] if replayed.reserved else 0,
    )


def running_bytes(order: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Bytes alive before the first event and after each one, where block i counts `sizes[i]` bytes."""
    return _levels(_changes(order, sizes)).tolist()


def peak_bytes(order: Sequence[int], sizes: Sequence[int]) -> int:
    """The most bytes that are ever alive, where block i counts `sizes[i]` bytes."""
    return int(_levels(_changes(order, sizes)).max())


def live_by_category(tape: Tape) -> dict[str, dict[str, int]]:
    """Tensor bytes (as requested, not rounded) alive at each phase's end: phase -> category -> bytes."""
    splits = _by_category(tape, tape.order, _changes(tape.order, tape.sizes), [end for end, _ in tape.marks])
    return {
        phase: dict(zip(CATEGORIES, split, strict=True)) for (_, phase), split in zip(tape.marks, splits, strict=True)
    }


def _changes(order: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
    """By how many bytes each event changes what is alive (int64)."""
    events, sizes = np.asarray(order, np.int64), np.asarray(sizes, np.int64)
    return np.where(events >= 0, sizes[events], -sizes[~events])


def _levels(changes: np.ndarray) -> np.ndarray:
    """Bytes alive before the first change and after each one."""
    return np.concatenate(([0], np.cumsum(changes)))


def _phases(tape: Tape, allocated: np.ndarray, reserved: list[int]) -> tuple[PhaseUse, ...]:
    """One row per phase that was begun; a phase cut short by a lack of memory ends where the work did."""
    rows, begin, last = [], 0, len(allocated) - 1
    for mark, phase in tape.marks:
        end = min(mark, last)
        rows.append(
            PhaseUse(
                phase=phase,
                allocated_bytes=int(allocated[end]),
                peak_allocated_bytes=int(allocated[begin : end + 1].max()),
                reserved_bytes=reserved[end - 1] if end else 0,
            )
        )
        if mark > last:
            break
        begin = end
    return tuple(rows)


def _curve_positions(tape: Tape, allocated: np.ndarray, peak: int) -> list[int]:
    """At most CURVE_POINTS positions, ascending: start, phase ends, the peak, and the highest point of equal slices."""
    last = len(allocated) - 1
    chosen = {0, peak, last} | {min(mark, last) for mark, _ in tape.marks}
    slices = CURVE_POINTS - len(chosen)
    width = max(1, -(-len(allocated) // slices))
    for begin in range(0, len(allocated), width):
        chosen.add(begin + int(allocated[begin : begin + width].argmax()))
    return sorted(chosen)


def _by_category(tape: Tape, order: Sequence[int], changes: np.ndarray, positions: list[int]) -> list[tuple[int, ...]]:
    """Bytes alive per category after so many events, for each position."""
    events = np.asarray(order, np.int64)
    categories = np.frombuffer(tape.categories, np.uint8)[np.where(events >= 0, events, ~events)]
    columns = [_levels(np.where(categories == one, changes, 0))[positions] for one in range(len(CATEGORIES))]
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _phase(tape: Tape, event: int) -> str:
    """The phase in which the event at this index happens; what follows the last mark belongs to the last phase."""
    for end, phase in tape.marks:
        if event < end:
            return phase
    return tape.marks[-1][1] if tape.marks else ""

"""Allocated bytes over the work, estimated and measured, at places that both sides have in common. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from sizer.allocator.allocator import replay_events
from sizer.allocator.timeline import running_bytes
from sizer.device.comparison.sides import Sides, bounds_of

PARTS = 39  # of a phase; five phases with their ends stay within 200 points


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Allocated bytes at a place of the work: `at` is the phase's number plus the part of the phase that is done.

    Both curves have their points at the same places. A point is the most that was allocated since the one before it; the
    last one of a phase (`at` is a whole number) is the level at the phase's end.
    """

    at: float
    phase: str
    allocated_bytes: int


def curves_of(sides: Sides) -> tuple[tuple[Level, ...], tuple[Level, ...]]:
    """Allocated bytes over the work, as either side's counter would show them, at places that both have in common."""
    levels = running_bytes(sides.tape.order, replay_events(sides.tape, sides.kind).taken)
    alignment, device_levels = sides.alignment, []
    if alignment is not None:
        device_levels = running_bytes(alignment.device.order, replay_events(alignment.device, sides.kind).taken)
    curve, device_curve = [], []
    for number, (_, phase) in enumerate(sides.tape.marks):
        bounds = bounds_of(sides.tape, phase)
        assert bounds is not None  # of a phase of this tape
        begin, end = bounds
        cuts = [begin + (end - begin) * part // PARTS for part in range(PARTS + 1)]
        places = [(cut, 0) for cut in cuts]
        on_device = bounds_of(alignment.device, phase) if alignment is not None and phase in alignment.phases else None
        if alignment is not None and on_device is not None:
            places = [alignment.corresponding("estimate", cut) for cut in cuts]
            places[0] = begin, on_device[0]
        for part, ((start, device_start), (stop, device_stop)) in enumerate(pairwise(places)):
            at = number + (part + 1) / (PARTS + 1)
            curve.append(Level(at=at, phase=phase, allocated_bytes=max(levels[start : stop + 1])))
            if on_device:
                most = max(device_levels[device_start : device_stop + 1])
                device_curve.append(Level(at=at, phase=phase, allocated_bytes=most))
        curve.append(Level(at=number + 1, phase=phase, allocated_bytes=levels[end]))
        if on_device:
            device_curve.append(Level(at=number + 1, phase=phase, allocated_bytes=device_levels[places[-1][1]]))
    return tuple(curve), tuple(device_curve)

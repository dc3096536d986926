"""The time axis of a step: phases that would be a pixel wide are stretched, such as the prefill of a long generation."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from sizer.allocator.timeline import Curve

LEAST_SHARE = 0.12  # of the axis, for each phase of a generation
STRETCHED = ("prefill",)  # only curves with one of these phases are changed


def spread(curve: Curve) -> Curve:
    """Return the curve with positions at which each phase has a share of the axis that can be seen.

    Positions count allocations and releases in order. Within a phase their distances stay in proportion.
    """
    if not any(phase in STRETCHED for phase, _ in curve.phases) or len(curve) < 2:
        return curve
    whole = curve.positions[-1] - curve.positions[0]
    ends, counted = [], 0
    for _, count in curve.phases:
        counted += count
        ends.append(counted)
    starts = [0, *ends[:-1]]
    # a phase goes from its first point to the first one of the next
    edges = [curve.positions[start] for start in starts] + [curve.positions[-1]]
    least = max(round(LEAST_SHARE * whole), 1)
    widths = [(max(end - start, 1), max(end - start, least)) for start, end in pairwise(edges)]
    positions, begins = [], curve.positions[0]
    for start, end, edge, (was, now) in zip(starts, ends, edges, widths, strict=False):
        positions += [begins + round((place - edge) * now / was) for place in curve.positions[start:end]]
        begins += now
    return replace(curve, positions=tuple(positions))

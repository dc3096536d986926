"""The comparisons of ranks that train together: which of them to look at first. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from sizer.device.comparison.comparison import Comparison
from sizer.query.text import parse_query

PEAK = "peak_allocated_bytes"


def rank_of(comparison: Comparison) -> int | None:
    """The rank that was measured, None where there is one GPU."""
    return parse_query(comparison.measurement.query).rank


def world_of(comparison: Comparison) -> int:
    """How many ranks trained together, 1 where there is one GPU."""
    return parse_query(comparison.measurement.query).world


def worst(comparisons: Iterable[Comparison]) -> Comparison:
    """The comparison of a rank that did not come to its end, else of one where the estimate is wrong, else of that whose peak is
    furthest off, or which needs most."""

    def badness(comparison: Comparison) -> tuple[bool, bool, int, int]:
        peak = comparison.find(PEAK)
        if peak is None:
            return True, False, 0, 0
        return False, not comparison.holds, abs(peak.difference_bytes), peak.measured_bytes

    return max(comparisons, key=badness)

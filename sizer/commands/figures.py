"""Names of compared figures, and their errors in percent, as text."""

from __future__ import annotations

from sizer.device.comparison.judgement import SMALLEST_PERCENT
from sizer.device.comparison.row import TENSORS

TITLES = TENSORS | {
    "peak_allocated_bytes": "peak allocated",
    "peak_reserved_bytes": "peak reserved",
    "process_bytes": "process",
    "allocated_bytes": "allocated",
    "reserved_bytes": "reserved",
}


def percent(error: float | None) -> str:
    """Return a signed error as text."""
    if error is None:
        return "nothing measured"
    if 0 < abs(error) < SMALLEST_PERCENT:
        return "< 0.01%"
    return f"{error:+.2%}" if error else "0%"

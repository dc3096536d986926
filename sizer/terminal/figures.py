"""What a figure is called, and how far off it is, in the words of the command line."""

from __future__ import annotations

from sizer.device.comparison.judgement import SMALLEST_PERCENT

TITLES = {
    "weights_bytes": "weights",
    "buffers_bytes": "buffers",
    "inputs_bytes": "inputs",
    "gradients_bytes": "gradients",
    "optimizer_bytes": "optimizer state",
    "activations_bytes": "activations after forward",
    "peak_allocated_bytes": "peak allocated",
    "peak_reserved_bytes": "peak reserved",
    "process_bytes": "process",
    "allocated_bytes": "allocated",
    "reserved_bytes": "reserved",
}


def percent(error: float | None) -> str:
    """A signed error as text."""
    if error is None:
        return "nothing measured"
    if 0 < abs(error) < SMALLEST_PERCENT:
        return "< 0.01%"
    return f"{error:+.2%}" if error else "0%"

"""Titles and formats of a comparison's figures. They hold no text of the comparison, which may be a stranger's file."""

from __future__ import annotations

import re

from sizer.device.comparison.row import TENSORS, Row
from sizer.device.record.measurement import DeviceFacts
from sizer.report.phases import PHASE_TITLES
from sizer.ui.styling import FIGURE_VERDICTS, MARKS

PEAKS = {
    "peak_allocated_bytes": "peak allocated",
    "peak_reserved_bytes": "peak reserved",
    "process_bytes": "process, as the driver reports it",
}
OF_PHASE = {
    "allocated_bytes": "allocated at its end",
    "peak_allocated_bytes": "peak",
    "reserved_bytes": "reserved at its end",
}
OTHER = "another figure"
LEAST_PERCENT = 0.0001
_DEVICE = re.compile(r"cpu|mps|(cuda|xpu):\d{1,3}", re.ASCII)


def quantity_title(quantity: str) -> str:
    """Return the title of a comparison's quantity."""
    if quantity in PEAKS or quantity in TENSORS:
        return (PEAKS | TENSORS)[quantity]
    parts = quantity.split(".")
    if len(parts) == 3 and parts[1] in PHASE_TITLES and parts[2] in OF_PHASE:
        return f"{PHASE_TITLES[parts[1]]}: {OF_PHASE[parts[2]]}"
    return OTHER


def device_title(facts: DeviceFacts) -> str:
    """Return PyTorch's name of a device ("cuda:0"); "a device" if the text is no such name."""
    return facts.device if _DEVICE.fullmatch(facts.device) else "a device"


def format_error(error: float | None) -> str:
    """Return a signed fraction as a percentage ("+0.4 %", with a non-breaking space); "–" for None.

    A smaller error than LEAST_PERCENT reads "< LEAST_PERCENT": "0 %" means no error.
    """
    if error is None:
        return "–"
    if error == 0:
        return "0\N{NO-BREAK SPACE}%"
    percent, sign = abs(100 * error), "+" if error > 0 else "−"
    decimals = 1 if percent >= 0.1 else 2 if percent >= 0.01 else 4
    size = f"{max(percent, LEAST_PERCENT):,.{decimals}f}"
    return f"{sign}{size}\N{NO-BREAK SPACE}%"


def format_difference(size_bytes: int) -> str:
    """Return a signed difference in bytes ("+1,024"); "0" if there is none."""
    return f"{size_bytes:+,}".replace("-", "−") if size_bytes else "0"


def marked_error(row: Row) -> str:
    """Return a row's error with a mark: ✓ within its tolerance, ✕ outside, no mark without a tolerance."""
    mark = "" if row.holds is None else f"{MARKS[FIGURE_VERDICTS[row.holds]]}\N{NO-BREAK SPACE}"
    return f"{mark}{'exact' if row.error == 0 else format_error(row.error)}"

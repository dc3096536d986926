"""Style of figures: one unit for a table or chart, and one colour for each category of memory.

Cool colours are memory that stays from step to step, warm colours are memory within a step, greys are memory of the allocator and
the driver. Seven colours are those of Okabe and Ito (Color Universal Design, 2008). All are distinguishable with any colour vision
(tested).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sizer.base.units import GIB, KIB, MIB
from sizer.report.fit import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A unit's name and its size in bytes."""

    name: str
    unit_bytes: int

    def of(self, size_bytes: int) -> float:
        """Return a number of bytes in this unit."""
        return size_bytes / self.unit_bytes

    def number(self, size_bytes: int) -> str:
        """Return a number of bytes as text in this unit, to three digits or more: "1,024.00", "0.052", "<0.001"."""
        size = abs(self.of(size_bytes))
        number = "<0.001" if 0 < size < 0.001 else f"{size:,.{3 if 0 < size < 0.9995 else 2}f}"
        return f"{'−' if size_bytes < 0 else ''}{number}"

    def text(self, size_bytes: int) -> str:
        """Return `number` with the unit: "0.052 GiB"."""
        return f"{self.number(size_bytes)} {self.name}"


GIBIBYTES = Scale(name="GiB", unit_bytes=GIB)
_SCALES = (GIBIBYTES, Scale(name="MiB", unit_bytes=MIB), Scale(name="KiB", unit_bytes=KIB))


def scale_for(sizes: Iterable[int]) -> Scale:
    """Return the largest unit in which the largest of `sizes` (bytes) is at least 1; KiB if they are all tiny.

    Two decimals in a table then show three digits or more of it.
    """
    largest = max(sizes, default=0)
    return next((scale for scale in _SCALES if largest >= scale.unit_bytes), _SCALES[-1])


def round_figure(value: float | None, decimals: int = 2) -> float | None:
    """Return a figure for a table with this number of decimals. A negative one that rounds to zero is 0, not "-0.00"."""
    return value if value is None or value >= 0 or round(value, decimals) else 0.0


# ------------------------------------------------------------------------------------------------------------- palette


COLOURS: dict[str, str] = {
    "parameter": "#0072B2",
    "frozen parameter": "#7755DD",
    "buffer": "#8E2F86",
    "gradient": "#56B4E9",
    "optimizer state": "#009E73",
    "activation": "#E69F00",
    "temporary": "#F0E442",
    "input": "#CC79A7",
    "workspace": "#D55E00",
    "kv cache": "#7A4A12",
    "allocator cache": "#C4CBD2",
    "outside PyTorch": "#5F6A75",
}
WIDE = 769  # pixels of the narrowest window in which Streamlit keeps the sidebar open
FREE = "free"  # free memory has no colour
INK = "#7D8792"  # rules and labels inside charts: readable on white and on near-black

# Background of a table's cell, in both themes. The mark repeats the information without colour.
TINTS: dict[Verdict, str] = {
    "fits": "rgba(0, 158, 115, 0.18)",
    "tight": "rgba(86, 180, 233, 0.24)",
    "may not fit": "rgba(230, 159, 0, 0.26)",
    "does not fit": "rgba(213, 94, 0, 0.18)",
}
VERDICT_COLOURS: dict[Verdict, str] = {
    "fits": "#009E73",
    "tight": "#56B4E9",
    "may not fit": "#E69F00",
    "does not fit": "#D55E00",
}
MARKS: dict[Verdict, str] = {"fits": "✓", "tight": "!", "may not fit": "?", "does not fit": "✕"}
FIGURE_VERDICTS: dict[bool, Verdict] = {True: "fits", False: "does not fit"}  # colours of checked figures


def format_verdict(verdict: Verdict) -> str:
    """Return a verdict with its mark."""
    return f"{MARKS[verdict]} {verdict}"

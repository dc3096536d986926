"""The colours of the page: one per memory category, the same everywhere, told apart with any colour vision (tested).

Cool colours are memory that stays from step to step, warm ones memory that comes and goes within a step, greys what the
allocator and the driver hold besides. Seven are those of Okabe and Ito (Color Universal Design, 2008).
"""

from __future__ import annotations

from sizer.report.fit import Verdict

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
FREE = "free"  # what no process has; it has no colour
INK = "#7D8792"  # rules and labels inside charts: readable on white and on near-black

# Behind a table's cell, on either theme; the mark says the same without colour.
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
HELD: dict[bool, Verdict] = {True: "fits", False: "does not fit"}  # whose colours a figure has that was checked


def marked(verdict: Verdict) -> str:
    """Return a verdict with its mark."""
    return f"{MARKS[verdict]} {verdict}"

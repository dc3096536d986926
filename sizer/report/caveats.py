"""Facts that change the answer and must be read with it: short lines next to the headline, with details below."""

from __future__ import annotations

from collections.abc import Iterator

from sizer.base.units import counted
from sizer.report.report import Report

# First words of notes on facts that change the figure much, or that a reader may have assumed otherwise.
MOVES = ("The model resizes each ", "Built from scratch: every layer of the backbone trains")
UNQUANTISED_PART = "Not quantised: "  # first words of a note on modules that a quantizer left unquantised


def caveats(report: Report) -> tuple[str, ...]:
    """Return the cautions of a report, and one line for each item that it counts differently than a reader may expect."""
    return tuple(_caveats(report))


def _caveats(report: Report) -> Iterator[str]:
    for caution in report.cautions:
        yield f"{caution}."
    for note in report.notes:
        if note.startswith((UNQUANTISED_PART, *MOVES)):
            yield f"{note[0].lower()}{note[1:]}"
    if report.request.get("attention") == "eager":
        yield "attention is eager: it keeps the scores of all pairs of tokens. SDPA does not."
    tokens = report.request.get("sequence_length")
    if report.request.get("mode") == "inference" and tokens is not None:
        yield f"this is one forward pass over all {tokens:,} tokens; generating token by token is not counted."
    if stand_ins := report.explanation.stand_ins if report.explanation is not None else ():
        yield f"{counted(len(stand_ins), 'value')} that the code reads had to be assumed: see Not counted."

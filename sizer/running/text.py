"""A dry run as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from sizer.base.units import format_bytes
from sizer.running.outcome import Outcome, on_other
from sizer.tape.tape import CATEGORIES

_ROWS = 8


def format_outcome(outcome: Outcome) -> Iterator[str]:
    """Yield the report: the headline, the phases, the peak, and what the figures depend on."""
    yield ""
    yield f"Dry run on {outcome.gpu.name}{_rank(outcome)}: {_ending(outcome)} ({outcome.seconds:.0f} s)"
    row = outcome.estimate
    if row is None or outcome.report is None:
        yield "The script allocated nothing on a device."
    else:
        yield from _figures(outcome)
    yield f"Host: {format_bytes(outcome.host_bytes)} at the peak, {format_bytes(outcome.pinned_bytes)} of it pinned."
    yield f"Route: {outcome.route} ({outcome.route_reason})."
    for caution in outcome.report.cautions if outcome.report else ():
        yield f"Note: {caution}."
    for text in outcome.report.uncounted if outcome.report else ():
        yield f"Not counted: {text}."
    yield from _list("Assumed counts", outcome.assumed_counts)
    yield from _list("Lines that read values that were not computed", outcome.reads)
    for note in outcome.report.notes if outcome.report else ():
        if outcome.report and note not in outcome.report.cautions:
            yield f"Note: {note}."


def _rank(outcome: Outcome) -> str:
    return f", rank {outcome.rank} of {outcome.world}" if outcome.world > 1 else ""


def _ending(outcome: Outcome) -> str:
    steps = f"{outcome.steps} optimizer step{'' if outcome.steps == 1 else 's'}"
    if outcome.script_status == "stopped":
        return f"stopped after {steps}"
    if outcome.script_status == "completed":
        return f"ran to its end, {steps}"
    more = f": {outcome.script_message.splitlines()[0]}" if outcome.script_message else ""
    return f"{outcome.script_status} after {steps}{more}"


def _figures(outcome: Outcome) -> Iterator[str]:
    row, gpu = outcome.estimate, outcome.gpu
    assert row is not None, "the script used a device"
    assumed = ", with assumed counts" if outcome.assumed_counts else ""
    peaks = f"{format_bytes(row.peak_allocated_bytes)} allocated, {format_bytes(row.peak_reserved_bytes)} reserved"
    yield f"Peak: {peaks}, {format_bytes(row.process_bytes)} for the process of {format_bytes(gpu.total_bytes)}{assumed}."
    if row.out_of_memory is not None:
        failed = row.out_of_memory
        yield (
            f"It does not fit: {format_bytes(outcome.missing_bytes)} are missing. {failed.op} in {failed.phase} asks for "
            f"{format_bytes(failed.requested_bytes)} with {format_bytes(failed.allocated_bytes)} allocated."
        )
    elif outcome.script_status == "out of memory":
        yield "It does not fit: PyTorch raised OutOfMemoryError."
    else:
        yield "It fits." if row.fits is True else "It fits, but within the range of what is uncertain it may not."
    if not outcome.expandable and gpu.backend == "cuda":
        other = on_other(outcome, gpu, expandable=True)
        fits = "" if other.out_of_memory is None else ", and does not fit"
        yield f"With expandable segments: {format_bytes(other.peak_reserved_bytes)} reserved{fits}."
    if outcome.fits_on:
        yield f"GPUs of the same rules on which it fits: {', '.join(outcome.fits_on)}."
    yield ""
    yield f"{'phase':<10}{'peak allocated':>16}{'at its end':>14}{'reserved':>14}"
    for use in row.phases:
        cells = (use.peak_allocated_bytes, use.allocated_bytes, use.reserved_bytes)
        yield f"{use.phase:<10}{format_bytes(cells[0]):>16}{format_bytes(cells[1]):>14}{format_bytes(cells[2]):>14}"
    yield ""
    alive = ", ".join(f"{name} {format_bytes(row.at_peak[name])}" for name in CATEGORIES if row.at_peak.get(name))
    yield f"Alive at the peak ({row.peak_phase}): {alive}"
    for title, rows in (("by line", outcome.lines_at_peak), ("by module", outcome.modules_at_peak)):
        yield f"  {title}:"
        for name, size in rows[:_ROWS]:
            yield f"    {format_bytes(size):>12}  {name or 'outside of modules'}"
    yield ""


def _list(title: str, rows: tuple[tuple[str, int], ...]) -> Iterator[str]:
    if rows:
        yield f"{title}:"
        for where, count in rows[:_ROWS]:
            yield f"    {count:>6} x {where}"
        if len(rows) > _ROWS:
            yield f"    and {len(rows) - _ROWS} more lines"

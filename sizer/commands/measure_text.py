"""A comparison, or a measurement that nothing is held against, as lines of plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sizer.base.units import counted, format_bytes
from sizer.catalogue.parallel import PARALLELS
from sizer.commands.figures import TITLES, percent
from sizer.commands.text import format_table, size_text, to_printable
from sizer.device.comparison.comparison import PEAK, Comparison, rank_of, worst
from sizer.device.comparison.divergence import Scratch
from sizer.device.comparison.row import Row
from sizer.device.record.measurement import Measurement, Spread, Timing
from sizer.query.text import parse_query

SCRATCH_SHOWN = 5
_COUNTERS = ("allocated_bytes", "peak_allocated_bytes", "reserved_bytes", "peak_reserved_bytes", "driver_bytes")


def format_comparison(comparison: Comparison) -> str:
    """What was measured and how the estimate compares: verdict, figures side by side, where the two diverge, time, notes."""
    parts = (
        _subject(comparison),
        [comparison.verdict],
        _figures(comparison.rows),
        comparison.wrong,
        _divergences(comparison),
        _scratch(comparison.scratch),
        [] if comparison.measurement.timing is None else _timing(comparison.measurement.timing),
        (f"Note: {note}" for note in comparison.notes),
    )
    return to_printable("\n\n".join("\n".join(lines) for part in parts if (lines := list(part))))


def format_ranks(comparisons: Sequence[Comparison]) -> str:
    """The peak of each rank on both sides, then the comparison of the worst."""
    shown = worst(comparisons)
    header = ("rank", "estimated", "measured", "difference", "error", "")
    lines = format_table(header, map(_rank_cells, comparisons))
    title = f"Peak allocated on each of {counted(len(comparisons), 'rank')}, and rank {rank_of(shown)} whole:"
    return "\n\n".join(("\n".join((title, *lines)), format_comparison(shown)))


def _rank_cells(comparison: Comparison) -> tuple[str, ...]:
    peak = comparison.find(PEAK)
    rank = str(rank_of(comparison))
    if peak is None:
        return rank, format_bytes(comparison.estimate.peak_allocated_bytes), "", "", "", "not to its end"
    _, *figures, _, _ = _cells(peak)
    return rank, *figures, "" if comparison.holds else "WRONG"


def format_measurement(measurement: Measurement) -> str:
    """A measurement that nothing is held against: what was read after each phase."""
    header = ("after", "allocated", "peak allocated", "reserved", "peak reserved", "driver")
    rows = (
        (reading.phase, *(size_text(getattr(reading, name)) for name in _COUNTERS)) for reading in measurement.phases
    )
    return to_printable("\n".join([f"measured on {_device(measurement)}", "", *format_table(header, rows)]))


# ---------------------------------------------------------------------------------------------------------- comparison


def _subject(comparison: Comparison) -> Iterator[str]:
    measurement = comparison.measurement
    model = f"{comparison.architecture} ({comparison.class_name})"
    yield f"{model}, {comparison.task} in {measurement.dtype} at batch {measurement.batch}{_place(measurement)}"
    yield f"measured on {_device(measurement)}"


def _place(measurement: Measurement) -> str:
    request = parse_query(measurement.query)
    if request.parallel == "none":
        return ""
    return f", rank {request.rank} of {request.world} by {PARALLELS[request.parallel].title}"


def _device(measurement: Measurement) -> str:
    facts = measurement.device
    memory = "" if facts.total_bytes is None else f" with {format_bytes(facts.total_bytes)}"
    torch = measurement.versions.get("torch", "unknown")
    return f"{facts.device}: {facts.name}{memory}, torch {torch}, at {measurement.measured_at} ({measurement.source})"


def _figures(rows: Sequence[Row]) -> Iterator[str]:
    header = ("", "estimated", "measured", "difference", "error", "may be", "")
    yield from format_table(header, map(_cells, rows))


def _cells(row: Row) -> tuple[str, ...]:
    return (
        _title(row),
        format_bytes(row.estimated_bytes),
        format_bytes(row.measured_bytes),
        _signed(row.difference_bytes),
        "exact" if row.difference_bytes == 0 else percent(row.error),
        _promise(row),
        {True: "", False: "WRONG", None: "not judged"}[row.holds],
    )


def _title(row: Row) -> str:
    name = TITLES.get(row.quantity.rpartition(".")[2], row.quantity)
    return f"{row.phase}: {name}" if row.quantity.startswith("phases.") else name


def _promise(row: Row) -> str:
    if row.tolerance is None:
        return ""
    if row.tolerance == 0:
        return f"exact but {format_bytes(row.allowance_bytes)}" if row.allowance_bytes else "exact"
    return f"{row.tolerance:.0%} off"


def _divergences(comparison: Comparison) -> Iterator[str]:
    first = comparison.first_divergence
    if first is None:
        return
    level = _signed(first.level_difference_bytes)
    yield f"The two first diverge in {first.describe()}; the estimate's level is {level} there."
    others = [one for one in comparison.largest_divergences if one != first]
    if others:
        yield "The divergences that hold the most:"
    yield from (f"  up to {format_bytes(one.most_bytes)} in {one.describe()}" for one in others)


def _scratch(scratch: Sequence[Scratch]) -> Iterator[str]:
    if scratch:
        yield "Kernels hold inside, beyond what both sides have:"
    for one in scratch[:SCRATCH_SHOWN]:
        where = f" in {one.module}" if one.module else ""
        size = f"{format_bytes(one.most_bytes)} (the estimate: {format_bytes(one.estimated_bytes)})"
        yield f"  {one.phase}: {one.op or 'code outside operators'}{where}, {counted(one.times, 'time')}, up to {size}"


def _timing(timing: Timing) -> Iterator[str]:
    yield f"A step takes {_seconds(timing.step)} ({timing.clock}, after {counted(timing.warm_up, 'step')} of warm-up)."
    yield f"Without waiting for the device one would have read {_seconds(timing.unsynchronized)}."
    for one in timing.transfers:
        memory = "pinned" if one.pinned else "plain"
        how = f"{memory} memory{', non_blocking' if one.non_blocking else ''}"
        text = f"{format_bytes(one.bytes)} from {how} take {_seconds(one.done)}"
        yield f"  {text}; without waiting one reads {_seconds(one.issued)}"


def _seconds(spread: Spread) -> str:
    low, median, high = map(_duration, (spread.low_seconds, spread.median_seconds, spread.high_seconds))
    return f"{median} ({low} to {high}, {counted(spread.runs, 'run')})"


def _duration(seconds: float) -> str:
    unit, name = next(((unit, name) for unit, name in _TIMES if seconds >= unit), _TIMES[-1])
    return f"{seconds / unit:.{0 if seconds >= 100 * unit else 2}f} {name}"


_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def _signed(size: int) -> str:
    return f"+{format_bytes(size)}" if size > 0 else format_bytes(size)

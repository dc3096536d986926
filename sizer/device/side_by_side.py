"""A comparison and the ledger as lines of plain text, for the command line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sizer.device.comparison import Comparison
from sizer.device.judgement import SMALLEST_PERCENT
from sizer.device.ledger_row import LedgerRow
from sizer.device.measurement import Measurement, Spread, Timing
from sizer.device.parting import Scratch
from sizer.device.row import Row
from sizer.device.statistics import ErrorStatistics
from sizer.terminal import format_table, to_printable
from sizer.units import format_bytes

SCRATCH_SHOWN = 5
IN_STATISTICS = ("peak_allocated_bytes", "peak_reserved_bytes", "process_bytes")

_TITLES = {
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


def format_comparison(comparison: Comparison) -> str:
    """What was measured and how the estimate compares: the verdict, every figure side by side, where both part, time, notes."""
    parts = (
        _subject(comparison),
        [comparison.verdict],
        _figures(comparison.rows),
        comparison.wrong,
        _partings(comparison),
        _scratch(comparison.scratch),
        [] if comparison.measurement.timing is None else _timing(comparison.measurement.timing),
        (f"Note: {note}" for note in comparison.notes),
    )
    return to_printable("\n\n".join("\n".join(lines) for part in parts if (lines := list(part))))


def format_measurement(measurement: Measurement) -> str:
    """A measurement that nothing is held against: what was read after each phase."""
    header = ("after", "allocated", "peak allocated", "reserved", "peak reserved", "driver")
    rows = (
        (
            reading.phase,
            *(
                "" if size is None else format_bytes(size)
                for size in (
                    reading.allocated_bytes,
                    reading.peak_allocated_bytes,
                    reading.reserved_bytes,
                    reading.peak_reserved_bytes,
                    reading.driver_bytes,
                )
            ),
        )
        for reading in measurement.phases
    )
    return to_printable("\n".join([f"measured on {_device(measurement)}", "", *format_table(header, rows)]))


def format_rows(rows: Sequence[LedgerRow]) -> Iterator[str]:
    """The ledger's rows as a table, with the errors of the three peaks."""
    header = (
        "id",
        "measured",
        "architecture",
        "mode",
        "dtype",
        "batch",
        "device",
        "torch",
        "allocated",
        "reserved",
        "process",
        "",
    )
    yield from format_table(header, map(_ledger_cells, rows), left=8)


def format_statistics(statistics: Sequence[ErrorStatistics]) -> Iterator[str]:
    """Signed errors of the figures that most is made of, per device and family."""
    header = ("error of", "device", "family", "count", "median", "worst", "bias")
    rows = (
        (
            _TITLES[row.quantity],
            row.device,
            row.family,
            str(row.count),
            *(_percent(error) for error in (row.median, row.worst, row.bias)),
        )
        for row in statistics
        if row.quantity in IN_STATISTICS
    )
    yield from format_table(header, rows, left=3)


# ---------------------------------------------------------------------------------------------------------- comparison


def _subject(comparison: Comparison) -> Iterator[str]:
    measurement = comparison.measurement
    model = f"{comparison.architecture} ({comparison.class_name})"
    yield f"{model}, {comparison.mode} in {measurement.dtype} at batch {measurement.batch}"
    yield f"measured on {_device(measurement)}"


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
        "exact" if row.difference_bytes == 0 else _percent(row.error),
        _promise(row),
        {True: "", False: "WRONG", None: "not judged"}[row.holds],
    )


def _title(row: Row) -> str:
    name = _TITLES.get(row.quantity.rpartition(".")[2], row.quantity)
    return f"{row.phase}: {name}" if row.quantity.startswith("phases.") else name


def _promise(row: Row) -> str:
    if row.tolerance is None:
        return ""
    if row.tolerance == 0:
        return f"exact but {format_bytes(row.allowance_bytes)}" if row.allowance_bytes else "exact"
    return f"{row.tolerance:.0%} off"


def _partings(comparison: Comparison) -> Iterator[str]:
    first = comparison.parting
    if first is None:
        return
    level = _signed(first.level_difference_bytes)
    yield f"Both first part in {first.describe()}; the estimate's level is {level} there."
    others = [one for one in comparison.largest_partings if one != first]
    if others:
        yield "The partings that hold the most:"
    yield from (f"  up to {format_bytes(one.most_bytes)} in {one.describe()}" for one in others)


def _scratch(scratch: Sequence[Scratch]) -> Iterator[str]:
    if scratch:
        yield "Kernels hold inside, beyond what both sides have:"
    for one in scratch[:SCRATCH_SHOWN]:
        where = f" in {one.module}" if one.module else ""
        size = f"{format_bytes(one.most_bytes)} (the estimate: {format_bytes(one.estimated_bytes)})"
        yield f"  {one.phase}: {one.op or 'code outside operators'}{where}, {one.times} times, up to {size}"


def _timing(timing: Timing) -> Iterator[str]:
    yield f"A step takes {_seconds(timing.step)} ({timing.clock}, after {timing.warm_up} steps of warm-up)."
    yield f"Without waiting for the device one would have read {_seconds(timing.unsynchronized)}."
    for one in timing.transfers:
        memory = "pinned" if one.pinned else "plain"
        how = f"{memory} memory{', non_blocking' if one.non_blocking else ''}"
        text = f"{format_bytes(one.bytes)} from {how} take {_seconds(one.done)}"
        yield f"  {text}; without waiting one reads {_seconds(one.issued)}"


def _seconds(spread: Spread) -> str:
    low, median, high = map(_duration, (spread.low_seconds, spread.median_seconds, spread.high_seconds))
    return f"{median} ({low} to {high}, {spread.runs} runs)"


def _duration(seconds: float) -> str:
    unit, name = next(((unit, name) for unit, name in _TIMES if seconds >= unit), _TIMES[-1])
    return f"{seconds / unit:.{0 if seconds >= 100 * unit else 2}f} {name}"


_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


# -------------------------------------------------------------------------------------------------------------- ledger


def _ledger_cells(row: LedgerRow) -> tuple[str, ...]:
    pairs = (
        (row.estimated_peak_allocated_bytes, row.measured_peak_allocated_bytes),
        (row.estimated_peak_reserved_bytes, row.measured_peak_reserved_bytes),
        (row.estimated_process_bytes, row.measured_process_bytes),
    )
    errors = ("" if not measured else _percent((estimated - measured) / measured) for estimated, measured in pairs)
    about = (row.architecture, row.mode, row.dtype, str(row.batch), row.device_name, row.torch)
    return str(row.id), row.measured_at[:10], *about, *errors, "" if row.holds else "WRONG"


def _percent(error: float | None) -> str:
    if error is None:
        return "nothing measured"
    if 0 < abs(error) < SMALLEST_PERCENT:
        return "< 0.01%"
    return f"{error:+.2%}" if error else "0%"


def _signed(size: int) -> str:
    return f"+{format_bytes(size)}" if size > 0 else format_bytes(size)

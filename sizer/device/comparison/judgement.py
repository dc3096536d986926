"""Meaning of a comparison in words: the wrong line of the estimate with its cause, the verdict, and remarks."""

from __future__ import annotations

from collections.abc import Iterator

from sizer.allocator.allocator import replay_events
from sizer.allocator.timeline import running_bytes
from sizer.base.units import format_bytes, pluralize
from sizer.device.comparison.alignment import Alignment, Side
from sizer.device.comparison.divergence import join_shares, operator_text, shares_at
from sizer.device.comparison.row import Row, Sides, bounds_of
from sizer.device.record.measurement import DeviceOutOfMemory
from sizer.report.advice import PHRASES
from sizer.report.report import Report
from sizer.tape.tape import Tape

SMALLEST_PERCENT = 0.00005  # a smaller error is printed in bytes, because it would round to 0.00%


def explain(sides: Sides, row: Row) -> str:
    """Explain a wrong line of the estimate: by how much it is off, and the cause."""
    way = "too high" if row.difference_bytes > 0 else "too low"
    percent = "" if row.error is None else f" ({abs(row.error):.2%})"
    sizes = f"estimated {format_bytes(row.estimated_bytes)}, measured {format_bytes(row.measured_bytes)}"
    promise = "promised exact" if row.tolerance == 0 else f"tolerance {row.tolerance:.1%}"
    text = f"{row.quantity} is {format_bytes(abs(row.difference_bytes))}{percent} {way}: {sizes}, {promise}"
    return f"{text}. {cause[0].upper()}{cause[1:]}" if (cause := _cause(sides, row)) else text


def _cause(sides: Sides, row: Row) -> str:
    name = row.quantity.rpartition(".")[2]
    if name in _TENSORS:
        return _TENSORS[name]
    if name == "process_bytes":
        return _process_cause(sides, row)
    if sides.alignment is None:
        return "the place is unknown without a recording of the device"
    if name in ("reserved_bytes", "peak_reserved_bytes"):
        return _reserved_cause(sides, sides.alignment.device, row)
    return _allocated_cause(sides, sides.alignment, row, name)


_TENSORS = {
    "weights_bytes": "category parameter, phase load",
    "buffers_bytes": "category buffer, phase load",
    "inputs_bytes": "category input: both sides did not get the same batch",
    "gradients_bytes": "category gradient, phase backward",
    "optimizer_bytes": "category optimizer state, phase optimizer",
}


def _allocated_cause(sides: Sides, alignment: Alignment, row: Row, name: str) -> str:
    """Describe the memory that only one side holds, at the phase's end or at the larger of two peaks."""
    bounds = {side: found for side, tape in sides.tapes if (found := bounds_of(tape, row.phase)) is not None}
    if len(bounds) < len(sides.tapes):
        return ""
    side: Side = "estimate" if row.difference_bytes > 0 else "device"
    begin, end = bounds[side]
    where = f"at the end of {row.phase}"
    if name == "peak_allocated_bytes":
        levels = alignment.sides[side].levels[begin : end + 1]
        end = begin + levels.index(max(levels))
        tape = dict(sides.tapes)[side]
        whose = "the estimate's" if side == "estimate" else "the device's"
        where = f"at {whose} peak, {_event_text(tape, end)}"
    shares = shares_at(alignment, side, end)
    return f"{where}: {join_shares(shares)}" if shares else f"{where} both have the same tensors"


def _reserved_cause(sides: Sides, recording: Tape, row: Row) -> str:
    """Return whether the events or the allocator's rules are wrong: the device's own events, replayed by our rules, tell."""
    reserved = replay_events(recording, sides.kind).reserved
    end = bounds_of(recording, row.phase)
    ours = int(reserved.max(initial=0) if row.quantity == "peak_reserved_bytes" else reserved[end[1] - 1] if end else 0)
    replayed = f"our replay of the device's own allocations reserves {format_bytes(ours)}"
    if abs(ours - row.measured_bytes) < abs(row.difference_bytes) // 2:
        return f"{replayed}: the allocations differ, see where the two diverge"
    return f"{replayed}: the rules of the allocator differ"


def _process_cause(sides: Sides, row: Row) -> str:
    reserved = sides.measured.peak_reserved_bytes
    if reserved is None:
        return ""
    outside = format_bytes(row.measured_bytes - reserved)
    assumed = format_bytes(row.estimated_bytes - sides.estimate.peak_reserved_bytes)
    return f"outside the allocator the device holds {outside}, the estimate assumes {assumed}"


def wrong_fit(sides: Sides) -> Iterator[str]:
    """Yield a sentence if one side ran out of memory and the other did not predict it."""
    failed, fits = sides.measured.out_of_memory, sides.estimate.fits
    if failed is not None and fits is True:
        needed = format_bytes(sides.estimate.process_bytes)
        yield f"the estimate says that it fits ({needed} for the process); the device ran out of memory in {failed.phase}"
    if sides.is_complete and fits is False and sides.kind != "cpu":
        yield f"the estimate says that it does not fit ({_where_estimate_fails(sides)}); the device did the work"


def _where_estimate_fails(sides: Sides) -> str:
    failed = sides.estimate.out_of_memory
    if failed is None:
        return f"at least {format_bytes(sides.estimate.process_low_bytes)} for the process"
    return f"{operator_text(failed.op, failed.module)} would fail in {failed.phase}"


def _event_text(tape: Tape, position: int) -> str:
    event = tape.order[position - 1] if position else -1
    if event < 0:
        return "where the phase begins"
    return operator_text(tape.op_names[tape.ops[event]], tape.module_names[tape.modules[event]])


# ---------------------------------------------------------------------------------------------------------------- text


def verdict_of(sides: Sides, rows: tuple[Row, ...]) -> str:
    """Return the result in one or two sentences."""
    judged = [row.holds for row in rows if row.holds is not None]
    held = sum(judged)
    every = "the one figure holds" if held == 1 else f"all {held} figures hold"
    figures = every if held == len(judged) else f"{held} of {len(judged)} figures hold"
    until = f"; up to there {figures}." if judged else ", before anything was read."
    if sides.measured.failure is not None:
        return f"The device did not complete the work ({sides.measured.failure}){until}"
    if sides.measured.out_of_memory is not None:
        return f"{_out_of_memory_text(sides, sides.measured.out_of_memory)}{until}"
    peak = next((row for row in rows if row.quantity == "peak_allocated_bytes"), None)
    text = f"{figures[0].upper()}{figures[1:]}"
    if peak is not None:
        text += f"; the peak of allocated memory is {_error_text(peak)}"
    fit = next(wrong_fit(sides), None)
    return f"{text}. But {fit}." if fit else f"{text}."


def _out_of_memory_text(sides: Sides, failed: DeviceOutOfMemory) -> str:
    asked = "" if failed.requested_bytes is None else f", requesting {format_bytes(failed.requested_bytes)}"
    free = "" if failed.free_bytes is None else f" with {format_bytes(failed.free_bytes)} free"
    verdict = sides.estimate.verdict
    said = (
        f"as the estimate predicted ({_where_estimate_fails(sides)})"
        if verdict == "does not fit"
        else f"the estimate predicted that it {PHRASES[verdict]}"
    )
    return f"The device ran out of memory in {failed.phase}{asked}{free}; {said}"


def _error_text(row: Row) -> str:
    if row.difference_bytes == 0:
        return f"exact ({format_bytes(row.measured_bytes)})"
    way = "too high" if row.difference_bytes > 0 else "too low"
    error = abs(row.error or 0)  # 0: tiny, or of nothing measured
    size = format_bytes(abs(row.difference_bytes)) if error < SMALLEST_PERCENT else f"{error:.2%}"
    return f"{size} {way} ({format_bytes(row.estimated_bytes)} for {format_bytes(row.measured_bytes)})"


def notes_on(sides: Sides, report: Report) -> Iterator[str]:
    """Yield omissions with their reasons, and other facts to know before trusting a figure."""
    yield from (f"the measurement may not be trusted: {doubt}" for doubt in sides.measured.doubts)
    if sides.measured.retries:
        yield (
            f"the allocator released cached memory and retried {pluralize(sides.measured.retries, 'time')}: peaks and reserved "
            "memory are from a device that was nearly full"
        )
    yield from _left_out(sides)
    yield from _version_notes(sides, report)
    if sides.recording is None:
        yield "the device's allocations were not recorded: where the two diverge is not known"
    else:
        yield from _recording_notes(sides, sides.recording)
    yield from (f"the estimate does not count: {text}" for text in report.uncounted)


def _left_out(sides: Sides) -> Iterator[str]:
    if sides.kind == "cpu":
        yield (
            "the CPU's allocator keeps no cache, so there is no reserved memory to compare; the system's figure of the "
            "process includes Python and its libraries and is not compared either"
        )
    if sides.kind == "mps":
        yield "on MPS peaks are sampled, and nothing is promised of them or of the heaps: those rows are shown, not judged"
    if sides.kind == "cuda" and sides.measured.tensors.activations_bytes is not None:
        own = format_bytes(sides.estimate.activations_bytes)
        yield (
            "activations are the increase of the allocator's counter, on both sides, with rounding and libraries' workspaces "
            f"(the tensors themselves take {own})"
        )
    if not sides.is_complete:
        yield "the device did not complete the work: figures of the whole work are not compared"
    elif sides.measured.peak_allocated_bytes is None:
        yield "this device has no counter of its peak: peaks are not compared"
    if sides.kind == "cuda" and sides.is_complete and sides.measured.process_bytes is None:
        yield "the driver did not report the memory of the process: it is not compared"


def _version_notes(sides: Sides, report: Report) -> Iterator[str]:
    for name, ours in report.versions.items():
        theirs = sides.measured.versions.get(name, "")
        if name != "sizer" and ours.partition("+")[0] != theirs.partition("+")[0] and ours and theirs:
            yield f"the estimate was made with {name} {ours}, the measurement with {theirs}"


def _recording_notes(sides: Sides, recording: Tape) -> Iterator[str]:
    """Yield whether the recording is consistent with the device's own counters."""
    levels = running_bytes(recording.order, replay_events(recording, sides.kind).block_bytes)
    ends = {phase: end for end, phase in recording.marks}
    for reading in sides.measured.phases:
        if reading.phase in ends and levels[ends[reading.phase]] != reading.allocated_bytes:
            found = f"{levels[ends[reading.phase]]:,} bytes at the end of {reading.phase}"
            counter = f"{reading.allocated_bytes:,}"
            yield f"the recording adds up to {found}, the counter says {counter}: where the two diverge is less sure"
            return

"""How a comparison is made: a report of one cell, its tape, and what was measured of the same work. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from sizer.device.alignment import Alignment
from sizer.device.both import Both, bounds_of
from sizer.device.cases import Family, family_of
from sizer.device.comparison import Comparison, Level, Row
from sizer.device.course import TINY_BYTES
from sizer.device.judgement import explain, notes_on, verdict_of, wrong_fit
from sizer.device.measurement import SAMPLED
from sizer.device.parting import first_parting, largest_partings, scratch_of
from sizer.device.recording import Measured
from sizer.errors import RequestError
from sizer.memory.allocator import place
from sizer.memory.report import Report
from sizer.memory.tape import Tape
from sizer.memory.timeline import live_by_category, running_bytes
from sizer.request import parse_query

CURVE_PARTS = 39  # of a phase; five phases with their ends stay within 200 points

# The largest error that the estimate aims at, as a fraction of what was measured: (peak allocated, reserved, process).
_AIMS: dict[Family, tuple[float, float, float]] = {
    "transformer": (0.02, 0.05, 0.08),
    "CNN": (0.08, 0.12, 0.08),
    "other": (0.08, 0.12, 0.08),
}
_CPU_PEAK_AIM = 0.05


def compare(report: Report, measured: Measured, tape: Tape) -> Comparison:
    """The measurement beside the estimate of the same dtype and batch, row by row, in bytes.

    `report` holds that one estimate, made for `gpu_of(measured.measurement.device)`, and `tape` is what it was made from. Raises
    RequestError where the report has no such estimate.
    """
    measurement = measured.measurement
    estimate = report.find(measurement.dtype, measurement.batch)
    if estimate is None:
        raise RequestError(
            "the report has no estimate of what was measured",
            given=f"{measurement.dtype} at batch {measurement.batch}",
            allowed=", ".join(f"{row.dtype} at batch {row.batch}" for row in report.estimates) or "none",
        )
    request = parse_query(measurement.query)
    recording = measured.recording
    both = Both(
        estimate=estimate,
        tape=tape,
        gpu=report.gpu,
        measured=measurement,
        recording=recording,
        alignment=None if recording is None else Alignment(tape, recording),
        family=family_of(request),
    )
    rows = tuple(_rows(both))
    wrong = (*wrong_fit(both), *(explain(both, row) for row in rows if row.holds is False))
    estimated_curve, measured_curve = _curves(both)
    return Comparison(
        architecture=report.model.name,
        class_name=report.model.class_name,
        family=both.family,
        mode=request.mode,
        versions=dict(report.versions),
        gpu=report.gpu,
        estimate=estimate,
        measurement=measurement,
        rows=rows,
        parting=None if both.alignment is None else first_parting(both.alignment),
        largest_partings=() if both.alignment is None else largest_partings(both.alignment),
        scratch=() if both.alignment is None else scratch_of(both.alignment),
        estimated_curve=estimated_curve,
        measured_curve=measured_curve,
        verdict=verdict_of(both, rows),
        wrong=wrong,
        notes=tuple(notes_on(both, report)),
    )


# ---------------------------------------------------------------------------------------------------------------- rows


def _rows(both: Both) -> Iterator[Row]:
    """What both sides know, like beside like: tensors, allocated, reserved and the process are never mixed."""
    yield from _tensor_rows(both)
    yield from _phase_rows(both)
    if both.is_complete:
        yield from _whole_rows(both)


def _tensor_rows(both: Both) -> Iterator[Row]:
    tensors, estimate = both.measured.tensors, both.estimate
    for name in ("weights_bytes", "buffers_bytes", "gradients_bytes", "optimizer_bytes"):
        if (found := getattr(tensors, name)) is not None:
            yield Row(quantity=name, estimated_bytes=getattr(estimate, name), measured_bytes=found, tolerance=0)
    if tensors.inputs_bytes is not None:
        yield Row(
            quantity="inputs_bytes", estimated_bytes=_inputs(both), measured_bytes=tensors.inputs_bytes, tolerance=0
        )
    if tensors.activations_bytes is not None:
        yield Row(
            quantity="activations_bytes",
            phase="forward",
            estimated_bytes=_left_by_forward(both),
            measured_bytes=tensors.activations_bytes,
            tolerance=_tolerance(both, "allocated_bytes", "forward"),
            **_numbers(both, "forward"),
        )


def _phase_rows(both: Both) -> Iterator[Row]:
    uses = {use.phase: use for use in both.estimate.phases}
    for reading in both.measured.phases:
        use = uses.get(reading.phase)
        if use is None:
            continue
        for name in ("allocated_bytes", "peak_allocated_bytes", "reserved_bytes"):
            found = getattr(reading, name)
            if found is None or (name == "reserved_bytes" and both.kind == "cpu"):
                continue
            yield Row(
                quantity=f"phases.{reading.phase}.{name}",
                phase=reading.phase,
                estimated_bytes=getattr(use, name),
                measured_bytes=found,
                tolerance=_tolerance(both, name, reading.phase),
                **(_numbers(both, reading.phase) if name != "reserved_bytes" else {}),
            )


def _whole_rows(both: Both) -> Iterator[Row]:
    names = ["peak_allocated_bytes"]
    if both.kind != "cpu":
        names += ["peak_reserved_bytes", "process_bytes"]
    for name in names:
        if (found := getattr(both.measured, name)) is not None:
            yield Row(
                quantity=name,
                estimated_bytes=getattr(both.estimate, name),
                measured_bytes=found,
                tolerance=_tolerance(both, name, ""),
                **(_numbers(both, None) if name == "peak_allocated_bytes" else {}),
            )


def _tolerance(both: Both, name: str, phase: str) -> float | None:
    """What the estimate promises of an allocator's figure on this device; None where it promises nothing."""
    allocated, reserved, process = _AIMS[both.family]
    if both.kind == "mps" and (both.measured.source == SAMPLED or name != "allocated_bytes"):
        return None
    if name == "process_bytes":
        return process
    if name in ("reserved_bytes", "peak_reserved_bytes"):
        return reserved
    if both.kind == "cpu":
        return 0 if name == "allocated_bytes" else _CPU_PEAK_AIM
    return 0 if (name, phase) == ("allocated_bytes", "load") else allocated


def _numbers(both: Both, phase: str | None) -> dict[str, object]:
    """The allowance for Python numbers that autograd saved, on the CPU: of a phase, or the most of all phases.

    PyTorch wraps each in a tensor of 8 bytes, on the CPU whatever the device, that no dispatch mode sees.
    """
    if both.kind != "cpu" or both.recording is None:
        return {}
    found = max(0, _tiny_bytes(both.recording, phase) - _tiny_bytes(both.tape, phase))
    return {"allowance_bytes": found, "allowance": "Python numbers that autograd saved"} if found else {}


def _inputs(both: Both) -> int:
    """The bytes of the batch, as the estimate has them."""
    live = live_by_category(both.tape)
    return live["forward"]["input"] if "forward" in live else 0


def _left_by_forward(both: Both) -> int:
    """What the allocator's counter gains in the forward pass beyond the inputs: what a measurement calls activations."""
    at_end = {use.phase: use.allocated_bytes for use in both.estimate.phases}
    return max(0, at_end["forward"] - at_end["load"] - _inputs(both)) if {"load", "forward"} <= at_end.keys() else 0


def _tiny_bytes(tape: Tape, phase: str | None) -> int:
    """Bytes of the smallest blocks alive at a phase's end; with None the most at any time."""
    levels = running_bytes(tape.order, [size if size <= TINY_BYTES else 0 for size in tape.sizes])
    end = next((end for end, name in tape.marks if name == phase), None)
    return max(levels) if end is None else levels[end]


# -------------------------------------------------------------------------------------------------------------- curves


def _curves(both: Both) -> tuple[tuple[Level, ...], tuple[Level, ...]]:
    """Allocated bytes over the work, as either side's counter would show them, at places that both have in common."""
    levels = running_bytes(both.tape.order, place(both.tape, both.kind).taken)
    device_levels = (
        None if both.recording is None else running_bytes(both.recording.order, place(both.recording, both.kind).taken)
    )
    curve, device_curve = [], []
    for number, (_, phase) in enumerate(both.tape.marks):
        begin, end = bounds_of(both.tape, phase)
        on_device = device_levels is not None and phase in both.alignment.phases
        cuts = [begin + (end - begin) * part // CURVE_PARTS for part in range(CURVE_PARTS + 1)]
        places = (
            [both.alignment.same_place("estimate", cut) for cut in cuts] if on_device else [(cut, 0) for cut in cuts]
        )
        if on_device:
            places[0] = begin, bounds_of(both.recording, phase)[0]
        for part, ((start, device_start), (stop, device_stop)) in enumerate(pairwise(places)):
            at = number + (part + 1) / (CURVE_PARTS + 1)
            curve.append(Level(at=at, phase=phase, allocated_bytes=max(levels[start : stop + 1])))
            if on_device:
                most = max(device_levels[device_start : device_stop + 1])
                device_curve.append(Level(at=at, phase=phase, allocated_bytes=most))
        curve.append(Level(at=number + 1, phase=phase, allocated_bytes=levels[end]))
        if on_device:
            device_curve.append(Level(at=number + 1, phase=phase, allocated_bytes=device_levels[places[-1][1]]))
    return tuple(curve), tuple(device_curve)

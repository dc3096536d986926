"""Compare an estimate with a device: row by row with signed errors, as curves over the work, and for several ranks. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from sizer.allocator.allocator import replay_events
from sizer.allocator.timeline import running_bytes
from sizer.base.codec import Document
from sizer.base.errors import RequestError
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.modes import MODES
from sizer.device.comparison.alignment import Alignment
from sizer.device.comparison.divergence import Divergence, Scratch, first_divergence, largest_divergences, scratch_of
from sizer.device.comparison.judgement import explain, notes_on, verdict_of, wrong_fit
from sizer.device.comparison.row import Family, Row, Sides, bounds_of, family_of, rows_of
from sizer.device.record.measurement import Measurement
from sizer.device.record.recording import Measured
from sizer.query.text import parse_query
from sizer.report.estimate import Estimate
from sizer.report.report import Report
from sizer.tape.loops import repeated_events, written
from sizer.tape.tape import Tape

PARTS = 39  # of a phase; five phases with their ends stay within 200 points


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Allocated bytes at a place of the work: `at` is the phase's number plus the completed part of the phase.

    Both curves have points at the same places. A point is the maximum since the previous point. The last point of a phase (`at`
    is a whole number) is the level at the phase's end.
    """

    at: float
    phase: str
    allocated_bytes: int


def curves_of(sides: Sides) -> tuple[tuple[Level, ...], tuple[Level, ...]]:
    """Return allocated bytes over the work, as each side's counter would show them, at places common to both sides."""
    levels = running_bytes(sides.tape.order, replay_events(sides.tape, sides.kind).block_bytes)
    alignment, device_levels = sides.alignment, []
    if alignment is not None:
        device_levels = running_bytes(alignment.device.order, replay_events(alignment.device, sides.kind).block_bytes)
    curve, device_curve = [], []
    for number, (_, phase) in enumerate(sides.tape.marks):
        bounds = bounds_of(sides.tape, phase)
        assert bounds is not None  # the phase is one of this tape
        begin, end = bounds
        cuts = [begin + (end - begin) * part // PARTS for part in range(PARTS + 1)]
        places = [(cut, 0) for cut in cuts]
        on_device = bounds_of(alignment.device, phase) if alignment is not None and phase in alignment.phases else None
        if alignment is not None and on_device is not None:
            places = [alignment.corresponding("estimate", cut) for cut in cuts]
            places[0] = begin, on_device[0]
        for part, ((start, device_start), (stop, device_stop)) in enumerate(pairwise(places)):
            at = number + (part + 1) / (PARTS + 1)
            curve.append(Level(at=at, phase=phase, allocated_bytes=max(levels[start : stop + 1])))
            if on_device:
                most = max(device_levels[device_start : device_stop + 1])
                device_curve.append(Level(at=at, phase=phase, allocated_bytes=most))
        curve.append(Level(at=number + 1, phase=phase, allocated_bytes=levels[end]))
        if on_device:
            device_curve.append(Level(at=number + 1, phase=phase, allocated_bytes=device_levels[places[-1][1]]))
    return tuple(curve), tuple(device_curve)


# ----------------------------------------------------------------------------------------------------------- comparison


SCHEMA = 1
COMPARED_AT_MOST = 4_000_000  # events of a generation's steps beyond those stored in a tape


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Document):
    """One measurement and the estimate of the same work by the rules of the same device.

    - `gpu`: the device of the estimate, which is the measured device with its own memory.
    - `rows`: the figures that both sides have. `notes`: omissions with their reasons, and other facts to know.
    - `first_divergence`: the first place where estimate and recording are not the same work. `largest_divergences`: the few
      with the most bytes. `scratch`: memory inside kernels beyond the estimate. All three, and `measured_curve`, are empty
      without a recording.
    - `wrong`: one text for each row that does not hold: the wrong line of the estimate, its category, phase, operator and
      module.
    - `verdict`: the result in a sentence. `versions`: the versions with which the estimate was made.
    """

    schema: int = SCHEMA
    architecture: str
    class_name: str
    family: Family
    mode: str
    versions: dict[str, str]
    gpu: Gpu
    estimate: Estimate
    measurement: Measurement
    rows: tuple[Row, ...]
    first_divergence: Divergence | None = field(default=None, metadata={"json": "parting"})
    largest_divergences: tuple[Divergence, ...] = field(default=(), metadata={"json": "largest_partings"})
    scratch: tuple[Scratch, ...] = ()
    estimated_curve: tuple[Level, ...] = ()
    measured_curve: tuple[Level, ...] = ()
    verdict: str
    wrong: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def task(self) -> str:
        """Kind of work in a word: "training", "inference", "generation"."""
        return MODES[self.mode].title.lower() if self.mode in MODES else self.mode

    @property
    def holds(self) -> bool:
        """Return True if every row with a tolerance stays within it, and both sides agree on whether the work fits."""
        return not self.wrong

    @property
    def process_in_range(self) -> bool | None:
        """Return True if the driver's figure of the process is in the estimate's range; None if the two cannot be compared."""
        row = self.find("process_bytes")
        if row is None:
            return None
        return self.estimate.process_low_bytes <= row.measured_bytes <= self.estimate.process_high_bytes

    def find(self, quantity: str) -> Row | None:
        """Return the row of a quantity, None if it was left out."""
        return next((row for row in self.rows if row.quantity == quantity), None)


def compare(report: Report, measured: Measured, tape: Tape) -> Comparison:
    """Return the comparison of a measurement with the estimate of the same dtype and batch, row by row, in bytes.

    `report` holds that one estimate, made for `gpu_of(measured.measurement.device)`, and `tape` is its tape. Raises
    RequestError if the report has no such estimate, and for a generation of too many steps.
    """
    measurement = measured.measurement
    estimate = report.find(measurement.dtype, measurement.batch)
    if estimate is None:
        raise RequestError(
            "the report has no estimate for this measurement",
            given=f"{measurement.dtype} at batch {measurement.batch}",
            allowed=", ".join(f"{row.dtype} at batch {row.batch}" for row in report.estimates) or "none",
        )
    request = parse_query(measurement.query)
    recording, tape = measured.recording, _whole(tape)
    if recording is not None:  # same PyTorch version as the estimate's rules
        recording = replace(recording, by_address=tape.by_address)
    sides = Sides(
        estimate=estimate,
        tape=tape,
        gpu=report.gpu,
        measured=measurement,
        recording=recording,
        alignment=None if recording is None else Alignment(tape, recording),
        family=family_of(request),
    )
    rows = tuple(rows_of(sides))
    wrong = (*wrong_fit(sides), *(explain(sides, row) for row in rows if row.holds is False))
    estimated_curve, measured_curve = curves_of(sides)
    return Comparison(
        architecture=report.model.name,
        class_name=report.model.class_name,
        family=sides.family,
        mode=request.mode,
        versions=dict(report.versions),
        gpu=report.gpu,
        estimate=estimate,
        measurement=measurement,
        rows=rows,
        first_divergence=None if sides.alignment is None else first_divergence(sides.alignment),
        largest_divergences=() if sides.alignment is None else largest_divergences(sides.alignment),
        scratch=() if sides.alignment is None else scratch_of(sides.alignment),
        estimated_curve=estimated_curve,
        measured_curve=measured_curve,
        verdict=verdict_of(sides, rows),
        wrong=wrong,
        notes=tuple(notes_on(sides, report)),
    )


def _whole(tape: Tape) -> Tape:
    """Return the tape with every step of a generation written out. Raises RequestError if it has too many to compare."""
    if (events := repeated_events(tape)) > COMPARED_AT_MOST:
        raise RequestError(
            "this generation has too many steps to compare one by one",
            given=f"{events:,} events",
            allowed=f"{COMPARED_AT_MOST:,}",
            todo="measure fewer new tokens",
        )
    return written(tape)


# ---------------------------------------------------------------------------------------------------------------- ranks


PEAK = "peak_allocated_bytes"


def rank_of(comparison: Comparison) -> int | None:
    """Return the measured rank, None for a single GPU."""
    return parse_query(comparison.measurement.query).rank


def world_of(comparison: Comparison) -> int:
    """Return the number of ranks that trained together, 1 for a single GPU."""
    return parse_query(comparison.measurement.query).world


def worst(comparisons: Iterable[Comparison]) -> Comparison:
    """Return the comparison of the worst rank.

    The order is: a rank that failed, a rank whose estimate is wrong, the largest error of the peak, the largest peak.
    """

    def badness(comparison: Comparison) -> tuple[bool, bool, int, int]:
        peak = comparison.find(PEAK)
        if peak is None:
            return True, False, 0, 0
        return False, not comparison.holds, abs(peak.difference_bytes), peak.measured_bytes

    return max(comparisons, key=badness)

"""The outcome of a dry run: a report of the usual form, an exit status, and lines of text. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sizer.base.codec import decode
from sizer.base.units import format_bytes
from sizer.base.versions import SIZER, by_address, format_version, parse_version
from sizer.catalogue.gpus import GPUS, Gpu
from sizer.catalogue.recipes import OF_KERNELS, workspaces_of
from sizer.report.census import Census
from sizer.report.column import Column
from sizer.report.estimate import Estimate, estimate_tape
from sizer.report.report import Focus, Report, build_report
from sizer.running.history import tape_of
from sizer.tape.compiled_code import CompiledCode
from sizer.tape.tape import CATEGORIES, Tape

DONE, FAILED, UNTRACED, NO_FIT = 0, 1, 3, 5
INTERRUPTED = 130
NOT_REAL = "nothing was computed on the device: losses and metrics that the script printed are not real"
_SAME_RULES = ("maker", "capability")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One dry run.

    Attributes:
        report: The figures, phases and categories, as of `sizer estimate`.
        tape: The recorded allocations, None if the script used no device.
        script_status: How the script ended: "stopped" (after the steps asked for), "completed", "failed", "out of memory",
            "untraced" (route meta), "out of time", "interrupted" or "crashed"; `script_message` says more.
        route, route_reason: How it ran, and why so.
        assumed_counts: By line, how often a number of elements was assumed.
        reads: By line, how often the script read a value that was not computed.
        host_bytes: Peak host memory of the script, without Python's and PyTorch's own at its start.
        counters: PyTorch's own counters of each device.
    """

    report: Report | None
    tape: Tape | None
    gpu: Gpu
    script_status: str
    script_message: str
    route: str
    route_reason: str
    steps: int
    seconds: float
    rank: int
    world: int
    expandable: bool
    assumed_counts: tuple[tuple[str, int], ...] = ()
    reads: tuple[tuple[str, int], ...] = ()
    not_saved: tuple[str, ...] = ()
    host_bytes: int = 0
    pinned_bytes: int = 0
    counters: tuple[Mapping[str, int], ...] = ()
    lines_at_peak: tuple[tuple[str, int], ...] = ()
    modules_at_peak: tuple[tuple[str, int], ...] = ()
    fits_on: tuple[str, ...] = field(default=())

    @property
    def estimate(self) -> Estimate | None:
        """The figures, None if the script used no device."""
        return self.report.estimates[0] if self.report and self.report.estimates else None

    @property
    def is_whole(self) -> bool:
        """True if the script did all that was asked for. Otherwise nothing is said about what fits it."""
        return self.script_status in ("stopped", "completed", "out of time")

    @property
    def missing_bytes(self) -> int:
        """The bytes that the process needs beyond the device's memory; 0 if it fits."""
        row = self.estimate
        if row is None or row.out_of_memory is None:
            return 0
        return max(1, row.process_bytes - self.gpu.total_bytes)

    def exit_status(self, *, limit_bytes: int | None = None) -> int:
        """Return the exit status of the command; `limit_bytes` bounds the peak of reserved memory."""
        row = self.estimate
        if self.script_status == "interrupted":
            return INTERRUPTED
        if self.script_status == "out of memory":
            return NO_FIT
        if self.script_status in ("failed", "crashed"):
            return FAILED
        if self.script_status == "untraced":
            return UNTRACED
        if row is not None and row.out_of_memory is not None:
            return NO_FIT
        if row is not None and limit_bytes is not None and row.peak_reserved_bytes > limit_bytes:
            return NO_FIT
        return DONE

    def to_dict(self) -> dict[str, Any]:
        """Return the public JSON: the fields of `estimate`, and the fields of a run."""
        found = self.report.to_dict() if self.report else {"schema": 1, "estimates": [], "notes": [NOT_REAL]}
        return found | {
            "script_status": self.script_status,
            "script_message": self.script_message,
            "route": self.route,
            "route_reason": self.route_reason,
            "steps": self.steps,
            "seconds": self.seconds,
            "rank": self.rank,
            "world": self.world,
            "assumed_counts": [{"where": where, "count": count} for where, count in self.assumed_counts],
            "unknown_reads": [{"where": where, "count": count} for where, count in self.reads],
            "not_saved": list(self.not_saved),
            "host_bytes": self.host_bytes,
            "pinned_bytes": self.pinned_bytes,
            "missing_bytes": self.missing_bytes,
            "fits_on": list(self.fits_on),
            "devices": [dict(row) for row in self.counters],
            "lines_at_peak": [{"line": line, "bytes": size} for line, size in self.lines_at_peak],
            "modules_at_peak": [{"module": module, "bytes": size} for module, size in self.modules_at_peak],
        }


def read_outcome(
    found: Mapping[str, Any],
    *,
    gpu: Gpu,
    route: str,
    reason: str,
    notes: tuple[str, ...],
    expandable: bool,
    traced: Tape | None = None,
) -> Outcome:
    """Return the outcome for the child process's report.

    Args:
        found: The child's report.
        gpu: The device.
        route: "driver" or "meta".
        reason: Why this route was taken.
        notes: More notes for the report.
        expandable: Replay with expandable segments; the script may set them itself.
        traced: The tape, if the tracer made it.
    """
    expandable = expandable or found.get("expandable", False)
    tape, report = traced, None
    if tape is not None:
        report = _report(found, tape, gpu, notes=(*_notes(found), *notes), expandable=expandable)
    elif "columns" in found:
        version = parse_version(".".join(found["versions"]["torch"].split(".")[:2]))
        tape = tape_of(found["columns"], by_address=by_address(version), host_bytes=found["host_bytes"])
        report = _report(found, tape, gpu, notes=(*_notes(found), *notes), expandable=expandable)
    outcome = Outcome(
        report=report,
        tape=tape,
        gpu=gpu,
        script_status=found["status"],
        script_message=found["message"],
        route=route,
        route_reason=reason,
        steps=found.get("steps", 0),
        seconds=found.get("seconds", 0.0),
        rank=found.get("rank", 0),
        world=found.get("world", 1),
        expandable=expandable,
        assumed_counts=tuple((where, count) for where, count in found.get("assumed", ())),
        reads=tuple((where, count) for where, count in found.get("reads", ())),
        not_saved=tuple(found.get("not_saved", ())),
        host_bytes=found.get("host_bytes", 0),
        pinned_bytes=found.get("pinned_bytes", 0),
        counters=tuple(found.get("devices", ())),
    )
    if tape is None:
        return outcome
    lines, modules = alive_at_peak(tape)
    fits_on = tuple(_fits_on(outcome, tape)) if outcome.is_whole else ()
    return replace(outcome, lines_at_peak=lines, modules_at_peak=modules, fits_on=fits_on)


def alive_at_peak(tape: Tape) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]:
    """Return the requested bytes alive at the peak by line and by module, the largest first."""
    alive: dict[int, None] = {}
    level = most = 0
    best: list[int] = []
    risen = False
    for event in tape.order:
        if event >= 0:
            alive[event] = None
            level += tape.sizes[event]
            risen = risen or level > most
            most = max(most, level)
        else:
            if risen:
                best, risen = list(alive), False
            alive.pop(~event, None)
            level -= tape.sizes[~event]
    best = list(alive) if risen else best
    lines: dict[str, int] = {}
    modules: dict[str, int] = {}
    for block in best:
        line, module = tape.op_names[tape.ops[block]], tape.module_names[tape.modules[block]]
        lines[line] = lines.get(line, 0) + tape.sizes[block]
        modules[module] = modules.get(module, 0) + tape.sizes[block]

    def ranked(sizes: dict[str, int]) -> tuple[tuple[str, int], ...]:
        return tuple(sorted(sizes.items(), key=lambda row: -row[1]))

    return ranked(lines), ranked(modules)


def on_other(outcome: Outcome, gpu: Gpu, *, expandable: bool) -> Estimate:
    """Return the figures of the recorded run on another device of the same rules, or with another allocator setting."""
    if outcome.tape is None or outcome.estimate is None:
        raise ValueError("the run has no tape: the script used no device")
    return estimate_tape(
        outcome.tape, dtype=outcome.estimate.dtype, gpu=gpu, mode=_mode(outcome.steps), expandable_segments=expandable
    )


def same_rules(gpu: Gpu) -> Iterator[Gpu]:
    """Yield the devices of the catalogue with the same compute capability, by memory."""
    alike = (row for row in GPUS.values() if all(getattr(row, name) == getattr(gpu, name) for name in _SAME_RULES))
    yield from sorted(alike, key=lambda row: row.total_bytes)


def _fits_on(outcome: Outcome, tape: Tape) -> Iterator[str]:
    for gpu in same_rules(outcome.gpu):
        if on_other(outcome, gpu, expandable=outcome.expandable).fits is True:
            yield gpu.key


def _mode(steps: int) -> str:
    return "training" if steps else "inference"


def _report(found: Mapping[str, Any], tape: Tape, gpu: Gpu, *, notes: tuple[str, ...], expandable: bool) -> Report:
    model = found["model"]
    dtype, mode = model["dtype"], _mode(found["steps"])
    row = estimate_tape(tape, dtype=dtype, gpu=gpu, mode=mode, expandable_segments=expandable)
    version = format_version(parse_version(".".join(found["versions"]["torch"].split(".")[:2])))
    return build_report(
        query="",
        versions={"sizer": SIZER, **found["versions"]},
        census=Census(
            name=model["name"],
            class_name=model["name"],
            parameters=model["parameters"],
            trainable_parameters=model["trainable_parameters"],
            buffers=model["buffers"],
            parameter_bytes=model["parameter_bytes"],
            buffer_bytes=model["buffer_bytes"],
        ),
        columns={dtype: Column(estimates=(row,), first=tape)},
        gpu=gpu,
        mode=mode,
        focus=Focus(dtype=dtype, batch=1),
        cautions=_cautions(found, gpu),
        notes=tuple(note for note in notes if not note.startswith(OF_KERNELS)),
        target={"torch": version},
        compiled=decode(CompiledCode | None, found.get("compiled")),
        uncounted=[*map(workspaces_of, found["uncounted"]), *(note for note in notes if note.startswith(OF_KERNELS))],
    )


def _cautions(found: Mapping[str, Any], gpu: Gpu) -> Iterator[str]:
    """Yield the remarks that precede the figures."""
    yield NOT_REAL
    if found["assumed"]:
        yield f"the figures depend on {sum(count for _, count in found['assumed'])} assumed counts"
    if found["status"] not in ("stopped", "completed"):
        yield f"the figures are of the part that ran: the script ended with {found['status']!r}"
    if found.get("cut"):
        yield "the run had more events than are recorded, so the figures only cover its last part: run fewer steps"
    yield from gpu.cautions


def _notes(found: Mapping[str, Any]) -> Iterator[str]:
    others = [row for row in found["devices"] if row["device"] != found.get("fullest")]
    for row in others:
        peaks = f"{format_bytes(row['peak_allocated_bytes'])} allocated, {format_bytes(row['peak_reserved_bytes'])} reserved"
        yield f"cuda:{row['device']} has {peaks}; the figures are for cuda:{found['fullest']}"
    if found["world"] > 1:
        yield f"the figures are for rank {found['rank']} of {found['world']}; NCCL's own memory is not counted"
    for name in found["not_saved"]:
        yield f"{name} was not written: its values were not computed"


# ---------------------------------------------------------------------------------------------------------------- text


_ROWS = 8


def format_outcome(outcome: Outcome) -> Iterator[str]:
    """Yield the report: the headline, the phases, the peak, and the assumptions behind the figures."""
    yield ""
    yield f"Dry run on {outcome.gpu.name}{_rank(outcome)}: {_ending(outcome)} ({outcome.seconds:.0f} s)"
    row = outcome.estimate
    if row is None or outcome.report is None:
        yield "The script allocated nothing on a device."
    else:
        yield from _figures(outcome)
    yield f"Host: {format_bytes(outcome.host_bytes)} at the peak; pinned memory: {format_bytes(outcome.pinned_bytes)}."
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
    elif not outcome.is_whole:
        yield "What ran until then fits."
    else:
        yield "It fits." if row.fits is True else "It fits, but may not within the range of uncertainty."
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

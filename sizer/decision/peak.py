"""Memory alive at the peak of one dtype and batch size, by one trace with shapes, also as a snapshot and a script."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from sizer.allocator.snapshot import write_snapshot
from sizer.base.errors import BuildError, RequestError
from sizer.base.units import format_bytes
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.recipes import TORCH, TRL
from sizer.catalogue.sources import SOURCES, import_function
from sizer.decision.cells import CANNOT, Cells, check_request, one_cell, why
from sizer.decision.levers import SAME
from sizer.decision.pipeline_levers import describe_part, remedies
from sizer.decision.script import write_script
from sizer.decision.script_ranks import check_scripted
from sizer.estimating.store import ResultStore
from sizer.query.request import Request, check_one_rank
from sizer.query.text import format_query
from sizer.report.census import ArchitectureCounts
from sizer.report.peak import STAY, PeakReport, find_peak
from sizer.tape.loops import repeated_events, written

if TYPE_CHECKING:
    from sizer.estimating.model import Progress

EVENTS_AT_MOST = 2_000_000  # of a snapshot: about a gigabyte


def peak(
    request: Request,
    *,
    config: dict | None = None,
    store: ResultStore | None = None,
    progress: Progress | None = None,
) -> Iterator[PeakReport]:
    """Yield the blocks alive at the peak of the one dtype and batch size of a request; then again with a script for the work.

    The report of a pipeline names the part with the peak, and its remedies. Raises RequestError for a request of several cells,
    and the errors of an estimate if the work itself has none.
    """
    request = one_cell(request)
    check_one_rank(request, "every tensor alive at the peak")
    cells = Cells(request, config=config, store=store, progress=progress)
    tape, notes = cells.noted(request)
    report = find_peak(
        tape,
        notes,
        find_gpu(request.gpu),
        query=format_query(request, complete=True),
        dtype=request.dtypes[0],
        expandable_segments=request.expandable_segments,
    )
    yield report
    if request.is_pipeline:
        program = _pipeline_script(request, config, cells)
        yield from _with_remedies(replace(report, script=program), request, cells)
        return
    report = replace(report, remedy=describe_logits(report, cells.counted(request)))
    try:
        estimate = cells.estimate(request)
        yield replace(report, script=write_script(request, cells.tracer(request), estimate=estimate))
    except BuildError as error:
        yield replace(report, no_script=str(error))


def describe_logits(report: PeakReport, known: ArchitectureCounts) -> str:
    """Return how much of a peak are logits of a language model and their gradients; empty if less than a tenth is."""
    vocabulary = known.vocabulary
    held = sum(row.bytes for row in report.tensors if vocabulary in row.shape[-1:] and row.category not in STAY)
    share = held / report.allocated_bytes
    if vocabulary is None or share < 0.1:
        return ""
    what = f"Logits and their gradients are {format_bytes(held)} of the peak ({share:.0%})"
    return f"{what}: a loss in chunks (loss={TRL if known.changes_logits else TORCH}) keeps less."


def _with_remedies(report: PeakReport, request: Request, cells: Cells) -> Iterator[PeakReport]:
    """Yield the report of a pipeline with the part that has the peak, and the peak after each of its remedies."""
    sentences = [describe_part(report)]
    for lever in remedies(report.phase):
        changed = lever.change(request, cells.counted(request))
        if changed is None:
            continue
        try:
            lowered = cells.estimate(check_request(changed)).peak_allocated_bytes
        except CANNOT as error:
            sentences.append(f"{lever.title(changed)}: {why(error)}.")
            continue
        saves = lowered < report.allocated_bytes * (1 - SAME)
        what = f"lowers it to {format_bytes(lowered)}" if saves else "does not lower it"
        sentences.append(f"{lever.title(changed)} {what}.")
        yield replace(report, remedy=" ".join(sentences))
    yield replace(report, remedy=" ".join(sentences))


def _pipeline_script(request: Request, config: dict | None, cells: Cells) -> str:
    write = import_function(SOURCES[request.source].script or "")
    return write(request, config, cells.estimate(request))


def script(
    request: Request,
    *,
    config: dict | None = None,
    store: ResultStore | None = None,
    progress: Progress | None = None,
) -> str:
    """Return the PyTorch program that runs and measures the one dtype and batch size of a request (sizer.decision.script).

    It prints the estimate too. The program of several ranks is for `torchrun`. Raises as `peak`, and BuildError if there is
    none.
    """
    request = one_cell(request)
    check_scripted(request)
    cells = Cells(request, config=config, store=store, progress=progress)
    if request.is_pipeline:
        return _pipeline_script(request, config, cells)
    return write_script(request, cells.tracer(request), estimate=cells.estimate(request))


def snapshot(
    request: Request,
    *,
    config: dict | None = None,
    store: ResultStore | None = None,
    progress: Progress | None = None,
) -> bytes:
    """Return the peak as a pickled memory snapshot (sizer.allocator.snapshot).

    Raises as `peak`, and RequestError for a device with an allocator without snapshots.
    """
    request = one_cell(request)
    check_one_rank(request, "a memory snapshot")
    gpu = find_gpu(request.gpu)
    if gpu.backend != "cuda":
        what = "PyTorch has memory snapshots only for CUDA's allocator"
        raise RequestError(what, given=f"gpu={gpu.key}", allowed="a CUDA device")
    tape = Cells(request, config=config, store=store, progress=progress).tape(request)
    if (events := len(tape.order) + repeated_events(tape)) > EVENTS_AT_MOST:
        raise RequestError(
            "the viewer cannot show a snapshot of this size",
            given=f"{events:,}",
            allowed=f"{EVENTS_AT_MOST:,}",
            todo="ask for fewer new tokens",
        )
    return write_snapshot(written(tape), gpu, expandable_segments=request.expandable_segments)

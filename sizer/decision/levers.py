"""Levers: what would make the work smaller, each answered by the estimate of the question that it makes.

Nothing here is a rule of thumb: what a lever saves is the difference of two estimates, and the smallest set of levers that makes
the work fit is one whose own trace fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations

from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.modes import MODES
from sizer.decision.cells import CANNOT, Cells, checked, one_cell, why
from sizer.decision.lever_table import LEVERS, OTHER_WORK, Lever, accumulated
from sizer.errors import RequestError
from sizer.kept import Kept
from sizer.memory.decision import LeverReport, LeverRow, LeverSet
from sizer.memory.estimate import Estimate
from sizer.request import Request, format_query
from sizer.tracer import Counted, Progress
from sizer.units import counted, format_bytes

TRIED_WHOLE = 2  # up to so many levers at once every set is tried; beyond, levers are taken away from all of them


def levers(
    request: Request,
    *,
    config: dict | None = None,
    kept: Kept | None = None,
    progress: Progress | None = None,
) -> Iterator[LeverReport]:
    """What each lever saves for the one dtype and batch size of a request, and the smallest set that makes it fit; it grows.

    Raises RequestError for a request of several, and what an estimate raises where the work itself has none.
    """
    request = one_cell(request)
    cells = Cells(request, config=config, kept=kept, progress=progress)
    report_progress = progress or (lambda text: None)
    base = cells.estimate(request)
    known = cells.counted(request)
    offered = [(lever, changed) for lever in LEVERS if (changed := _changed(lever, request, known))]
    report = LeverReport(
        query=format_query(request, complete=True),
        base=cells.cell(request),
        useless=tuple(_useless(request, base)),
        pending=tuple(lever.key for lever, _ in offered),
    )
    yield report
    for number, (lever, changed) in enumerate(offered, 1):
        report_progress(f"{lever.title(changed)}, {number} of {len(offered)}")
        row = _row(lever, changed, cells, request)
        report = replace(report, rows=(*report.rows, row), pending=report.pending[1:])
        yield report
    if base.fits is True:
        yield replace(report, search="It fits as it is.")
        return
    yield from _search(report, [lever for lever, _ in offered], request, cells, report_progress)


def _row(lever: Lever, changed: Request, cells: Cells, request: Request) -> LeverRow:
    try:
        if lever.key == "batch":
            changed = _largest_fitting(changed, cells, below=request.batches[0])
        cell, reason = cells.cell(changed), ""
    except CANNOT as error:
        cell, reason = None, why(error)
    return LeverRow(
        key=lever.key,
        title=lever.title(changed),
        cost=lever.cost(cells.counted(request)),
        code=lever.code(changed),
        query=format_query(changed),
        cell=cell,
        reason=reason,
    )


def _changed(lever: Lever, request: Request, known: Counted) -> Request | None:
    """The question with a lever pulled; None where it does not apply."""
    changed = lever.change(request, known)
    if changed is None or changed == request:
        return None
    try:
        return checked(changed)
    except RequestError:  # a key that this source, device or optimizer does not take
        return None


def _largest_fitting(request: Request, cells: Cells, *, below: int) -> Request:
    """The question at the largest batch size that fits and is smaller than `below`; at the model's smallest where none is known."""
    try:
        found = cells.largest_batch(request).batch or 0
    except CANNOT:  # work that is not affine in the batch
        found = 0
    return accumulated(request, max(min(found, below - 1), cells.counted(request).smallest))


# ------------------------------------------------------------------------------------------------------ the smallest set


def _search(
    report: LeverReport, offered: list[Lever], request: Request, cells: Cells, progress: Progress
) -> Iterator[LeverReport]:
    """Looks for the fewest levers that make the work fit for sure; of equal numbers those of the lowest price.

    Sets of one and two are all tried. For more, levers are taken away, the dearest first, from all of them as long as it fits.
    """
    able = {row.key for row in report.rows if row.cell is not None}
    useful = [lever for lever in offered if lever.key in able and lever.key not in OTHER_WORK]

    def fitting(chosen: Iterable[Lever]) -> LeverSet | None:
        question = _together(chosen, request, cells)
        if question is None:
            return None
        try:
            if cells.fits(question) is not True:
                return None
            if any(lever.key == "batch" for lever in chosen):
                question = _largest_fitting(question, cells, below=request.batches[0])
            return LeverSet(
                keys=tuple(lever.key for lever in chosen), query=format_query(question), cell=cells.cell(question)
            )
        except CANNOT:
            return None

    progress("looking for what makes it fit")
    fits_alone = {row.key for row in report.rows if row.cell is not None and row.cell.fits is True}
    alone = fits_alone.intersection(lever.key for lever in useful)
    whole = _everything(useful)
    everything = None if alone else fitting(whole)
    if not alone and everything is None:
        yield replace(report, search=_nothing_fits(whole, request, cells))
        return
    tried = 0
    for size in range(1, TRIED_WHOLE + 1):
        for chosen in sorted(_sets(useful, size), key=lambda levers: sum(lever.price for lever in levers)):
            tried += 1
            progress(f"trying {' and '.join(lever.key for lever in chosen)}")
            if (size > 1 or chosen[0].key in alone) and (found := fitting(chosen)) is not None:
                yield replace(
                    report,
                    smallest=found,
                    search=f"The fewest changes that do, the first of {counted(tried, 'set')} tried that fits.",
                )
                return
    best, kept = everything, list(whole)
    for lever in sorted(whole, key=lambda lever: -lever.price):
        fewer = [one for one in kept if one is not lever]
        progress(f"trying without {lever.key}")
        if (found := fitting(fewer)) is not None:
            best, kept = found, fewer
    yield replace(
        report,
        smallest=best,
        search=f"No two changes are enough; without any one of these {len(kept)} it does not fit.",
    )


def _sets(offered: list[Lever], size: int) -> Iterator[tuple[Lever, ...]]:
    """All sets of levers that can be pulled together."""
    for chosen in combinations(offered, size):
        if len({lever.group for lever in chosen}) == size:
            yield chosen


def _everything(offered: list[Lever]) -> list[Lever]:
    """One lever of each group, the one that goes furthest."""
    return list({lever.group: lever for lever in sorted(offered, key=lambda lever: lever.price)}.values())


def _together(chosen: Iterable[Lever], request: Request, cells: Cells) -> Request | None:
    """The question with all of these levers, at the smallest batch size that the model then takes where that is one of them."""
    try:
        for lever in sorted(chosen, key=lambda lever: lever.key == "batch"):
            changed = lever.change(request, cells.counted(request))
            if changed is None:
                return None
            request = checked(changed)
    except CANNOT:
        return None
    return request


def _nothing_fits(whole: list[Lever], request: Request, cells: Cells) -> str:
    question = _together(whole, request, cells)
    try:
        least = format_bytes(cells.estimate(question).process_low_bytes) if question is not None else None
    except CANNOT:
        least = None
    total = format_bytes(find_gpu(request.gpu).total_bytes)
    said = (
        f"even with all of them the process needs at least {least}, the device has {total}"
        if least
        else "none can be traced"
    )
    return f"No set of these changes makes it fit: {said}. Split the model over several devices, or take a larger one."


# ------------------------------------------------------------------------------------------------- what does not help


def _useless(request: Request, base: Estimate) -> Iterator[str]:
    if find_gpu(request.gpu).backend == "cuda":
        idle = base.reserved_at_peak_bytes - base.peak_allocated_bytes
        yield (
            "torch.cuda.empty_cache() in the loop does not lower the peak: it gives back cached memory, of which the peak itself "
            f"has {format_bytes(max(idle, 0))}, and the allocator does that by itself before it fails; the loop only gets slower."
        )
    if MODES[request.mode].trains:
        yield (
            "del loss or del output at the end of the step does not lower the peak: it is in the middle of the step, where both "
            "are still needed."
        )

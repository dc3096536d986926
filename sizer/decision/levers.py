"""Levers: changes that would make the work smaller. Each is answered by the estimate of the changed question.

There are no rules of thumb: the saving of a lever is the difference of two estimates, and the smallest set of levers that makes
the work fit is one with its own trace that fits. `effect` says in words why a change saves nothing, or only reserved memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

from sizer.base.errors import RequestError
from sizer.base.units import format_bytes, format_range, pluralize
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.modes import MODES
from sizer.decision.cells import CANNOT, Cells, check_request, one_cell, why
from sizer.decision.lever_table import ADAPTERS, COMPILED, LEVERS, OTHER_WORK, Lever, accumulated
from sizer.decision.pipeline_levers import PIPELINE_LEVERS, describe_slicing
from sizer.decision.serving import served_levers
from sizer.estimating.store import ResultStore
from sizer.query.request import Request
from sizer.query.text import format_query
from sizer.report.census import ArchitectureCounts
from sizer.report.decision import LeverReport, LeverRow, LeverSet
from sizer.report.estimate import Estimate, describe_copies
from sizer.report.phases import inside

if TYPE_CHECKING:
    from sizer.estimating.model import Progress

ALL = (*LEVERS, *PIPELINE_LEVERS)
MOVES = ("offloading", "activations", "optimizer_offload")  # fields of a request that take memory of the host
TRIED_WHOLE = 2  # every set of up to this many levers is tried; for larger sets, levers are removed from the set of all


def levers(
    request: Request,
    *,
    config: dict | None = None,
    store: ResultStore | None = None,
    progress: Progress | None = None,
    compiles: bool = False,
) -> Iterator[LeverReport]:
    """Yield the growing savings of each lever for the one dtype and batch size of a request, and the smallest sufficient set.

    With `compiles` eager code is also compiled, after all other levers: its trace takes longest. No set has this lever.

    Raises RequestError for a request of several cells, and the errors of an estimate if the work itself has none.
    """
    if MODES[request.mode].serves:
        yield from served_levers(request, config=config, store=store, progress=progress)
        return
    request = one_cell(request)
    cells = Cells(request, config=config, store=store, progress=progress)
    report_progress = progress or (lambda text: None)
    base = cells.estimate(request)
    known = cells.counted(request)
    quantized = cells.tracer(request).loaded.quantization is not None  # other formats of its weights are larger
    offered = [
        (lever, changed)
        for lever in ALL
        if (changed := _changed(lever, request, known)) and not (quantized and lever.group == "weights")
    ]
    late = [one for one in offered if compiles and _compiles(one[0], request)]
    offered = [one for one in offered if not _compiles(one[0], request)]
    report = LeverReport(
        query=format_query(request, complete=True),
        base=cells.cell(request),
        useless=tuple(_useless(request, base)),
        pending=tuple(lever.key for lever, _ in (*offered, *late)),
        pending_titles=tuple(lever.title(changed) for lever, changed in (*offered, *late)),
    )
    yield report
    for traced in (offered, late):
        for lever, changed in traced:
            report_progress(f"{lever.title(changed)}, {len(report.rows) + 1} of {len(offered) + len(late)}")
            row = _row(lever, changed, cells, request, base)
            rows, pending, titles = (*report.rows, row), report.pending[1:], report.pending_titles[1:]
            report = replace(report, rows=rows, pending=pending, pending_titles=titles)
            yield report
        if not report.search:
            report = _search(report, [lever for lever, _ in offered], request, cells, report_progress)
            yield report


def _compiles(lever: Lever, request: Request) -> bool:
    """Return True if a lever compiles a question's eager code."""
    return lever.key == COMPILED and request.compile is None


def _row(lever: Lever, changed: Request, cells: Cells, request: Request, base: Estimate) -> LeverRow:
    try:
        if lever.key == "batch":
            changed = _largest_fitting(changed, cells, of=request)
        found = cells.estimate(changed)
        cell, reason, effect = cells.cell(changed), "", describe_effect(lever.key, base, found)
        moves = any(getattr(changed, name) != getattr(request, name) for name in MOVES)
        paid = _paid(found) if moves else []
    except CANNOT as error:
        cell, reason, effect, paid = None, why(error), "", []
    return LeverRow(
        key=lever.key,
        title=lever.title(changed),
        cost="; ".join([*paid, lever.cost(changed, cells.counted(request))]),
        code=lever.code(changed),
        query=format_query(changed),
        cell=cell,
        reason=reason,
        effect=effect,
    )


def _paid(found: Estimate) -> list[str]:
    """Return the costs of offloading: host memory, and bytes copied to the device."""
    if not found.host_bytes:
        return []
    return [f"{format_bytes(found.host_bytes)} of host memory", *filter(None, [describe_copies(found)])]


def _changed(lever: Lever, request: Request, known: ArchitectureCounts) -> Request | None:
    """Return the question changed by a lever; None if it does not apply."""
    changed = lever.change(request, known)
    if changed is None or changed == request:
        return None
    try:
        return check_request(changed)
    except RequestError:  # a key that this source, device or optimizer does not take
        return None


def _largest_fitting(request: Request, cells: Cells, *, of: Request) -> Request:
    """Return the question at the largest batch size that fits and is smaller than that of the question `of`, before its change.

    In training it divides that batch size, so that accumulated passes have as many samples. It is the model's smallest batch
    size if no other is known to fit. If the work is not affine in the batch, powers of two times the smallest are tried.
    """
    smallest, found, (below,) = cells.counted(request).smallest, 0, of.batches
    with suppress(*CANNOT):  # an error keeps the last result
        found = cells.largest_batch(request).batch or 0
        if found == smallest and not cells.is_affine(request):
            while 2 * found < below and cells.fits(accumulated(request, 2 * found)) is True:
                found *= 2
    largest = max(min(found, below - 1), smallest)
    if not MODES[request.mode].trains:
        return accumulated(request, largest)
    whole = replace(request, batches=of.batches, accumulate=of.accumulate)
    divisors = [batch for batch in range(largest, smallest - 1, -1) if below % batch == 0]
    with suppress(*CANNOT):
        for batch in divisors:
            if cells.fits(accumulated(whole, batch)) is True:
                return accumulated(whole, batch)
    return accumulated(whole, divisors[-1] if divisors else largest)


# ------------------------------------------------------------------------------------------------------ the smallest set


def _search(
    report: LeverReport, offered: list[Lever], request: Request, cells: Cells, progress: Progress
) -> LeverReport:
    """Return the report with the fewest levers that surely make the work fit; of equal numbers those of the lowest price.

    If no set does, an adapter is trained instead: with the given weights, or with quantized ones if that is not enough.
    """
    if report.base is not None and report.base.fits is True:
        return replace(report, search="It fits unchanged.")
    able = {row.key: row.cell for row in report.rows if row.cell is not None}
    useful = [lever for lever in offered if lever.key in able and lever.key not in OTHER_WORK]
    sets = _Sets(request, cells, progress, fits_alone={key for key, cell in able.items() if cell.fits is True})
    progress("searching for changes that make it fit")
    found, search = sets.fewest(useful)
    if found is not None:
        return replace(report, smallest=found, search=search)
    least = sets.least(useful)
    needs = [
        f"even with all changes that leave the work the same the process takes {least}"
        if least
        else "none can be traced"
    ]
    adapted_sets: list[LeverSet] = []
    for adapter in (lever for lever in offered if lever.key in ADAPTERS and lever.key in able):
        adapted = adapter.change(request, cells.counted(request))
        assert adapted is not None, "its row has a cell"
        known = cells.counted(adapted)
        beside = [
            lever
            for lever in ALL
            if lever.key not in OTHER_WORK and not _compiles(lever, adapted) and _changed(lever, adapted, known)
        ]
        found, _ = sets.fewest(beside, adapter)
        if found is not None:
            adapted_sets.append(found)
        elif least := sets.least(beside, adapter):
            needs.append(f"with {adapter.title(adapted).replace('A ', 'a ', 1)} {least}")
    if adapted_sets:
        best = min(adapted_sets, key=_order)
        return replace(report, smallest=best, search=f"The same work does not fit: {needs[0]}.")
    total = format_bytes(find_gpu(request.gpu).total_bytes)
    ends = f"the device has {total}. Split the model over several devices, or take a larger one."
    return replace(report, search=f"No set of these changes makes it fit for sure: {', '.join(needs)}; {ends}")


PRICES = {lever.key: lever.price for lever in ALL}
DEAREST = max(lever.price for lever in ALL if lever.key not in OTHER_WORK)  # half the context, half the resolution


def _order(found: LeverSet) -> tuple[int, int, int]:
    """Return the sort key of sets: those that keep the sizes of the work, then fewer changes, then a lower price."""
    prices = [PRICES[key] for key in found.keys if key not in OTHER_WORK]
    return prices.count(DEAREST), len(prices), sum(prices)


class _Sets:
    """Sets of levers used together on one question. Each lever of `fits_alone` is sufficient alone."""

    def __init__(self, request: Request, cells: Cells, progress: Progress, *, fits_alone: Set[str]) -> None:
        self._request, self._cells, self._progress, self._fits_alone = request, cells, progress, fits_alone

    def fewest(self, useful: list[Lever], *first: Lever) -> tuple[LeverSet | None, str]:
        """Return the fewest useful levers that fit together with the first ones, and how they were found; None if none do.

        Levers that halve the sequence or the image are in the set only if no set fits without them.
        """
        keeping = [lever for lever in useful if lever.price < DEAREST]
        if len(keeping) < len(useful):
            found, search = self._fewest(keeping, *first)
            if found is not None:
                return found, search
        return self._fewest(useful, *first)

    def _fewest(self, useful: list[Lever], *first: Lever) -> tuple[LeverSet | None, str]:
        """Return the fewest levers that fit together with the first ones.

        All sets of one and two levers are tried. For larger sets, levers are removed from all of them, the most expensive
        first, as long as the work fits.
        """
        whole = _everything(useful)
        enough = self._fits_alone & {lever.key for lever in first or useful}
        everything = None if enough else self._fitting((*first, *whole))
        if not enough and everything is None:
            return None, ""
        tried = 0
        for size in range(0 if first else 1, TRIED_WHOLE + 1):
            for chosen in sorted(_sets(useful, size), key=lambda levers: sum(lever.price for lever in levers)):
                tried += 1
                together = (*first, *chosen)
                self._progress(f"trying {' and '.join(lever.key for lever in together)}")
                if len(together) == 1 and together[0].key not in self._fits_alone:
                    continue
                if (found := self._fitting(together)) is not None:
                    return found, f"The fewest changes that do, the first of {pluralize(tried, 'set')} tried that fits."
        best, kept = everything, list(whole)
        for lever in sorted(whole, key=lambda lever: -lever.price):
            fewer = [one for one in kept if one is not lever]
            self._progress(f"trying without {lever.key}")
            if (found := self._fitting((*first, *fewer))) is not None:
                best, kept = found, fewer
        return best, f"No two changes are enough; without any one of these {len(kept)} it does not fit."

    def least(self, useful: list[Lever], *first: Lever) -> str | None:
        """Return the process's range with all useful levers, as text; None if that cannot be traced."""
        question = self._together((*first, *_everything(useful)))
        try:
            found = None if question is None else self._cells.estimate(question)
        except CANNOT:
            return None
        if found is None:
            return None
        return format_range(found.process_low_bytes, found.process_high_bytes)

    def _fitting(self, chosen: Sequence[Lever]) -> LeverSet | None:
        """Return the set if its work surely fits; if one of its levers is the batch size, at the largest batch that fits."""
        question = self._together(chosen)
        if question is None:
            return None
        try:
            if self._cells.fits(question) is not True:
                return None
            if any(lever.key == "batch" for lever in chosen):
                question = _largest_fitting(question, self._cells, of=self._request)
            keys = tuple(lever.key for lever in chosen)
            return LeverSet(keys=keys, query=format_query(question), cell=self._cells.cell(question))
        except CANNOT:
            return None

    def _together(self, chosen: Iterable[Lever]) -> Request | None:
        """Return the question with all of these levers.

        If one of them is the batch size, it is the smallest that the model then accepts.
        """
        request = self._request
        try:
            for lever in sorted(chosen, key=lambda lever: lever.key == "batch"):
                changed = lever.change(request, self._cells.counted(request))
                if changed is None:
                    return None
                request = check_request(changed)
        except CANNOT:
            return None
        return request


def _sets(offered: list[Lever], size: int) -> Iterator[tuple[Lever, ...]]:
    """Yield all sets of levers that can be used together."""
    for chosen in combinations(offered, size):
        if len({lever.group for lever in chosen}) == size:
            yield chosen


def _everything(offered: list[Lever]) -> list[Lever]:
    """Return the lever with the highest price of each group, which has the largest effect."""
    return list({lever.group: lever for lever in sorted(offered, key=lambda lever: lever.price)}.values())


# ------------------------------------------------------------------------------------------------- changes without effect


def _useless(request: Request, base: Estimate) -> Iterator[str]:
    if slicing := describe_slicing(request):
        yield slicing
    if find_gpu(request.gpu).backend == "cuda":
        idle = base.reserved_at_peak_bytes - base.peak_allocated_bytes
        yield (
            "torch.cuda.empty_cache() in the loop does not lower the peak: it releases cached memory, "
            f"{format_bytes(max(idle, 0))} at the peak. The allocator does so by itself before it fails; the loop only gets slower."
        )
    if MODES[request.mode].trains:
        yield (
            "del output at the end of the step does not lower the peak, which is in the middle of the step. Freeing outputs before "
            "the backward pass may lower it: see the section on other training loops."
        )


SAME = 0.005  # of the allocated peak: a smaller difference is rounding


def describe_effect(key: str, base: Estimate, changed: Estimate) -> str:
    """Return a sentence on a change if its process figure does not explain the effect; empty if the figure does.

    Args:
        key: the lever's key.
        base: the estimate without the change.
        changed: the estimate with it.
    """
    if key == "expandable":
        return _describe_segments(base, changed)
    if changed.process_bytes < base.process_bytes * (1 - SAME):
        return ""
    grown = changed.process_bytes - base.process_bytes
    who = "Compiled code" if key == COMPILED else "It"
    more = f" {who} takes {format_bytes(grown)} more." if grown > base.process_bytes * SAME else ""
    saved = base.peak_allocated_bytes - changed.peak_allocated_bytes
    if saved > base.peak_allocated_bytes * SAME:
        reserved = base.peak_reserved_bytes - changed.peak_reserved_bytes
        change = f"falls by {format_bytes(reserved)} only" if reserved > 0 else "does not fall"
        return f"Allocated memory falls by {format_bytes(saved)}, but reserved memory {change}.{more}"
    if moves := _describe_moves(base, changed):
        return f"{moves}{more}"
    where = f" in {base.peak_module}" if base.peak_module else ""
    return f"The tensors alive at the peak, in {inside(base.peak_phase)}{where}, do not change.{more}"


def _describe_segments(base: Estimate, changed: Estimate) -> str:
    """Return a sentence on the reserved memory that expandable segments save."""
    before, after = base.peak_reserved_bytes, changed.peak_reserved_bytes
    if after < before:
        return f"Reserved memory falls from {format_bytes(before)} to {format_bytes(after)}."
    unused = format_bytes(max(before - base.peak_allocated_bytes, 0))
    return f"Reserved memory stays {format_bytes(before)}: {unused} of it is unused at the peak, and segments cannot shrink it."


def _describe_moves(base: Estimate, changed: Estimate) -> str:
    """Return which categories of tensors at the peak fall and which rise; empty if none does."""
    names = base.at_peak.keys() | changed.at_peak.keys()
    differences = {name: changed.at_peak.get(name, 0) - base.at_peak.get(name, 0) for name in names}
    least = base.peak_allocated_bytes * SAME
    fallen = [(size, name) for name, size in sorted(differences.items()) if size < -least]
    risen = [(size, name) for name, size in sorted(differences.items()) if size > least]
    if not fallen and not risen:
        return ""
    peak = (
        f"The peak moves from {inside(base.peak_phase)} to {inside(changed.peak_phase)}"
        if changed.peak_phase != base.peak_phase
        else f"At the peak in {inside(base.peak_phase)}"
    )
    falls = ", ".join(f"{name} memory falls by {format_bytes(-size)}" for size, name in sorted(fallen)[:2])
    rises = ", ".join(f"{name} memory rises by {format_bytes(size)}" for size, name in sorted(risen, reverse=True)[:2])
    return f"{peak}: {', '.join(filter(None, (falls, rises)))}."

"""Peak of a compiled training step over its activation memory budget, compared with the eager step and checkpointing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from sizer.base.errors import RequestError
from sizer.catalogue.modes import MODES
from sizer.decision.cells import CANNOT, Cells, check_request, one_cell, why
from sizer.estimating.store import ResultStore
from sizer.query.request import Request
from sizer.query.text import format_query
from sizer.report.decision import BudgetPoint, BudgetReport, cell_of

if TYPE_CHECKING:
    from sizer.estimating.model import Progress

BUDGETS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)


def budget(
    request: Request,
    *,
    config: dict | None = None,
    store: ResultStore | None = None,
    progress: Progress | None = None,
) -> Iterator[BudgetReport]:
    """Yield the growing report on the one dtype and batch size of a training request, one trace per point.

    Raises RequestError for a request of several cells, of another mode, or with keys that compiled code does not support.
    Raises the errors of an estimate for the eager step.
    """
    request = one_cell(request)
    if not MODES[request.mode].trains:
        raise RequestError(
            "the activation memory budget is that of a backward pass",
            given=f"mode={request.mode}",
            allowed="mode=training",
            todo="ask for mode=training",
        )
    eager = replace(request, compile=None, compile_scope=None, budget=None)
    compiled = check_request(replace(request, compile="default", budget=None, checkpointing=False))
    cells = Cells(eager, config=config, store=store, progress=progress)
    report_progress = progress or (lambda text: None)
    report_progress("the eager step")
    first = cells.estimate(replace(eager, checkpointing=False))
    report = BudgetReport(query=format_query(compiled, complete=True), eager=cell_of(first), pending=BUDGETS)
    yield report
    report_progress("with checkpointing")
    try:
        report = replace(report, checkpointing=cells.cell(check_request(replace(eager, checkpointing=True))))
    except CANNOT as error:
        report = replace(report, reason=why(error))
    yield report
    for number, value in enumerate(BUDGETS, 1):
        report_progress(f"budget {value:g}, {number} of {len(BUDGETS)}")
        point = _point(replace(compiled, budget=value), value, cells)
        report = replace(report, points=(*report.points, point), pending=BUDGETS[number:])
        yield report


def _point(request: Request, value: float, cells: Cells) -> BudgetPoint:
    try:
        found = cells.estimate(request)
        code = cells.compiled(request)
    except CANNOT as error:
        return BudgetPoint(budget=value, query=format_query(request), reason=why(error))
    return BudgetPoint(
        budget=value,
        query=format_query(request),
        peak_allocated_bytes=found.peak_allocated_bytes,
        peak_reserved_bytes=found.peak_reserved_bytes,
        recomputed_flops_share=None if code is None else code.recomputed_flops_share,
        recomputed=() if code is None else code.recomputed,
    )

"""One question on every device of the catalogue: whether it fits, the remaining memory, and the largest batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sizer.base.errors import RequestError
from sizer.catalogue.gpus import GPUS, Gpu
from sizer.catalogue.modes import MODES
from sizer.decision.cells import CANNOT, Cells, check_request, one_cell, why
from sizer.estimating.store import ResultStore
from sizer.query.request import Request, check_eager
from sizer.query.text import format_query
from sizer.report.decision import DeviceReport, DeviceRow, with_largest

if TYPE_CHECKING:
    from sizer.decision.changes import Changed
    from sizer.estimating.model import Progress


def devices(
    request: Request,
    *,
    config: dict | None = None,
    store: ResultStore | None = None,
    progress: Progress | None = None,
    gpus: Iterable[Gpu] = GPUS.values(),
) -> Iterator[DeviceReport]:
    """Yield the growing table of the one dtype and batch size of a request on devices, smallest memory first.

    First it says whether the work fits each device, then the largest batch. Devices share a trace if they differ in none of its
    decisions. Libraries are queried for each device. A server has a plan for each device (`served_devices`).

    Raises RequestError for a request of several dtypes or batch sizes, and the errors of an estimate if the work itself has
    none.
    """
    gpus = sorted(gpus, key=lambda gpu: (gpu.backend, gpu.capability or (), gpu.total_bytes))
    if MODES[request.mode].serves:
        from sizer.decision.serving import served_devices  # imports torch, which a table of kept traces does without

        yield from served_devices(request, gpus=gpus, config=config, store=store, progress=progress)
        return
    request = one_cell(request)
    check_eager(request, "a table of devices")
    cells = Cells(request, config=config, store=store, progress=progress)
    report_progress = progress or (lambda text: None)
    cells.counted(request)  # refused here if the architecture itself is
    rows: dict[str, DeviceRow] = {}
    helped: dict[str, Any] = {}  # the smallest change, and the devices that the work then fits

    def report(pending: list[Gpu]) -> DeviceReport:
        shown = sorted(rows.values(), key=lambda row: (row.total_bytes, row.name))
        return DeviceReport(
            query=format_query(request, complete=True),
            rows=tuple(shown),
            pending=tuple(gpu.key for gpu in pending),
            **helped,
        )

    for done, gpu in enumerate(gpus, 1):
        report_progress(f"{gpu.name}, {done} of {len(gpus)}")
        rows[gpu.key] = _row(gpu, request, cells)
        yield report(gpus[done:] or gpus)
    cells.keep_replays()
    if not any(_fits(row) for row in rows.values()):
        from sizer.decision.changes import changes  # imports torch, too

        for change in changes(request, cells):
            changed = [_changed_row(gpu, change, cells, report_progress) for gpu in gpus if gpu.backend != "cpu"]
            if fitting := sorted(filter(_fits, changed), key=lambda row: (row.total_bytes, row.name)):
                helped |= {"change": change.title, "changed": tuple(fitting)}
                break
    for done, gpu in enumerate(gpus, 1):
        report_progress(f"largest batch on {gpu.name}, {done} of {len(gpus)}")
        rows[gpu.key] = _with_largest(rows[gpu.key], request, cells)
        yield report(gpus[done:])
    cells.keep_replays()


def _fits(row: DeviceRow) -> bool:
    return row.cell is not None and row.cell.fits is True


def _changed_row(gpu: Gpu, change: Changed, cells: Cells, progress: Progress) -> DeviceRow:
    progress(f"{gpu.name} {change.title}")
    return _row(gpu, change.request, cells)


def _row(gpu: Gpu, request: Request, cells: Cells) -> DeviceRow:
    asked = _on(gpu.key, request)
    row = DeviceRow(gpu=gpu.key, name=gpu.name, total_bytes=gpu.total_bytes, query=format_query(asked))
    try:
        asked = check_request(asked)
        if asked.batches != (cells.counted(asked).smallest,):  # if it does not fit, no batch does
            cells.trace_line(asked)  # the largest batch needs it too
        return replace(row, cell=cells.cell(asked))
    except RequestError as error:
        of_device = request.is_pipeline and [refusal.key for refusal in error.refusals] == ["gpu"]
        return replace(row, reason=f"a pipeline needs {error.refusals[0].allowed}" if of_device else why(error))
    except CANNOT as error:
        return replace(row, reason=why(error))


def _with_largest(row: DeviceRow, request: Request, cells: Cells) -> DeviceRow:
    if row.cell is None:
        return replace(row, searched=True)
    try:
        found = cells.largest_batch(_on(row.gpu, request))
    except CANNOT as error:
        return replace(row, searched=True, tried=True, reason=why(error))
    return with_largest(row, found)


def _on(key: str, request: Request) -> Request:
    """Return the question on another device; its allocator may lack expandable segments."""
    expandable = request.expandable_segments and GPUS[key].backend == "cuda"
    return replace(request, gpu=key, expandable_segments=expandable)

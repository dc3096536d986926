"""One question on one GPU and on several: which parallelism fits on how many GPUs, and the memory of each rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sizer.base.units import format_bytes
from sizer.catalogue.modes import MODES
from sizer.catalogue.parallel import PARALLELS, PER_HOST, ways_to_split
from sizer.catalogue.sources import SOURCES
from sizer.decision.cells import CANNOT, Cells, check_request, one_cell, why
from sizer.decision.changes import CHECKPOINTING, changes, in_other_precision
from sizer.decision.serving import served_ranks
from sizer.estimating.store import ResultStore
from sizer.query.request import Request, check_eager, gpu_of
from sizer.query.text import format_query, parse_query
from sizer.report.decision import RankReport, RankRow, with_largest
from sizer.tape.tape import CATEGORIES, RESIZE, Tape, blocks_alive

if TYPE_CHECKING:
    from sizer.estimating.model import Progress

GPUS = (1, 2, 4, 8, 16, 32, 64)
WHOLE = "does not fit: weights and gradients on each GPU are"
PIPELINES = (
    8,
)  # hosts that layers are split among: every kind of stage is traced, of an 8B in some five seconds for each number


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One parallelism on a number of GPUs, with its question."""

    title: str
    gpus: int
    request: Request


def ranks(
    request: Request,
    *,
    config: dict | None = None,
    store: ResultStore | None = None,
    progress: Progress | None = None,
) -> Iterator[RankReport]:
    """Yield the growing table of the one dtype and batch size of a request on 1 to 64 GPUs, by every parallelism.

    The batch is that of each rank. A pipeline has as many microbatches of it as stages, so that all GPUs together have as many
    samples as with FSDP2. If no pipeline can have some number of stages, larger numbers are not tried. The last result is the
    largest batch on the fewest GPUs on which it surely fits. Work that does not depend on the number of ranks is traced once. A
    server is planned by each split of `sizer.decision.serving`.

    Raises RequestError for a request of several dtypes or batch sizes, and for work that ranks cannot share, such as a
    generation.
    Raises the errors of an estimate if the work itself has none.
    """
    if MODES[request.mode].serves:
        yield from served_ranks(request, config=config, store=store, progress=progress)
        return
    request = one_cell(request)
    check_eager(request, "ways to train on several GPUs")
    check_request(ways(request)[1].request)  # refused here if no ranks can share it
    cells = Cells(request, config=config, store=store, progress=progress)
    report_progress = progress or (lambda text: None)
    cells.counted(request)  # refused here if the architecture itself is
    asked = ways(request)
    report = RankReport(query=format_query(request, complete=True), pending=_queries(asked))
    yield report
    left = asked
    while left:
        way, *left = left
        report_progress(f"{way.title} on {way.gpus}, {len(asked) - len(left)} of {len(asked)}")
        row = hopeless(way, report.rows) or _row(way, cells)
        if way.request.pp > 1 and row.cell is None:
            left = [other for other in left if other.request.pp < way.request.pp]
        report = replace(report, rows=(*report.rows, row), pending=_queries(left))
        yield report
        if (not left or left[0].gpus > way.gpus) and not any(map(_fits, report.rows)):
            for grown in _with_checkpointing(report, way.gpus, request, cells, report_progress):
                report = grown
                yield report
    fitting = [row.gpus for row in report.rows if _fits(row) and not row.change]
    report = replace(report, fewest=min(fitting, default=None))
    if report.fewest is None and report.fewest_changed is None:
        for grown in _with_changes(report, request, asked, cells, report_progress):
            report = grown
            yield report
    for number, row in enumerate(report.rows):
        on_fewest = row.gpus == report.fewest and not row.change
        if (on_fewest or (row.gpus == report.fewest_changed and row.change == report.change)) and _fits(row):
            report_progress(f"largest batch by {row.title} on {row.gpus}")
            found = _with_largest(row, parse_query(row.query), cells)
            report = replace(report, rows=(*report.rows[:number], found, *report.rows[number + 1 :]))
            yield report
    for grown in _in_other_precision(report, cells, report_progress):
        report = grown
        yield report
    cells.keep_replays()
    yield report


def _fits(row: RankRow) -> bool:
    return row.cell is not None and row.cell.fits is True


def _with_checkpointing(
    report: RankReport, gpus: int, request: Request, cells: Cells, progress: Progress
) -> Iterator[RankReport]:
    """Yield the report with a row with checkpointing on `gpus` GPUs, if nothing fits without it.

    On several GPUs the row is FSDP2. It comes before more GPUs are tried, which may exceed a job's time limit.
    """
    first = next(changes(request, cells), None)
    if first is None or first.title != CHECKPOINTING:
        return
    key = "none" if gpus == 1 else "fsdp"
    way = next(way for way in ways(first.request) if way.gpus == gpus and way.request.parallel == key)
    progress(f"{way.title} on {way.gpus} {first.title}")
    row = replace(_row(way, cells), change=first.title)
    report = replace(report, rows=(*report.rows, row))
    yield replace(report, fewest_changed=gpus, change=first.title) if _fits(row) else report


def _with_changes(
    report: RankReport, request: Request, asked: list[Way], cells: Cells, progress: Progress
) -> Iterator[RankReport]:
    """Yield the report with rows of the smallest change that makes the work fit, on the fewest GPUs on which it then does."""
    traced = {(row.gpus, row.title) for row in report.rows if row.cell is not None or row.reason.startswith(WHOLE)}
    for change in changes(request, cells):
        if change.title == CHECKPOINTING:
            continue  # tried already
        by_title = {(way.gpus, way.title): way for way in ways(change.request)}
        rows: list[RankRow] = []
        for way in asked:
            if (way.gpus, way.title) not in traced:
                continue
            if any(_fits(row) and row.gpus < way.gpus for row in rows):
                break  # it fits on fewer
            progress(f"{way.title} on {way.gpus} {change.title}")
            rows.append(replace(_row(by_title[way.gpus, way.title], cells), change=change.title))
        if helpful := [row for row in rows if _fits(row)]:
            fewest = helpful[0].gpus
            kept = tuple(row for row in rows if row.gpus == fewest)
            yield replace(report, rows=(*report.rows, *kept), fewest_changed=fewest, change=change.title)
            return


def _in_other_precision(report: RankReport, cells: Cells, progress: Progress) -> Iterator[RankReport]:
    """Yield the report with the rows on the fewest GPUs in mixed precision, or in pure half precision if the question is mixed."""
    fewest, change = (report.fewest, "") if report.fewest is not None else (report.fewest_changed, report.change)
    if report.fewest_changed is not None and (fewest or 0) > report.fewest_changed:
        fewest, change = report.fewest_changed, report.change
    for row in [row for row in report.rows if row.gpus == fewest and row.change == change and _fits(row)]:
        other = in_other_precision(parse_query(row.query))
        if other is None:
            return
        (dtype,) = other.dtypes
        progress(f"{row.title} on {row.gpus} in {dtype}")
        way = Way(title=row.title, gpus=row.gpus, request=other)
        report = replace(report, rows=(*report.rows, replace(_row(way, cells), change=f"{change} in {dtype}".strip())))
        yield report


def ways(request: Request) -> list[Way]:
    """Return every parallelism on every number of GPUs, the fewest GPUs first.

    HSDP shards within hosts of 8 and replicates over them. In a pipeline on 64 GPUs, each host is a stage, and FSDP2 shards
    within it. Tensor parallel stays within one host. transformers has plans for both, for some models.
    """
    degrees: dict[str, Any] = {"ranks": 8, "replicate": 1, "reshard": 1, "tp": 1, "cp": 1, "pp": 1, "microbatch": 1}
    plain: dict[str, Any] = {"offload": False, "sp": False, "lp": False, "schedule": "1f1b", "rank": None}
    alone = replace(request, parallel="none", **degrees, **plain)
    within = {"sp": request.sp, "lp": request.lp}
    sharded: dict[str, Any] = {"reshard": request.reshard, "offload": request.offload}
    found = [Way(title=PARALLELS["none"].title, gpus=1, request=alone)]
    for gpus in GPUS[1:]:
        groups = gpus // PER_HOST
        of_data = {"ddp": gpus, "zero1": gpus, "fsdp": gpus} | ({"hsdp": PER_HOST} if groups > 1 else {})
        for key, ranks in of_data.items():
            row = PARALLELS[key]
            spread = {"ranks": ranks, "replicate": gpus // ranks, **(sharded if row.shards else {})}
            title = f"{row.title} of {PER_HOST}" if key == "hsdp" else row.title
            found.append(Way(title=title, gpus=gpus, request=replace(alone, parallel=key, **spread)))
        if groups in PIPELINES and "pp" not in SOURCES[request.source].refuses:
            stages: dict[str, Any] = {"parallel": "fsdp", "ranks": PER_HOST, "pp": groups, "reshard": request.reshard}
            title = f"{PARALLELS['fsdp'].title} of {PER_HOST}, pipeline parallel"
            found.append(
                Way(title=title, gpus=gpus, request=replace(alone, **stages, **_microbatches(request, groups)))
            )
        if groups > 1 and "tp" not in SOURCES[request.source].refuses:
            split = {"parallel": "fsdp", "ranks": groups, "tp": PER_HOST, **within, **sharded}
            title = f"{PARALLELS['fsdp'].title}, {ways_to_split(**within)} of {PER_HOST}"
            found.append(Way(title=title, gpus=gpus, request=replace(alone, **split)))
    return found


def _microbatches(request: Request, stages: int) -> dict[str, Any]:
    """Return the options of a pipeline with this number of stages: the question's, if it has a pipeline."""
    if request.pp > 1:
        return {"schedule": request.schedule, "microbatch": request.microbatch}
    (batch,) = request.batches
    return {"microbatch": batch, "batches": (batch * stages,)}


def _queries(asked: list[Way]) -> tuple[str, ...]:
    return tuple(format_query(way.request) for way in asked)


def _untraced(way: Way) -> RankRow:
    return RankRow(
        parallel=way.request.parallel, title=way.title, gpus=way.gpus, query=format_query(way.request)
    )


def hopeless(way: Way, rows: Iterable[RankRow]) -> RankRow | None:
    """Return the row of a parallelism that surely does not fit; None if that is not known.

    It does not fit if each rank of fewer GPUs holds more unsharded bytes than its device has. A trace of a deep model takes
    seconds for each number of GPUs, and is avoided.
    """
    fewer = next((row for row in rows if row.parallel == way.request.parallel and row.at_peak and not row.change), None)
    if way.request.parallel != "zero1" or fewer is None:
        return None
    whole = sum(fewer.at_peak.get(kind, 0) for kind in ("parameter", "gradient"))
    if whole <= gpu_of(way.request).total_bytes:
        return None
    return replace(_untraced(way), reason=f"{WHOLE} {format_bytes(whole)}")


def _row(way: Way, cells: Cells) -> RankRow:
    row = _untraced(way)
    try:
        asked = check_request(way.request)
        return replace(
            row,
            cell=cells.cell(asked),
            at_peak=weigh_peak(cells.tape(asked)),
            communication=cells.estimate(asked).communication,
        )
    except CANNOT as error:
        return replace(row, reason=why(error))


def _with_largest(row: RankRow, request: Request, cells: Cells) -> RankRow:
    try:
        found = cells.largest_batch(request)
    except CANNOT as error:
        return replace(row, searched=True, tried=True, reason=why(error))
    return with_largest(row, found)


UNSHARDED = "unsharded parameters"
LOSS = "loss over the logits"
_OF_LOSSES = ("log_softmax", "nll_loss", "cross_entropy")  # in the names of the operators of a loss


def weigh_peak(tape: Tape) -> dict[str, int]:
    """Return the requested bytes alive at the peak by kind, largest first; empty for a tape with loops.

    The kinds are the tape's categories, except for two: parameters that FSDP2 has gathered, with resized storages
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py), and tensors of a loss's operators.
    """
    if not len(tape.order) or tape.loops:
        return {}
    events, sizes = np.asarray(tape.order, np.int64), np.asarray(tape.sizes, np.int64)
    changes = np.where(events >= 0, sizes[events], -sizes[~events])
    peak = int(np.argmax(np.cumsum(changes))) + 1
    found: Counter[str] = Counter()
    for block in blocks_alive(tape.order[:peak]):
        found[_kind(tape, block)] += tape.sizes[block]
    return {kind: size for kind, size in found.most_common() if size}


def _kind(tape: Tape, block: int) -> str:
    op, category = tape.op_names[tape.ops[block]], CATEGORIES[tape.categories[block]]
    if category not in ("activation", "temporary"):
        return category
    return UNSHARDED if op == RESIZE else LOSS if any(name in op for name in _OF_LOSSES) else category

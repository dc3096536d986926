"""A server's question on every device, on several numbers of GPUs, and with other flags: each row is a separate plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sizer.base.errors import Refusal, RequestError
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.parallel import PER_HOST
from sizer.catalogue.serving import ENGINES
from sizer.decision.cells import CANNOT, check_request, why
from sizer.estimating.server_report import Planner
from sizer.estimating.store import ResultStore
from sizer.query.request import Request, gpu_of
from sizer.query.text import format_query, join_query, parse_query, split_query
from sizer.report.decision import (
    DeviceReport,
    DeviceRow,
    LeverReport,
    LeverRow,
    RankReport,
    RankRow,
    device_order,
    rank_order,
)
from sizer.report.served import Lever, Starts, figures_of

if TYPE_CHECKING:
    from sizer.estimating.model import Progress

GPUS = (1, 2, 4, 8, 16, 32, 64)
SEARCHES = {
    True: "It starts unchanged.",
    False: "It does not start. The rows are sets of changes that make it start, the smallest first.",
    "uncertain": "It may not start. The rows are sets of changes that surely make it start, the smallest first.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A question, how its answer is made, and where progress goes."""

    request: Request
    planner: Planner
    progress: Progress

    @classmethod
    def of(cls, request: Request, config: dict | None, store: ResultStore | None, progress: Progress | None) -> _Asked:
        request = replace(request, focus=None)
        planner = Planner(request, find_gpu(request.gpu), config=config, store=store, progress=progress)
        return cls(request=request, planner=planner, progress=progress or (lambda text: None))


def served_devices(
    request: Request, *, gpus: Sequence[Gpu], config: dict | None, store: ResultStore | None, progress: Progress | None
) -> Iterator[DeviceReport]:
    """Yield the growing table of a server on each device: those that hold the wanted requests first, then by memory.

    The ranks are those of the request, all on devices of one kind. Flags that are left out have the server's defaults for the
    device.
    Raises the errors of `Planner`.
    """
    asked = _Asked.of(request, config, store, progress)
    rows: list[DeviceRow] = []
    for done, gpu in enumerate(gpus, 1):
        asked.progress(f"{gpu.name}, {done} of {len(gpus)}")
        rows.append(_device_row(gpu, asked))
        yield DeviceReport(
            query=format_query(asked.request, complete=True),
            rows=tuple(sorted(rows, key=device_order)),
            pending=tuple(other.key for other in gpus[done:]),
            serves=True,
        )


def _device_row(gpu: Gpu, asked: _Asked) -> DeviceRow:
    request = replace(asked.request, gpu=gpu.key)
    row = DeviceRow(gpu=gpu.key, name=gpu.name, total_bytes=gpu.total_bytes, query=format_query(request))
    engine = ENGINES[request.engine]
    if gpu.backend not in engine.backends:
        return replace(row, reason=f"{engine.title}'s rules are not known on devices of {gpu.backend}")
    try:
        return replace(row, serve=figures_of(asked.planner.plan(check_request(request), gpu_of(request), with_levers=False)))
    except CANNOT as error:
        return replace(row, reason=why(error))


def served_ranks(
    request: Request, *, config: dict | None, store: ResultStore | None, progress: Progress | None
) -> Iterator[RankReport]:
    """Yield the growing table of a server on 1 to 64 GPUs of a kind, split as in `ways`.

    The ranks of the request are ignored. `fewest` is the least number of GPUs on which it surely starts and holds the wanted
    requests.
    Raises RequestError for an engine without ranks, and the errors of `Planner`.
    """
    engine = ENGINES[request.engine]
    if not {"tp", "pp", "dp"} <= {*engine.takes}:
        refusal = Refusal(
            key="engine",
            given=f"{engine.key!r}, with an unknown split over GPUs",
            allowed=" or ".join(row.key for row in ENGINES.values() if "tp" in row.takes),
            todo="ask `sizer estimate` for one device",
        )
        raise RequestError(refusals=[refusal])
    asked = _Asked.of(request, config, store, progress)
    left = ways(asked.request, asked.planner.architecture.heads)
    report = RankReport(
        query=format_query(asked.request, complete=True), pending=tuple(map(format_query, left)), serves=True
    )
    yield report
    for number, way in enumerate(left, 1):
        row = _rank_row(way, asked)
        asked.progress(f"{row.title} on {row.gpus}, {number} of {len(left)}")
        rows = tuple(sorted((*report.rows, row), key=rank_order))
        fewest = min((one.gpus for one in rows if one.serve is not None and one.serve.fits is True), default=None)
        report = replace(report, rows=rows, fewest=fewest, pending=report.pending[1:])
        yield report


def _rank_row(way: Request, asked: _Asked) -> RankRow:
    words = [f"{word} parallel of {n}" for word, n in (("tensor", way.tp), ("pipeline", way.pp), ("data", way.dp)) if n > 1]
    gpus = way.tp * way.pp * way.dp
    row = RankRow(parallel="none", title=", ".join(words) or "One GPU", gpus=gpus, query=format_query(way))
    try:
        return replace(row, serve=figures_of(asked.planner.plan(check_request(way), gpu_of(way), with_levers=False)))
    except CANNOT as error:
        return replace(row, reason=why(error))


def ways(request: Request, heads: int) -> list[Request]:
    """Return the questions that split a server over 1 to 64 GPUs as tp × pp × dp, the fewest GPUs first.

    In a host of 8 GPUs these are all splits into powers of two with a tp that divides the heads. Over several hosts tensor
    parallel stays within a host, with the largest tp that divides the heads. Pipeline and data parallel share the rest. vLLM's
    documentation recommends tp as large as a node and pp for the nodes (docs/serving/parallelism_scaling.md).
    """
    splits = [tp for tp in (1, 2, 4, 8) if heads % tp == 0]
    found = []
    for gpus in GPUS:
        for tp in splits if gpus <= PER_HOST else splits[-1:]:
            rest = gpus // tp
            stages = [pp for pp in (1 << power for power in range(rest.bit_length())) if rest % pp == 0]
            found += [replace(request, tp=tp, pp=pp, dp=rest // pp) for pp in stages if gpus % tp == 0]
    return found


def served_levers(
    request: Request, *, config: dict | None, store: ResultStore | None, progress: Progress | None
) -> Iterator[LeverReport]:
    """Yield changes with which a server starts or holds more requests: the levers of its estimate, each a separate plan.

    Raises the errors of `Planner`, and RequestError for a flag that does not fit the model.
    """
    asked = _Asked.of(request, config, store, progress)
    asked.progress("planning the server")
    served = asked.planner.plan(asked.request, gpu_of(request))
    query = format_query(asked.request)
    yield LeverReport(
        query=format_query(asked.request, complete=True),
        serve=figures_of(served),
        rows=tuple(_lever_row(lever, query) for lever in served.levers),
        search=_search(served.starts, served.levers),
    )


def _lever_row(lever: Lever, query: str) -> LeverRow:
    asked = format_query(parse_query(join_query(split_query(query) | split_query(lever.query))))
    return LeverRow(key=lever.query, title=lever.flags, cost=lever.note, code=lever.flags, query=asked, serve=lever)


def _search(starts: Starts, levers: Sequence[Lever]) -> str:
    if starts is not True and not levers:
        return f"{SEARCHES[starts].partition('.')[0]}, and with none of the tested changes."
    return SEARCHES[starts]

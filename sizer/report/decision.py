"""Changes, limits and suitable devices: answers next to a report, as plain data.

Every figure is an estimate (sizer.report.estimate), traced or replayed for the query in the same row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

from sizer.base.units import format_bytes, pluralize
from sizer.report.estimate import Estimate
from sizer.report.fit import Fits, Verdict, verdict_of
from sizer.report.interval import Interval
from sizer.report.largest_batch import MaxBatch
from sizer.report.served import Lever, ServedFigures
from sizer.tape.communication import Volume


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The figures of one dtype and batch size: bytes and verdict as in an Estimate."""

    dtype: str
    batch: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    process_bytes: int
    process_low_bytes: int
    process_high_bytes: int
    fits: Fits
    returned_bytes: int = 0
    verdict: Verdict = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "verdict", verdict_of(self.fits, self.returned_bytes))


def cell_of(estimate: Estimate) -> Cell:
    """Return the figures of an estimate without its curve and phases."""
    return Cell(**{spec.name: getattr(estimate, spec.name) for spec in fields(Cell) if spec.init})


@dataclass(frozen=True, slots=True, kw_only=True)
class LeverRow:
    """One change: `query` includes it, and `cell` is the estimate of that query, or None with a `reason`.

    `cost` says what the change costs, `code` is the change in PyTorch. `effect` is a text: the reserved memory that it saves,
    or why it saves none. For a server `serve` holds the resulting figures and `code` its flags; `serve` is None in other modes.
    """

    key: str
    title: str
    cost: str
    code: str
    query: str
    cell: Cell | None = None
    reason: str = ""
    effect: str = ""
    serve: Lever | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeverSet:
    """Changes to make together, by key, so that the work surely fits: the query with all of them, and its estimate."""

    keys: tuple[str, ...]
    query: str
    cell: Cell


@dataclass(frozen=True, slots=True, kw_only=True)
class LeverReport:
    """Effects of changes for one dtype and batch size, `base`.

    `smallest` is None in three cases: the work fits unchanged, the search still runs, or it found nothing. `search` says which,
    in words. `useless` are well-known changes that do not help, each with its reason. `pending` are the levers to come, and
    `pending_titles` their titles. `serve` are the figures of an unchanged server; then, and only then, `base` is None.
    """

    query: str
    base: Cell | None = None
    rows: tuple[LeverRow, ...] = ()
    smallest: LeverSet | None = None
    search: str = ""
    useless: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()
    pending_titles: tuple[str, ...] = ()
    serve: ServedFigures | None = None


SETTLED = 0.005  # of the process: a change that saves less saves nothing worth a row


def saves(row: LeverRow, base: Cell) -> bool:
    """Return True if a change makes the process smaller by more than rounding."""
    return row.cell is not None and row.cell.process_bytes < base.process_bytes * (1 - SETTLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Largest value of one key of a query that surely fits the device, and the largest that may; all other keys stay.

    `value` is None if even the smallest does not fit. `reason` says why, and also where the search ended by itself. No value
    above `most_value` can fit; None if that is not known. The `query` has the value that surely fits, `cell` is its estimate.
    """

    key: str
    title: str
    value: int | None
    possible_value: int | None
    query: str = ""
    cell: Cell | None = None
    reason: str = ""
    most_value: int | None = None

    @property
    def interval(self) -> Interval:
        """Return the interval of the largest value."""
        return Interval(least=self.value or 0, most=self.most_value)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitReport:
    """The limits of one question; `pending` are the keys to come."""

    query: str
    limits: tuple[Limit, ...] = ()
    pending: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRow:
    """One query on one device of the catalogue. `cell` is None with a `reason` if the device's rules cannot trace the step.

    `batch` is the largest batch size that surely fits, `possible_batch` the largest that may. They are None if even 1 does not
    fit, or while `searched` is False. With `tried` only the query's own batch size was tested. `serve` holds the figures of a
    server on the device. It is None in other modes, and a server has no `batch`.
    """

    gpu: str
    name: str
    total_bytes: int
    query: str
    cell: Cell | None = None
    batch: int | None = None
    possible_batch: int | None = None
    searched: bool = False
    tried: bool = False
    reason: str = ""
    most_batch: int | None = None
    serve: ServedFigures | None = None


def device_order(row: DeviceRow) -> tuple[object, ...]:
    """Return the sort key of devices: by memory; for servers those first that start and hold the wanted requests."""
    return _served_order(row.serve), row.total_bytes, row.name


def _served_order(found: ServedFigures | None) -> int:
    return [True, "uncertain", False, None].index(None if found is None else found.fits)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """One query on every device of the catalogue; `pending` are the keys of devices still to come.

    If it surely fits none, `change` is the smallest change with which it fits some devices, and `changed` are these devices.
    `serves` is True if the rows are servers.
    """

    query: str
    rows: tuple[DeviceRow, ...] = ()
    pending: tuple[str, ...] = ()
    change: str = ""
    changed: tuple[DeviceRow, ...] = ()
    serves: bool = False


SMALLEST_NAMED = 3  # of the devices that the work fits


def describe_fitting(found: DeviceReport) -> str:
    """Return a sentence: the number of devices so far that the work fits, and the smallest of them."""
    fitting = sorted(
        (row.total_bytes, row.name, row.cell.verdict == "tight")
        for row in found.rows
        if row.cell is not None and row.cell.fits is True
    )
    said = f"It fits {pluralize(len(fitting), 'device')} of {len(found.rows):,}"
    names = ", ".join(f"{name} (tight)" if tight else name for _, name, tight in fitting[:SMALLEST_NAMED])
    if fitting:
        return f"{said}; the smallest: {names}."
    helped = ", ".join(row.name for row in found.changed[:SMALLEST_NAMED])
    if helped:
        said += f". It fits {pluralize(len(found.changed), 'device')} {found.change}; the smallest: {helped}"
    return f"{said}."


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One query on several GPUs with one parallelism, `title`. `cell` is that of each rank, or None with a `reason`.

    `at_peak` are the bytes alive at the peak, largest first (sizer.decision.ranks). `communication` is the traffic of a rank
    in a step.

    `batch` is the largest batch size of a rank that surely fits, `possible_batch` the largest that may. They are None if even 1
    does not fit, or while `searched` is False: it is searched on the fewest sufficient GPUs. With `tried` only the query's own
    batch size was tested. `change` names the difference from the query ("with checkpointing", "in amp-bfloat16"). `serve` holds
    the figures of a server on the GPUs, None in other modes.
    """

    parallel: str
    title: str
    gpus: int
    query: str
    cell: Cell | None = None
    at_peak: dict[str, int] = field(default_factory=dict)
    communication: tuple[Volume, ...] = ()
    batch: int | None = None
    possible_batch: int | None = None
    searched: bool = False
    tried: bool = False
    reason: str = ""
    most_batch: int | None = None
    change: str = ""
    serve: ServedFigures | None = None

    @property
    def words(self) -> str:
        """Return the parallelism with the change of the query ("FSDP2 with checkpointing")."""
        return f"{self.title} {self.change}".rstrip()


def rank_order(row: RankRow) -> tuple[object, ...]:
    """Return the sort key of servers: first those that start and hold the wanted requests, by GPUs, most requests first."""
    return _served_order(row.serve), row.gpus, -(row.serve.requests_at_once if row.serve else 0)


Row = TypeVar("Row", DeviceRow, RankRow)


def with_largest(row: Row, found: MaxBatch) -> Row:
    """Return the row with the largest batch found for it."""
    return replace(
        row,
        searched=True,
        batch=found.batch,
        possible_batch=found.possible_batch,
        tried=found.tried,
        most_batch=found.interval.most,
        reason=found.reason,
    )


def largest_batch(row: DeviceRow | RankRow) -> Interval:
    """Return the known bounds of a row's largest batch."""
    found = Interval(least=row.batch or 0, most=row.most_batch) if row.searched else Interval()
    return found if row.cell is None else found.with_verdict(row.cell.batch, row.cell.fits)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One question on several numbers of GPUs of its device's kind; `pending` are the queries of rows to come.

    `fewest` is the least number of them on which it surely fits, by any parallelism; None if it fits on none. Then the smallest
    `change` was searched that makes it fit on some number, `fewest_changed`. `serves` is True if the rows are servers.
    """

    query: str
    rows: tuple[RankRow, ...] = ()
    fewest: int | None = None
    fewest_changed: int | None = None
    change: str = ""
    pending: tuple[str, ...] = ()
    serves: bool = False


def describe_fewest(found: RankReport) -> Iterator[str]:
    """Yield a line for each parallelism on the fewest sufficient GPUs, once the largest batch there is known."""
    if found.fewest is None and found.rows and not found.pending:
        most = max(row.gpus for row in found.rows)
        if found.fewest_changed is None:
            yield f"It fits on none of up to {most} GPUs, and with none of the tested changes."
        else:
            gpus = pluralize(found.fewest_changed, "GPU")
            yield f"It fits on {gpus} {found.change}; unchanged, on none of up to {most} GPUs."
    elif found.fewest is not None and found.fewest_changed is not None and found.fewest_changed < found.fewest:
        yield f"It fits on {pluralize(found.fewest_changed, 'GPU')} {found.change}; unchanged, on {found.fewest}."
    for row in found.rows:
        if row.searched:
            gpus = f"{row.gpus} GPUs by {row.words}" if row.gpus > 1 else f"one GPU {row.change}".rstrip()
            each = "of each " if row.gpus > 1 else ""
            yield f"It fits on {gpus}; the largest batch {each}is {largest_batch(row)}."


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPoint:
    """Peak of a compiled training step at one activation memory budget (0 to 1), in bytes; None if it cannot be traced.

    `recomputed_flops_share` is the share of the forward pass of compiled regions that the backward pass recomputes, in FLOPs by
    PyTorch's formulas. `recomputed` are the recomputed operators, most frequent first. `reason` says why there is no figure.
    """

    budget: float
    query: str
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    recomputed_flops_share: float | None = None
    recomputed: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetReport:
    """One training step eagerly, with checkpointing, and compiled at several budgets; `pending` are the budgets to come.

    `checkpointing` is None with a `reason` if it cannot be traced.
    """

    query: str
    eager: Cell
    checkpointing: Cell | None = None
    reason: str = ""
    points: tuple[BudgetPoint, ...] = ()
    pending: tuple[float, ...] = ()


def describe_budgets(found: BudgetReport) -> str:
    """Return which budget has the lowest peak, and whether a smaller one needs more; empty as long as points are to come."""
    peaks = [(point.peak_allocated_bytes, -point.budget) for point in found.points if point.peak_allocated_bytes is not None]
    if found.pending or not peaks:
        return ""
    lowest, budget = min(peaks)
    text = f"The lowest tested peak is {format_bytes(lowest)}, at budget {-budget:g}."
    if any(other > budget and peak > lowest for peak, other in peaks):
        text += " A smaller budget needs more: recomputation in the backward pass needs memory."
    return text

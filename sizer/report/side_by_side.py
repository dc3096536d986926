"""Comparison of several questions as plain data: the cell in focus of each, and its differences from the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sizer.base.codec import encode
from sizer.catalogue.modes import MODES
from sizer.query.request import Request
from sizer.query.text import format_query, key_differences
from sizer.report.fit import Fits, Verdict
from sizer.report.interval import Interval
from sizer.report.report import Report
from sizer.report.served import Starts
from sizer.report.table import write_csv

SCHEMA = 1
OF_ESTIMATE = (
    "weights_bytes",
    "gradients_bytes",
    "optimizer_bytes",
    "activations_bytes",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "process_bytes",
)
OF_SERVER = ("kv_cache_bytes", "kv_tokens", "requests_at_once")
FIGURES = ("parameters", *OF_ESTIMATE, *OF_SERVER, "largest_batch")  # the names of a Side that have a difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One question and its answer: the figures of an Estimate at the focused dtype and batch size, None if missing.

    `largest_batch` surely fits the question's device, `possible_batch` may, once they were `searched`. No batch above
    `most_batch` can. With `tried` they are the largest of the requested batch sizes, and have no difference. `differences` are
    the figures less those of the first question, if both have them. `error` says why figures are missing if they will not come.

    A server has its weights, its cache and the requests of `request_tokens` each that it holds at once; `starts` says if it starts.
    """

    query: str
    dtype: str | None = None
    batch: int | None = None
    parameters: int | None = None
    weights_bytes: int | None = None
    gradients_bytes: int | None = None
    optimizer_bytes: int | None = None
    activations_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    process_bytes: int | None = None
    fits: Fits | None = None
    verdict: Verdict | None = None
    largest_batch: int | None = None
    possible_batch: int | None = None
    searched: bool = False
    tried: bool = False
    most_batch: int | None = None
    serves: bool = False
    starts: Starts | None = None
    request_tokens: int | None = None
    kv_cache_bytes: int | None = None
    kv_tokens: int | None = None
    requests_at_once: float | None = None
    differences: dict[str, float] = field(default_factory=dict)
    error: str = ""

    @property
    def interval(self) -> Interval:
        """Return the interval of the largest batch."""
        found = Interval(least=self.largest_batch or 0, most=self.most_batch)
        return found if self.fits is None or self.batch is None else found.with_verdict(self.batch, self.fits)


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """Compared questions: the keys in which they `differ` with the value of each, and the keys with the `same` value."""

    schema: int = SCHEMA
    differ: dict[str, tuple[str, ...]]
    same: dict[str, str]
    questions: tuple[Side, ...]

    @property
    def figures(self) -> tuple[str, ...]:
        """Return the names of the figures that these questions have: of a step, of a server, or both."""
        served = {side.serves for side in self.questions}
        left_out = {True: (*OF_ESTIMATE[1:], "largest_batch"), False: OF_SERVER}
        return tuple(name for name in FIGURES if len(served) > 1 or name not in left_out[served == {True}])

    @property
    def largest_bytes(self) -> int:
        """Return the largest number of bytes among the figures; it decides the unit of a table."""
        sizes = [getattr(side, name) for side in self.questions for name in FIGURES if name.endswith("_bytes")]
        return max((size for size in sizes if size is not None), default=0)

    def to_dict(self) -> dict:
        """Dicts, lists and scalars; byte counts are integers."""
        return encode(self)

    def to_csv(self) -> str:
        """Return the questions as CSV, a row each: the keys that differ, the figures, and the differences from the first."""
        without = {"query", "searched", "differences", "error", "serves"}
        if not any(side.serves for side in self.questions):
            without |= {*OF_SERVER, "starts", "request_tokens"}
        figures = [name for name in Side.__dataclass_fields__ if name not in without]
        header = [
            *(f"request.{key}" for key in self.differ),
            *figures,
            *(f"differences.{name}" for name in FIGURES if name not in without),
            "error",
            "query",
        ]
        rows = (
            {name: getattr(side, name) for name in (*figures, "error", "query")}
            | {f"differences.{name}": size for name, size in side.differences.items()}
            | {f"request.{key}": values[place] for key, values in self.differ.items()}
            for place, side in enumerate(self.questions)
        )
        return write_csv(header, rows)


def side_by_side(requests: Sequence[Request], sides: Sequence[Side]) -> SideBySide:
    """Return the questions with their answers, and their differences from the first."""
    differ, same = key_differences(requests)
    first = sides[0]
    return SideBySide(
        differ=differ,
        same=same,
        questions=(first, *(replace(side, differences=_differences(first, side)) for side in sides[1:])),
    )


def _differences(first: Side, side: Side) -> dict[str, float]:
    pairs = {name: (getattr(first, name), getattr(side, name)) for name in FIGURES}
    if first.tried or side.tried:
        del pairs["largest_batch"]
    return {name: one - other for name, (other, one) in pairs.items() if None not in (one, other)}


def side_of(request: Request, report: Report | None, error: str = "") -> Side:
    """Return the figures of a report, complete or not, at a question's focus; `error` says why missing ones will not come."""
    query, serves = format_query(request), MODES[request.mode].serves
    if report is None:
        return Side(query=query, error=error, serves=serves)
    if (served := report.serve) is not None:
        return Side(
            query=query,
            error=error,
            serves=True,
            parameters=report.model.parameters,
            starts=served.starts,
            request_tokens=int(served.flags["max_model_len"] or 0),
            weights_bytes=served.weights_bytes,
            kv_cache_bytes=served.kv_cache_bytes,
            kv_tokens=served.kv_tokens,
            requests_at_once=served.requests_at_once,
        )
    focus = None if report.focus is None else report.find(report.focus.dtype, report.focus.batch)
    counted = Side(query=query, parameters=report.model.parameters, error=error)
    if focus is None:
        return counted if error or report.pending else replace(counted, error=next(iter(report.failures.values()), ""))
    largest = next((row for row in report.max_batch if row.dtype == focus.dtype), None)
    return replace(
        counted,
        dtype=focus.dtype,
        batch=focus.batch,
        fits=focus.fits,
        verdict=focus.verdict,
        largest_batch=None if largest is None else largest.batch,
        possible_batch=None if largest is None else largest.possible_batch,
        tried=largest is not None and largest.tried,
        most_batch=report.largest_batch(focus.dtype).most,
        searched=largest is not None or not report.pending,
        **{name: getattr(focus, name) for name in OF_ESTIMATE},
    )

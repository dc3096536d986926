"""The complete answer as plain data: pages show it, the command line prints it and the child process returns it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from sizer.allocator.timeline import Curve, CurvePoint
from sizer.base.codec import DecodeError, decode, encode, json_names
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.modes import MODES
from sizer.catalogue.recipes import GRPO
from sizer.report.census import Census, ModuleRow
from sizer.report.column import Column
from sizer.report.estimate import Estimate, describe_range
from sizer.report.explanation import Explanation, Formula, explain_workspaces
from sizer.report.interval import Interval, left_out
from sizer.report.kv_cache import KvCache
from sizer.report.largest_batch import MaxBatch
from sizer.report.loop_decisions import LoopDecision
from sizer.report.served import Served
from sizer.report.table import write_csv
from sizer.tape.compiled_code import CompiledCode
from sizer.tape.tape import CATEGORIES, FROZEN, KV_CACHE, PHASES

SCHEMA = 1
Scalar = bool | int | float | str | None

_PHASE_NUMBERS = ("allocated_bytes", "peak_allocated_bytes", "reserved_bytes")
_OF_EACH_ROW = ("dtypes", "batches")  # of the query; a row has its own
# In CSV only if any estimate has some
_OPTIONAL = (
    *("frozen_bytes", "kv_cache_bytes", "host_bytes", "copied_bytes", "step_copied_bytes", "returned_bytes", "retries"),
)
LONGEST_LINK = 8_000  # characters: longer ones do not pass whole through proxies, servers and chat programs
_NOT_IN_CSV = ("at_peak", "phases", "curve", "out_of_memory", "margins", "communication")


@dataclass(frozen=True, slots=True, kw_only=True)
class Focus:
    """The dtype and batch size of a report that is looked at."""

    dtype: str
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Answer to one query. Attributes are the keys of the public JSON; `model.class_name` is its "model.class".

    `versions` are the installed versions, `target` the versions of the rules in use. `failures` says per dtype why its step
    could not be traced. `request` echoes the query's values as understood. `notes` are facts about this answer, and `cautions`
    are the notes to read with the figures. `assumptions` are choices (kernels, backends), `uncounted` is missing. `explanation`
    describes the computation. `kv_caches` are those of a generation, by dtype. `loop` is the memory of other training loops at
    the focus. `serve` holds a server's figures, None in other modes. `focus` is the estimate to look at first, None without
    estimates.

    `pending` are the dtypes with cells or the largest batch still to come; a complete answer has none. `compiled` is the result
    of torch.compile, None for eager code.
    """

    schema: int = SCHEMA
    query: str
    versions: dict[str, str]
    request: dict[str, Scalar | tuple[Scalar | tuple[Scalar, ...], ...]]
    model: Census
    gpu: Gpu
    estimates: tuple[Estimate, ...]
    max_batch: tuple[MaxBatch, ...]
    focus: Focus | None = None
    pending: tuple[str, ...] = ()
    failures: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()
    target: dict[str, str] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()
    explanation: Explanation | None = None
    kv_caches: tuple[KvCache, ...] = ()
    loop: tuple[LoopDecision, ...] = ()
    serve: Served | None = None
    compiled: CompiledCode | None = None

    def find(self, dtype: str, batch: int) -> Estimate | None:
        """Return the estimate of a dtype at a batch size, None if it is missing."""
        return next((row for row in self.estimates if (row.dtype, row.batch) == (dtype, batch)), None)

    @property
    def all_fit(self) -> bool:
        """Return True if every dtype and batch of the query surely fits; one without an estimate does not.

        A server must start, and hold the wanted requests.
        """
        if self.serve is not None:
            return self.serve.fits is True
        rows = [self.find(dtype, batch) for dtype in self._asked("dtypes") for batch in self._asked("batches")]
        return all(row is not None and row.fits is True for row in rows)

    def largest_batch(self, dtype: str) -> Interval:
        """Return the bounds of a dtype's largest batch, from its cells and its search."""
        found = Interval()
        for row in self.max_batch:
            if row.dtype == dtype:
                found = found.meet(row.interval)
        for estimate in self.estimates:
            if estimate.dtype == dtype:
                found = found.with_verdict(estimate.batch, estimate.fits)
        return found

    def left_out(self, dtype: str) -> tuple[int, ...]:
        """Return the batch sizes of a dtype that were not computed because two smaller ones do not fit."""
        fits = {row.batch: row.fits for row in self.estimates if row.dtype == dtype}
        return left_out(self._asked("batches"), fits)

    def focused(self, cell: tuple[str, int] | None) -> Report:
        """Return the report with another focus; unchanged for None or a focus without an estimate."""
        if cell is None or self.find(*cell) is None:
            return self
        return replace(self, focus=Focus(dtype=cell[0], batch=cell[1]))

    def without(self, known: Collection[tuple[str, int]]) -> Report:
        """Return the report without the estimates of some dtypes and batch sizes."""
        return replace(self, estimates=tuple(row for row in self.estimates if (row.dtype, row.batch) not in known))

    def after(self, earlier: Report) -> Report:
        """Return the report with the estimates of an earlier one of the same query added, in the order of the query."""
        rows = {(row.dtype, row.batch): row for row in (*earlier.estimates, *self.estimates)}
        dtypes = self._asked("dtypes")
        ordered = sorted(rows.values(), key=lambda row: (dtypes.index(row.dtype), row.batch))
        return replace(self, estimates=tuple(ordered))

    def to_dict(self) -> dict:
        """Return the public JSON as dicts, lists and scalars; byte counts are integers. Curves are lists of their points."""
        found = encode(self)
        for row, estimate in zip(found["estimates"], self.estimates, strict=True):
            row["curve"] = encode([*estimate.curve])
        return found

    def to_json(self) -> str:
        """Return the public JSON as one line of text."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False)

    def to_csv(self, *, address: str = "", longest_link: int = LONGEST_LINK) -> str:
        """Return the estimates as CSV, one row per dtype and batch; headers are the JSON's names, nested ones with dots.

        A space in a name is an underscore here. Columns that do not apply to the question, such as a KV cache in training, are
        left out. The last columns are the device, the largest batch, the link and the question.

        Args:
            address: of the app that answers links; without it `link` is the query alone.
            longest_link: characters of a link; longer ones, with a whole config in them, are left out.
        """
        plain = [spec.name for spec in fields(Estimate) if spec.name not in _NOT_IN_CSV and self._has(spec.name)]
        categories = [f"at_peak.{category}" for category in CATEGORIES if self._holds(category)]
        known = dict.fromkeys(use.phase for row in self.estimates for use in row.phases)
        ordered = [*(phase for phase in PHASES if phase in known), *(phase for phase in known if phase not in PHASES)]
        phases = [f"phases.{phase}.{number}" for phase in ordered for number in _PHASE_NUMBERS]
        question = self._question()
        own = ("device_bytes", "largest_batch", "link")
        rows = (
            _flatten(row)
            | {
                "device_bytes": self.gpu.total_bytes,
                "largest_batch": str(self.largest_batch(row.dtype)),
                "link": self._link(row, address, longest_link),
            }
            | question
            for row in self.estimates
        )
        columns = [*plain, *categories, *phases, *own, *question]
        named = ({name.replace(" ", "_"): value for name, value in row.items()} for row in rows)
        return write_csv([name.replace(" ", "_") for name in columns], named)

    def _has(self, name: str) -> bool:
        """Return False for an optional figure that no estimate has."""
        return name not in _OPTIONAL or any(getattr(row, name) for row in self.estimates)

    def _holds(self, category: str) -> bool:
        """Return False for a category of other questions: nothing of it is in any estimate."""
        return category not in (FROZEN, KV_CACHE) or any(row.at_peak.get(category) for row in self.estimates)

    def _link(self, row: Estimate, address: str, longest: int) -> str:
        """Return the link to the cell of an estimate."""
        items = [item for item in self.query.split("&") if not item.startswith("focus=")]
        query = "&".join([*items, f"focus={row.dtype}:{row.batch}"])
        if len(query) > longest:
            return ""
        return f"{address}/?{query}" if address else query

    def _question(self) -> dict[str, Scalar]:
        """Return the model, the device and the values of the query as CSV header -> value, sizes of images as in a query.

        Values that do not apply to the question are left out.
        """
        values = {
            f"request.{key}": "x".join(map(str, value)) if isinstance(value, tuple) else value
            for key, value in self.request.items()
            if key not in _OF_EACH_ROW and value is not None and self._asks(key)
        }
        return {"model.name": self.model.name, **values, "gpu.name": self.gpu.name}

    def _asked(self, key: str) -> tuple[Any, ...]:
        """Return the values of a key of the query that may have several."""
        values = self.request[key]
        return values if isinstance(values, tuple) else (values,)

    def _asks(self, key: str) -> bool:
        """Return False for a value of the query that changes nothing in this question."""
        if key.startswith("adapter"):
            return self.request.get("train") == "adapter"
        if key == "new" and self.request.get("objective") == GRPO:
            return True
        mode = MODES.get(str(self.request.get("mode")))
        return mode is None or key not in mode.unused

    def modules_csv(self) -> str:
        """Return the model's modules as CSV, one row each with its own elements and bytes; headers are the JSON's names."""
        return write_csv(json_names(ModuleRow), map(encode, self.model.modules))

    @classmethod
    def from_dict(cls, data: object) -> Report:
        """Return the report from the data that `to_dict` or `encode` returned. Raises DecodeError for any other data."""
        report = decode(cls, _with_columns(data))
        for row in report.estimates:
            if not row.curve.is_even():
                raise DecodeError(f"the curve of {row.dtype} at batch {row.batch} has columns of different lengths")
        if report.schema != SCHEMA:
            raise DecodeError(f"report.schema was {report.schema}; allowed is {SCHEMA}: read it with another version")
        return report


def build_report(
    *,
    query: str,
    versions: Mapping[str, str],
    census: Census,
    columns: Mapping[str, Column],
    gpu: Gpu,
    mode: str,
    request: Mapping[str, Any] | None = None,
    focus: Focus | None = None,
    pending: Iterable[str] = (),
    failures: Mapping[str, str] | None = None,
    notes: Iterable[str] = (),
    cautions: Iterable[str] = (),
    target: Mapping[str, str] | None = None,
    assumptions: Iterable[str] = (),
    uncounted: Iterable[str] = (),
    explanation: Explanation | None = None,
    formulas: Mapping[str, Formula] | None = None,
    kv_caches: Iterable[KvCache] = (),
    loop: Iterable[LoopDecision] = (),
    serve: Served | None = None,
    compiled: CompiledCode | None = None,
) -> Report:
    """Return the report (bytes) of the counted and traced work: the `columns` of each dtype, side by side.

    The tracer's assumptions (`stand_ins`) are added to `uncounted`. The workspaces on the tapes, at the first batch of each
    dtype, and their `formulas` by operator complete the `explanation`.
    """
    cautions = tuple(cautions)
    estimates = tuple(row for column in columns.values() for row in column.estimates)
    stand_ins = tuple(dict.fromkeys(text for column in columns.values() for text in column.stand_ins))
    of_columns = (f"{dtype}, {note}" for dtype, column in columns.items() for note in column.notes)
    return Report(
        query=query,
        versions=dict(versions),
        request={
            key: tuple(value) if isinstance(value, list) else value
            for key, value in {"mode": mode, **(request or {})}.items()
        },
        model=census,
        gpu=gpu,
        estimates=estimates,
        max_batch=tuple(column.max_batch for column in columns.values() if column.max_batch is not None),
        focus=focus,
        pending=tuple(pending),
        failures=dict(failures or {}),
        notes=tuple(dict.fromkeys([*cautions, *notes, *of_columns, *(compiled.notes() if compiled else ())])),
        compiled=compiled,
        cautions=cautions,
        target=dict(target or {}),
        assumptions=tuple(assumptions),
        uncounted=tuple(dict.fromkeys([*uncounted, *stand_ins])),
        kv_caches=tuple(kv_caches),
        loop=tuple(loop),
        serve=serve,
        explanation=explanation
        and replace(
            explanation,
            workspaces=explain_workspaces(
                {dtype: column.first for dtype, column in columns.items() if column.first is not None}, formulas
            ),
            stand_ins=stand_ins,
            margins=tuple(describe_range({row.dtype: row for row in reversed(estimates)}.values())),
        ),
    )


def default_focus(estimates: Iterable[Estimate]) -> Focus | None:
    """Return the largest batch size of one dtype's estimates that surely fits, else the smallest; None without estimates."""
    rows = sorted(estimates, key=lambda row: row.batch)
    fitting = [row for row in rows if row.fits is True]
    chosen = fitting[-1] if fitting else rows[0] if rows else None
    return Focus(dtype=chosen.dtype, batch=chosen.batch) if chosen else None


def _with_columns(data: object) -> object:
    """Return the data of a report with its curves by columns. Raises DecodeError for invalid points."""
    if not isinstance(data, dict) or not isinstance(rows := data.get("estimates"), list):
        return data
    return {
        **data,
        "estimates": [_with_its_columns(row, f"report.estimates[{at}].curve") for at, row in enumerate(rows)],
    }


def _with_its_columns(row: object, where: str) -> object:
    if not isinstance(row, dict) or not isinstance(points := row.get("curve"), list):
        return row
    try:
        curve = Curve.of_points(decode(tuple[CurvePoint, ...], points, where))
    except DecodeError:
        raise
    except ValueError:
        raise DecodeError(f"{where} holds points of different numbers of categories") from None
    return {**row, "curve": encode(curve)}


def _flatten(row: Estimate) -> dict[str, object]:
    """Return one estimate as CSV header -> value."""
    cells = {spec.name: getattr(row, spec.name) for spec in fields(Estimate)}
    cells |= {f"at_peak.{category}": size for category, size in row.at_peak.items()}
    for use in row.phases:
        cells |= {f"phases.{use.phase}.{number}": getattr(use, number) for number in _PHASE_NUMBERS}
    return cells

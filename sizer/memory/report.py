"""The whole answer as plain data: what the pages show, the command line prints and the child process sends back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace

from sizer.catalogue.gpus import Gpu
from sizer.memory.affine import NotAffineError
from sizer.memory.census import Census, ModuleRow
from sizer.memory.codec import DecodeError, decode, encode, json_names
from sizer.memory.estimate import Estimate, describe_range, estimate_tape
from sizer.memory.explanation import Explanation, Formula, explain_workspaces
from sizer.memory.family import TapeFamily
from sizer.memory.fit import MaxBatch, largest_batch
from sizer.memory.size_queries import SizeOracle
from sizer.memory.table import write_csv
from sizer.memory.tape import CATEGORIES, PHASES, Tape

SCHEMA = 1
Scalar = bool | int | float | str | None

_PHASE_NUMBERS = ("allocated_bytes", "peak_allocated_bytes", "reserved_bytes")
_NOT_IN_CSV = ("at_peak", "phases", "curve", "out_of_memory", "margins")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The answer to one query. Attributes are the keys of the public JSON; `model.class_name` is its "model.class".

    `versions` are those installed, `target` those whose rules were followed. `failures` says per dtype why its step could not be
    traced. `request` echoes the query's values as understood. `notes` are facts about this answer, `cautions` those of them to be
    read with the figures, `assumptions` what was chosen (kernels, backends), `uncounted` what is missing; `explanation` says how
    it was all computed.
    """

    schema: int = SCHEMA
    query: str
    versions: dict[str, str]
    request: dict[str, Scalar | tuple[Scalar, ...]]
    model: Census
    gpu: Gpu
    estimates: tuple[Estimate, ...]
    max_batch: tuple[MaxBatch, ...]
    failures: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()
    target: dict[str, str] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()
    explanation: Explanation | None = None

    def find(self, dtype: str, batch: int) -> Estimate | None:
        """The estimate of a dtype at a batch size, None where there is none."""
        return next((row for row in self.estimates if (row.dtype, row.batch) == (dtype, batch)), None)

    def to_dict(self) -> dict:
        """The public JSON as dicts, lists and scalars; byte counts are integers."""
        return encode(self)

    def to_json(self) -> str:
        """The public JSON as one line of text."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False)

    def to_csv(self) -> str:
        """The estimates as CSV, one row per dtype and batch; headers are the JSON's names, nested ones with dots."""
        plain = [spec.name for spec in fields(Estimate) if spec.name not in _NOT_IN_CSV]
        categories = [f"at_peak.{category}" for category in CATEGORIES]
        phases = [f"phases.{phase}.{number}" for phase in PHASES for number in _PHASE_NUMBERS]
        return write_csv([*plain, *categories, *phases], map(_flatten, self.estimates))

    def modules_csv(self) -> str:
        """The model's modules as CSV, one row each with its own elements and bytes; headers are the JSON's names."""
        return write_csv(json_names(ModuleRow), map(encode, self.model.modules))

    @classmethod
    def from_dict(cls, data: object) -> Report:
        """The report that `to_dict` came from. Raises DecodeError where `data` is anything else."""
        report = decode(cls, data)
        if report.schema != SCHEMA:
            raise DecodeError(f"report.schema was {report.schema}; allowed is {SCHEMA}: read it with another version")
        return report


def build_report(
    *,
    query: str,
    versions: Mapping[str, str],
    census: Census,
    tapes: Mapping[str, TapeFamily],
    batches: Iterable[int],
    gpu: Gpu,
    mode: str,
    oracle: SizeOracle | None = None,
    request: Mapping[str, object] | None = None,
    failures: Mapping[str, str] | None = None,
    notes: Iterable[str] = (),
    cautions: Iterable[str] = (),
    target: Mapping[str, str] | None = None,
    assumptions: Iterable[str] = (),
    uncounted: Iterable[str] = (),
    expandable_segments: bool = False,
    explanation: Explanation | None = None,
    formulas: Mapping[str, Formula] | None = None,
) -> Report:
    """The report (bytes) of every dtype and batch, from what was counted and traced.

    `tapes` holds the family of tapes of each dtype, whose size queries the `oracle` resolves. What the tracer assumed
    (`stand_ins`) is added to `uncounted`. The workspaces on the tapes, at the first batch that each dtype has, and their
    `formulas` by operator complete the `explanation`.
    """
    cautions = tuple(cautions)
    batches, estimates, max_batch, all_notes, stand_ins = tuple(batches), [], [], [*cautions, *notes], []
    found: dict[int, _Found] = {}  # dtypes may share a family: float16 often has bfloat16's
    for dtype, family in tapes.items():
        if id(family) not in found:
            found[id(family)] = _find(family, batches, gpu, mode, oracle, expandable_segments)
        of_dtype = found[id(family)]
        estimates.extend(replace(row, dtype=dtype) for row in of_dtype.estimates)
        max_batch.append(replace(of_dtype.max_batch, dtype=dtype))
        all_notes.extend(f"{dtype}, {note}" for note in of_dtype.notes)
        stand_ins.extend(of_dtype.stand_ins)
    return Report(
        query=query,
        versions=dict(versions),
        request={
            key: tuple(value) if isinstance(value, list) else value
            for key, value in {"mode": mode, **(request or {})}.items()
        },
        model=census,
        gpu=gpu,
        estimates=tuple(estimates),
        max_batch=tuple(max_batch),
        failures=dict(failures or {}),
        notes=tuple(dict.fromkeys(all_notes)),
        cautions=cautions,
        target=dict(target or {}),
        assumptions=tuple(assumptions),
        uncounted=tuple(dict.fromkeys([*uncounted, *stand_ins])),
        explanation=explanation
        and replace(
            explanation,
            workspaces=explain_workspaces(
                {dtype: first for dtype, family in tapes.items() if (first := found[id(family)].first) is not None},
                formulas,
            ),
            stand_ins=tuple(dict.fromkeys(stand_ins)),
            margins=tuple(describe_range({row.dtype: row for row in reversed(estimates)}.values())),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What one family of tapes says, the dtype to be filled in; `first` is its tape at the first batch that it has."""

    estimates: tuple[Estimate, ...]
    max_batch: MaxBatch
    notes: tuple[str, ...]
    stand_ins: tuple[str, ...]
    first: Tape | None


def _find(
    family: TapeFamily,
    batches: tuple[int, ...],
    gpu: Gpu,
    mode: str,
    oracle: SizeOracle | None,
    expandable_segments: bool,
) -> _Found:
    rows, notes, stand_ins, first = [], [], [], None
    for batch in batches:
        try:
            tape = family.at(batch, oracle)
        except ValueError as error:
            notes.append(f"batch {batch}: {error}")
        else:
            first = first or tape
            rows.append(estimate_tape(tape, dtype="", gpu=gpu, mode=mode, expandable_segments=expandable_segments))
            stand_ins.extend(tape.stand_ins)
    try:
        known = {row.batch: row.fits for row in rows}
        largest = largest_batch(
            family, gpu, dtype="", oracle=oracle, known=known, expandable_segments=expandable_segments
        )
    except NotAffineError as error:
        largest = MaxBatch(dtype="", batch=None, possible_batch=None, reason=str(error))
    return _Found(estimates=tuple(rows), max_batch=largest, notes=tuple(notes), stand_ins=tuple(stand_ins), first=first)


def _flatten(row: Estimate) -> dict[str, object]:
    """One estimate as CSV header -> value."""
    cells = {spec.name: getattr(row, spec.name) for spec in fields(Estimate)}
    cells |= {f"at_peak.{category}": size for category, size in row.at_peak.items()}
    for use in row.phases:
        cells |= {f"phases.{use.phase}.{number}": getattr(use, number) for number in _PHASE_NUMBERS}
    return cells

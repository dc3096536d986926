"""How far the estimate is from what devices showed: `python -m tests.benchmarks.bench_accuracy [FOLDER | LEDGER ...]`.

Takes folders of the suite (by default every one in tests/measured) and ledgers (SQLite), makes today's estimate of each
case by the rules of its own device, and prints per quantity and family the median and the worst signed error (positive: too
high), whether the range of the process held what the driver said and how wide it is, and the worst cases with the phase that
is farthest off.

`--save FILE` keeps the errors, `--before FILE` prints beside each figure what it was then: that is how a change to the estimator
shows what it did. `--only SUBSTRING` takes some of the cases.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from sizer.base.config_json import read_config
from sizer.base.errors import SizerError
from sizer.commands.terminal import format_table
from sizer.device.comparison.comparison import Comparison, compare
from sizer.device.comparison.counterpart import gpu_of, request_of
from sizer.device.comparison.row import Row
from sizer.device.ledger.ledger import Ledger
from sizer.device.ledger.rows import ErrorStatistics, SignedError, error_statistics
from sizer.device.record.recording import Measured, read_measured
from sizer.estimating.estimator import estimate_cell

MEASURED = Path(__file__).parent.parent / "measured"
QUANTITIES = ("peak_allocated_bytes", "peak_reserved_bytes", "process_bytes")
WORST_CASES = 8
SAME = 0.00005  # errors that print alike

Errors = dict[str, dict[str, float]]
"""Per case, per quantity, the signed error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One case with today's estimate held against it."""

    name: str
    comparison: Comparison

    @property
    def errors(self) -> dict[str, float]:
        """The signed error of every quantity that both sides know."""
        rows = ((name, self.comparison.find(name)) for name in QUANTITIES)
        return {name: row.error for name, row in rows if row is not None and row.error is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """How the range of `process_bytes` did: the share that held, and half its width as a share of what was measured."""

    device: str
    family: str
    count: int
    coverage: float
    median_half_width: float
    widest_half_width: float


def find_measured(sources: Sequence[Path]) -> Iterator[tuple[str, Measured]]:
    """Every case of the folders and ledgers: its name, and what was measured."""
    for source in sources:
        if source.is_dir():
            for case in read_measured(source):
                yield f"{source.name}/{case.name}", case.measured
            continue
        ledger = Ledger(source)
        for row in ledger.rows():
            yield f"{source.name}/{row.id}", Measured(measurement=ledger.comparison(row.id).measurement)


def hold(name: str, measured: Measured) -> Held:
    """Today's estimate of the same work by the rules of the same device, held against what was measured. Raises SizerError."""
    measurement = measured.measurement
    text = measurement.config_text
    config = None if text is None else read_config(text)
    report, tape = estimate_cell(request_of(measurement), config=config, gpu=gpu_of(measurement.device))
    return Held(name=name, comparison=compare(report, measured, tape))


def statistics_of(cases: Iterable[Held]) -> tuple[ErrorStatistics, ...]:
    """The errors of the whole work, per quantity, device and family."""
    return error_statistics(
        SignedError(
            quantity=quantity,
            device=case.comparison.measurement.device.name,
            family=case.comparison.family,
            error=error,
        )
        for quantity in QUANTITIES
        for case in cases
        if (error := case.errors.get(quantity)) is not None
    )


def ranges_of(cases: Iterable[Held]) -> tuple[Ranges, ...]:
    """The ranges of the process, per device and family, where the driver said what the process held."""
    groups: dict[tuple[str, str], list[tuple[bool, float]]] = {}
    for case in cases:
        comparison, row = case.comparison, case.comparison.find("process_bytes")
        if row is None:
            continue
        width = comparison.estimate.process_high_bytes - comparison.estimate.process_low_bytes
        group = groups.setdefault((comparison.measurement.device.name, comparison.family), [])
        group.append((comparison.process_in_range is True, width / 2 / row.measured_bytes))
    return tuple(
        Ranges(
            device=device,
            family=family,
            count=len(found),
            coverage=sum(held for held, _ in found) / len(found),
            median_half_width=median(width for _, width in found),
            widest_half_width=max(width for _, width in found),
        )
        for (device, family), found in groups.items()
    )


def farthest_phase(comparison: Comparison) -> Row | None:
    """The phase's figure whose difference holds the most bytes; None where no phase is known."""
    rows = [row for row in comparison.rows if row.phase is not None and row.quantity.startswith("phases.")]
    return max(rows, key=lambda row: abs(row.difference_bytes), default=None)


# --------------------------------------------------------------------------------------------------------------- printing


def error_table(cases: Sequence[Held], before: Errors) -> Iterator[str]:
    """The lines of the table of errors; with errors from before, those of the same cases beside them."""
    old = {
        (row.quantity, row.device, row.family): row
        for row in error_statistics(
            SignedError(
                quantity=quantity,
                device=case.comparison.measurement.device.name,
                family=case.comparison.family,
                error=before[case.name][quantity],
            )
            for case in cases
            for quantity in QUANTITIES
            if quantity in before.get(case.name, {})
        )
    }
    then_header = ("median before", "worst before") if old else ()
    header = ("quantity", "device", "family", "cases", "median", "worst", "bias", *then_header)
    rows = []
    for row in statistics_of(cases):
        then = old.get((row.quantity, row.device, row.family))
        texts = (percent(row.median_size, signed=False), percent(row.worst), percent(row.bias))
        beside = (percent(then.median_size, signed=False), percent(then.worst)) if then else ("", "")
        rows.append((row.quantity, row.device, row.family, str(row.count), *texts, *(beside if old else ())))
    yield from format_table(header, rows, left=3)


def range_table(cases: Sequence[Held]) -> Iterator[str]:
    """The lines of the table of ranges, none where no driver said anything."""
    rows = [
        (
            row.device,
            row.family,
            str(row.count),
            f"{row.coverage:.0%}",
            f"±{row.median_half_width:.1%}",
            f"±{row.widest_half_width:.1%}",
        )
        for row in ranges_of(cases)
    ]
    if rows:
        header = ("range of process_bytes on", "family", "cases", "held", "median width", "widest")
        yield from format_table(header, rows, left=2)


def worst_table(cases: Sequence[Held]) -> Iterator[str]:
    """The cases whose peak allocated is farthest off, each with the phase's figure that is."""
    known = [case for case in cases if "peak_allocated_bytes" in case.errors]
    worst = sorted(known, key=lambda case: abs(case.errors["peak_allocated_bytes"]), reverse=True)[:WORST_CASES]
    rows = []
    for case in worst:
        row = farthest_phase(case.comparison)
        where = f"{row.quantity} {row.difference_bytes:+,} B" if row else ""
        rows.append((case.name, percent(case.errors["peak_allocated_bytes"]), where))
    yield from format_table(("farthest off", "peak allocated", "largest difference of a phase"), rows, left=1)


def changes(cases: Sequence[Held], before: Errors) -> Iterator[str]:
    """One line per case and quantity that became better or worse."""
    for case in cases:
        for quantity, error in case.errors.items():
            then = before.get(case.name, {}).get(quantity)
            if then is not None and abs(abs(error) - abs(then)) > SAME:
                word = "better" if abs(error) < abs(then) else "WORSE"
                yield f"{word}: {case.name} {quantity}: {percent(then)} -> {percent(error)}"


def percent(error: float, *, signed: bool = True) -> str:
    """A fraction as text."""
    return f"{error:+.2%}" if signed else f"{error:.2%}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bench_accuracy")
    parser.add_argument("sources", nargs="*", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--before", type=Path)
    options = parser.parse_args()
    before: Errors = json.loads(options.before.read_text(encoding="utf-8")) if options.before else {}
    sources = options.sources or sorted({file.parent for file in MEASURED.glob("*/*.json")})
    cases = []
    for name, measured in find_measured(sources):
        if options.only not in name:
            continue
        if measured.measurement.failure is not None:
            print(f"{name}: not measured: {measured.measurement.failure}")
            continue
        try:
            cases.append(hold(name, measured))
        except SizerError as error:
            print(f"{name}: no estimate: {error}")
    if not cases:
        print("nothing was measured")
        return
    for lines in (error_table(cases, before), range_table(cases), worst_table(cases), changes(cases, before)):
        if text := "\n".join(lines):
            print(text, end="\n\n")
    wrong = sum(not case.comparison.holds for case in cases)
    print(f"{len(cases)} cases, {wrong} with a figure beyond its tolerance")
    if options.save:
        options.save.write_text(json.dumps({case.name: case.errors for case in cases}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

"""The estimate against published runs: `python -m tests.benchmarks.bench_published [--only SUBSTRING] [--queries] [--rows]`.

Does each run of `tests/measured/published/runs.csv` as its source does it (`published_runs.py`) through `sizer.size_step`, by the
rules of its GPU, and prints signed errors (positive: too high) by case and quantity; `--rows` prints each figure, `--queries` asks
the nearest question instead, where there is one: Sizer's own steps differ from the source's in what they keep.

The models' code and the workspaces' rules are those of the installed transformers and torch. Runs of older libraries come out
nearer with those: `pip install --no-deps --target old "transformers==4.42.4" "tokenizers==0.19.1" "huggingface_hub==0.26.5"`,
then with `PYTHONPATH=old:.`
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

import torch
import transformers

import sizer
from sizer.errors import SizerError
from sizer.memory.estimate import Estimate
from sizer.terminal.table import format_table
from tests.benchmarks.bench_outside import PUBLISHED
from tests.benchmarks.published_runs import CASES

BYTES = {"MB": 10**6, "MiB": 2**20}
STEPS = 3  # what a step keeps for the next one is there from the second on


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One published figure, in bytes; `context_bytes` is what the source measured outside the allocator, for "device" only."""

    case: str
    arguments: str
    query: str
    gpu: str
    torch: str
    transformers: str
    quantity: str
    figure_bytes: int
    context_bytes: int
    differs: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A run and the estimate of its figure, in bytes."""

    run: Run
    estimated_bytes: int

    @property
    def error(self) -> float:
        """The difference as a signed fraction of what was published."""
        return (self.estimated_bytes - self.run.figure_bytes) / self.run.figure_bytes


def read_runs() -> list[Run]:
    """Every row of runs.csv."""
    with (PUBLISHED / "runs.csv").open(encoding="utf-8", newline="") as file:
        return [
            Run(
                case=row["case"],
                arguments=row["arguments"],
                query=row["query"],
                gpu=row["gpu"],
                torch=row["torch"],
                transformers=row["transformers"],
                quantity=row["quantity"],
                figure_bytes=round(float(row["figure"]) * BYTES[row["unit"]]),
                context_bytes=int(row["context_mib"] or 0) * 2**20,
                differs=row["differs"],
                source=row["source"],
            )
            for row in csv.DictReader(file)
        ]


def hold(run: Run, *, by_query: bool = False) -> Held:
    """The estimate of a run's figure: of the work as its source does it, or of its query. Raises SizerError."""
    estimate = ask(run.query) if by_query else do(run.case, run.arguments, run.gpu)
    return Held(run=run, estimated_bytes=figure(estimate, run))


def figure(estimate: Estimate, run: Run) -> int:
    """The estimate's figure of a run's kind, in bytes."""
    if run.quantity == "allocated":
        return estimate.peak_allocated_bytes
    return estimate.peak_reserved_bytes + run.context_bytes


@cache
def do(case: str, arguments: str, gpu: str) -> Estimate:
    """The estimate of a case of `published_runs.py`. Raises SizerError."""
    return sizer.size_step(CASES[case](**read_arguments(arguments)), gpu=gpu, steps=STEPS).estimates[0]


@cache
def ask(query: str) -> Estimate:
    """The estimate that answers a query. Raises SizerError."""
    return sizer.estimate(query).estimates[0]


def read_arguments(text: str) -> dict[str, int | str]:
    """ "batch=4 precision=32" as keyword arguments; only `precision` stays text where it is a number."""
    pairs = (pair.split("=") for pair in text.split())
    return {name: int(value) if value.isdecimal() and name != "precision" else value for name, value in pairs}


# --------------------------------------------------------------------------------------------------------------- printing


def group_of(run: Run) -> str:
    """What a run's errors are summed up under: its case, model and attention, and where its libraries are known to differ."""
    arguments = read_arguments(run.arguments)
    told = [str(arguments[name]) for name in ("model", "attention", "precision") if name in arguments]
    if run.case == "trainer":
        told.append("checkpointing" if arguments["checkpointing"] else "no checkpointing")
    return " ".join([run.case, *told, *(["(" + run.differs + ")"] if run.differs else [])])


def group_table(held: Sequence[Held]) -> Iterator[str]:
    """The lines of the table of errors."""
    groups: dict[tuple[str, str], list[Held]] = {}
    for one in held:
        groups.setdefault((group_of(one.run), one.run.quantity), []).append(one)
    rows = []
    for (group, quantity), found in groups.items():
        errors = [one.error for one in found]
        worst = max(errors, key=abs)
        run = found[0].run
        rows.append(
            (group, quantity, run.torch, run.transformers, str(len(found)), f"{median(errors):+.2%}", f"{worst:+.2%}")
        )
    header = ("run", "quantity", "torch", "transformers", "figures", "median", "worst")
    yield from format_table(header, rows, left=4)


def row_table(held: Sequence[Held]) -> Iterator[str]:
    """The lines of every figure."""
    rows = [
        (
            one.run.case,
            one.run.arguments,
            one.run.quantity,
            f"{one.run.figure_bytes / 1e6:,.1f}",
            f"{one.estimated_bytes / 1e6:,.1f}",
            f"{one.error:+.2%}",
        )
        for one in held
    ]
    yield from format_table(("case", "arguments", "quantity", "published, MB", "estimated, MB", "error"), rows, left=3)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bench_published")
    parser.add_argument("--only", default="")
    parser.add_argument("--queries", action="store_true")
    parser.add_argument("--rows", action="store_true")
    options = parser.parse_args()
    held = []
    for run in read_runs():
        if options.only not in f"{run.case} {run.arguments}" or (options.queries and not run.query):
            continue
        try:
            held.append(hold(run, by_query=options.queries))
        except SizerError as error:
            print(f"{run.case} {run.arguments}: no estimate: {error}")
    if options.rows:
        print("\n".join(row_table(held)), end="\n\n")
    print("\n".join(group_table(held)), end="\n\n")
    print(f"{len(held)} figures, with torch {torch.__version__} and transformers {transformers.__version__}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

"""The figures of `tests/measured/published/runs/`: one file per set, one row per run, one column per quantity."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tests.benchmarks.bench_outside import PUBLISHED
from tests.benchmarks.tables import read_table

RUNS = PUBLISHED / "runs"
BYTES = {"MB": 10**6, "MiB": 2**20}
# What was read, as README.md beside the files says it; the columns that hold figures.
QUANTITIES = ("load", "allocated", "reserved", "beyond_load", "process", "device", "growth")
# Arguments that stay text where they are a number.
TEXT = ("precision",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One published figure, in bytes.

    `context_bytes` is what the source measured outside the allocator, for "device" only; `than` the arguments of the smaller
    run, for "growth" only. `repeats` tells that another row is the same run.
    """

    set: str
    case: str
    arguments: str
    query: str
    gpu: str
    torch: str
    transformers: str
    quantity: str
    figure_bytes: int
    context_bytes: int
    than: str
    differs: str
    repeats: bool
    source: str


def names_of_sets() -> list[str]:
    """The published sets: the files' names."""
    return sorted(path.stem for path in RUNS.glob("*.csv"))


def read_runs(sets: Collection[str] = ()) -> list[Run]:
    """Every figure of the given sets, of all of them where none is given."""
    runs = []
    for name in sets or names_of_sets():
        for row in read_table(RUNS / f"{name}.csv"):
            runs += [_run(name, row, quantity) for quantity in QUANTITIES if row.get(quantity)]
    return runs


def read_arguments(text: str) -> dict[str, int | str]:
    """ "batch=4 precision=32" as keyword arguments; numbers are int, but for those of TEXT."""
    pairs = (pair.split("=") for pair in text.split())
    return {name: int(value) if value.isdecimal() and name not in TEXT else value for name, value in pairs}


def _run(name: str, row: Mapping[str, str], quantity: str) -> Run:
    return Run(
        set=name,
        case=row["case"],
        arguments=row["arguments"],
        query=row.get("query", ""),
        gpu=row["gpu"],
        torch=row["torch"],
        transformers=row.get("transformers", ""),
        quantity=quantity,
        figure_bytes=_figure_bytes(row, quantity),
        context_bytes=int(row.get("context_mib") or 0) * 2**20 if quantity == "device" else 0,
        than=row.get("than", "") if quantity == "growth" else "",
        differs=row.get("differs", ""),
        repeats=row.get("repeats") == "yes",
        source=row["source"],
    )


def _figure_bytes(row: Mapping[str, str], quantity: str) -> int:
    """ "growth" is written as both figures: "24408-8222"."""
    larger, _, smaller = row[quantity].partition("-")
    return round((float(larger) - float(smaller or 0)) * BYTES[row["unit"]])

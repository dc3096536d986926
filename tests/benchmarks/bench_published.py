"""The estimate against published runs: `python -m tests.benchmarks.bench_published [SET ...]`.

Does each run of `tests/measured/published/runs/` (of all sets, or those that are named) as its source does it
(`tests/benchmarks/published/`) through `sizer.size_step`, by the rules of its GPU, and prints signed errors (positive: too high)
by set, kind of run and quantity, then by case; allocated, reserved and process figures are never mixed. "In range" is the share of
figures within the estimate's range, where it gives one. `--rows` prints each figure, `--only` takes rows whose case or arguments
hold a text, `--queries` asks the nearest question instead, where there is one: Sizer's own steps differ from the source's in
what they keep. `--write` writes the first table to `errors.csv` beside the sets, of which README's is made: as today's libraries',
or, where it says so, as those of the runs' time. Today's figures go into the file that ships with Sizer, too.

The models' code and the workspaces' rules are those of the installed libraries. README.md beside the figures says with which
ones each set comes out nearest, and how to install them.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec

import torch
import transformers

from sizer.base.errors import SizerError
from sizer.commands.terminal import format_table
from tests.benchmarks.published.cases import NEEDS
from tests.benchmarks.published.errors import LIBRARIES, kind_of, summarize, write_errors
from tests.benchmarks.published.held import Held, hold
from tests.benchmarks.published.rows import Run, names_of_sets, read_arguments, read_runs
from tests.benchmarks.published.shipped import write_shipped

Group = tuple[str, ...]


def by_set(run: Run) -> Group:
    """What the first table, and errors.csv, sum up under."""
    return (run.set, kind_of(run), run.quantity)


def by_case(run: Run) -> Group:
    """What the second table sums up under: the case, model and attention, and where libraries are known to differ."""
    arguments = read_arguments(run.arguments)
    told = [str(arguments[name]) for name in ("operator", "model", "attention", "precision") if name in arguments]
    if run.case == "trainer":
        told.append("checkpointing" if arguments["checkpointing"] else "no checkpointing")
    differs = ["(" + run.differs + ")"] if run.differs else []
    return (" ".join([run.case, *told, *differs]), run.quantity)


def error_table(held: Sequence[Held], group_of: Callable[[Run], Group], header: Sequence[str]) -> Iterator[str]:
    """The lines of a table of errors by group."""
    groups: dict[Group, list[Held]] = {}
    for one in held:
        groups.setdefault(group_of(one.run), []).append(one)
    rows = [(*group, *summarize(found).values()) for group, found in groups.items()]
    yield from format_table((*header, "figures", "median, %", "worst, %", "in range"), rows, left=len(header))


def row_table(held: Sequence[Held]) -> Iterator[str]:
    """The lines of every figure."""
    rows = [
        (
            one.run.set,
            one.run.case,
            one.run.arguments,
            one.run.quantity,
            one.run.torch,
            f"{one.run.figure_bytes / 2**20:,.2f}",
            f"{one.estimated_bytes / 2**20:,.2f}",
            f"{one.error:+.3%}",
        )
        for one in held
    ]
    header = ("set", "case", "arguments", "quantity", "torch", "published, MiB", "estimated, MiB", "error")
    yield from format_table(header, rows, left=5)


def reason_left_out(run: Run) -> str | None:
    """Why a run is not held against an estimate here; None where it is."""
    if run.repeats:
        return "the same run again"
    missing = [name for name in NEEDS.get(run.case, ()) if find_spec(name) is None]
    return f"needs {', '.join(missing)}, not installed" if missing else None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bench_published")
    parser.add_argument(
        "sets", nargs="*", metavar="SET", help=f"of {', '.join(names_of_sets())}; all of them by default"
    )
    parser.add_argument("--only", default="")
    parser.add_argument("--queries", action="store_true")
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--write", nargs="?", const=LIBRARIES[0], choices=LIBRARIES, metavar="LIBRARIES")
    options = parser.parse_args()
    if options.write and options.queries:
        parser.error("--write is for runs as their sources do them, not for --queries")
    if unknown := set(options.sets) - set(names_of_sets()):
        parser.error(f"no set {', '.join(sorted(unknown))}: give some of {', '.join(names_of_sets())}")
    held, left_out = [], Counter[str]()
    for run in read_runs(options.sets):
        if options.only not in f"{run.case} {run.arguments}" or (options.queries and not run.query):
            continue
        if reason := reason_left_out(run):
            left_out[f"{run.set}, {run.quantity}: {reason}"] += 1
            continue
        try:
            held.append(hold(run, by_query=options.queries))
        except SizerError as error:
            left_out[f"{run.set}, {run.quantity}: no estimate for {run.case} {run.arguments}: {error}"] += 1
    if options.rows:
        print("\n".join(row_table(held)), end="\n\n")
    print("\n".join(error_table(held, by_set, ("set", "run", "quantity"))), end="\n\n")
    print("\n".join(error_table(held, by_case, ("case", "quantity"))), end="\n\n")
    if options.write and held:
        write_errors(held, options.write)
        if options.write == LIBRARIES[0]:
            write_shipped(held)
    for reason, count in left_out.items():
        print(f"left out: {count} figures of {reason}")
    print(f"{len(held)} figures, with torch {torch.__version__} and transformers {transformers.__version__}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

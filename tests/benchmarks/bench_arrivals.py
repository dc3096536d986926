"""QLoRA's published runs with weights that arrive in threads: `python -m tests.benchmarks.bench_arrivals [--times 24]`.

Prints for each run what was published of it and the least, the median and the most that is allocated once it is loaded and reserved
at its peak, where its weights are read by one thread, and by four as transformers reads them, so many times each with other
durations (tests/benchmarks/published/arrivals.py). Nothing published tells how long a weight took.
"""

from __future__ import annotations

import argparse
from random import Random
from statistics import median

import torch

from sizer.allocator.allocator import replay
from sizer.commands.terminal import format_table
from tests.benchmarks.published.arrivals import arrivals_of, in_threads
from tests.benchmarks.published.rows import Run, read_runs

MIB = 2**20
THREADS = 1, 4


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.bench_arrivals")
    parser.add_argument("--only", default="")
    parser.add_argument("--times", type=int, default=24)
    options = parser.parse_args()
    runs: dict[tuple[str, str], dict[str, Run]] = {}
    for run in read_runs(["t4_adapters"]):
        if run.case == "qlora_training" and not run.repeats and options.only in run.arguments:
            runs.setdefault((run.arguments, run.source), {})[run.quantity] = run
    rows, inside = [], {(threads, what): [0, 0] for threads in THREADS for what in ("load", "reserved")}
    for figures in runs.values():
        run = figures["reserved"]
        tape, arrivals = arrivals_of(run)
        for threads in THREADS:
            random = Random(run.arguments)
            lines = [
                replay(in_threads(tape, arrivals, threads, random), backend="cuda")
                for _ in range(options.times if threads > 1 else 1)
            ]
            told = {
                "load": [line.phases[0].allocated_bytes for line in lines],
                "reserved": [line.peak_reserved_bytes for line in lines],
            }
            for what, found in told.items():
                if what not in figures:
                    continue
                published = figures[what].figure_bytes
                inside[threads, what][0] += min(found) - MIB <= published <= max(found) + MIB
                inside[threads, what][1] += 1
                spread = [f"{size / MIB:,.1f}" for size in (published, min(found), median(found), max(found))]
                rows.append((run.arguments, run.torch, what, str(threads), *spread))
    header = ("run", "torch", "quantity", "threads", "published, MiB", "least", "median", "most")
    print("\n".join(format_table(header, rows, left=4)), end="\n\n")
    for (threads, what), (found, count) in inside.items():
        print(f"{threads} threads, {what}: {found} of {count} published figures within 1 MiB of the range")
    print(f"{options.times} times each, with torch {torch.__version__}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

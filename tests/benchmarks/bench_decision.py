"""How soon a visitor has an answer, and what was traced and replayed for it: `python -m tests.benchmarks.bench_decision [name …]`.

For ResNet-50, Llama-3.1-8B and Mask R-CNN (one dtype, two batch sizes), in one warm process with nothing kept: seconds until the
counts, the first cells, all cells, and the whole view with the largest batch of each dtype stand. Then with what that view has
kept: other devices, another list of batch sizes, fewer dtypes, expandable segments, each asked for the first time. Then, of one
cell, all levers and all devices. Each in parts of the whole view too.
Last, as the page asks, by jobs, with what is between a page and its job: the same, from a server that has kept nothing from before.
All devices are two jobs where two may run at once.
Seconds are wall-clock and this machine's; beside them those of the processor, which other work on the machine changes less.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import NamedTuple
from unittest.mock import patch

import torch

from sizer.allocator import allocator
from sizer.decision.devices import devices
from sizer.decision.levers import levers
from sizer.estimating.estimator import Estimator
from sizer.query.text import parse_query
from sizer.service.client import PROBE, JobClient
from sizer.service.variables import FOLDER_VARIABLE

# By name: the view, and the cell whose levers and devices are asked for, None where that takes minutes.
QUESTIONS = {
    "resnet50": ("arch=torchvision:resnet50", "batch=32&dtype=float32"),
    "llama-3.1-8b": ("arch=hf:llama-3.1-8b", "batch=1&dtype=bfloat16"),
    "maskrcnn": ("arch=torchvision:maskrcnn_resnet50_fpn&dtype=float32&batch=1,2", None),
}
OTHERS = {
    "the same": {},
    "another device": {"gpu": "a100-40gb"},
    "another generation": {"gpu": "rtx-4090"},
    "other batch sizes": {"batch": "3,6,12,24"},
    "fewer dtypes": {"dtype": "float32"},
    "expandable segments": {"expandable": "1"},
}
LOOK_SECONDS = 0.005  # between two looks at what a job has
REPLAYING = ("allocator.allocator", "report.fit", "report.replays")  # modules that call replay_events


class InMemoryStore(dict):
    """What one architecture keeps."""

    def put(self, name: str, data: bytes) -> None:
        """Keep something under a name."""
        self[name] = data


class Counter:
    """What was traced and replayed since it was made."""

    def __init__(self) -> None:
        self.traces = self.replays = 0

    def progress(self, text: str) -> None:
        """Count a trace."""
        self.traces += text.startswith("tracing ")

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the replays meanwhile."""
        replay_events = allocator.replay_events

        def counted(*arguments: object) -> object:
            self.replays += 1
            return replay_events(*arguments)

        with ExitStack() as stack:
            for module in REPLAYING:
                stack.enter_context(patch(f"sizer.{module}.replay_events", counted))
            yield


class Seconds(NamedTuple):
    """A time on the clock, and that of the processor."""

    wall: float
    processor: float


def moments(
    answer: Callable[[Callable[[str], None]], Iterator[object]],
) -> tuple[list[tuple[Seconds, object]], Counter]:
    """(seconds, report) of every report of an answer, and what it took."""
    counter, wall, processor = Counter(), time.perf_counter(), time.process_time()
    with counter.counting():
        found = [
            (Seconds(time.perf_counter() - wall, time.process_time() - processor), report)
            for report in answer(counter.progress)
        ]
    return found, counter


def view(query: str, kept: InMemoryStore) -> tuple[list[tuple[Seconds, object]], Counter]:
    """The reports of a query."""
    return moments(lambda progress: Estimator(parse_query(query), store=kept, progress=progress).reports())


def with_keys(query: str, changed: dict[str, str]) -> str:
    """The query with other values of some keys."""
    items = dict(item.split("=", 1) for item in query.split("&"))
    return "&".join(f"{key}={value}" for key, value in (items | changed).items())


def show(name: str, seconds: Seconds, whole: Seconds, counter: Counter | None = None) -> None:
    """Print a row."""
    took = f"{counter.traces:>8}{counter.replays:>9}" if counter else ""
    ratio = seconds.processor / whole.processor
    print(f"  {name:<34}{seconds.wall:>8.2f}{seconds.processor:>10.2f}{ratio:>8.2f}{took}", flush=True)


def show_cells(name: str, found: list[tuple[Seconds, object]], whole: Seconds) -> None:
    """Print the rows of the first cells and of all of them."""
    most = len(found[-1][1].estimates)
    for what, cells in (("first cells", 1), ("all cells", most)):
        show(f"{name}{what}", next(at for at, report in found if len(report.estimates) >= cells), whole)


def main(names: list[str]) -> None:
    list(view("arch=torchvision:resnet18&batch=1&dtype=float32", InMemoryStore()))
    for name in names or QUESTIONS:
        query, cell = QUESTIONS[name]
        kept = InMemoryStore()
        found, counter = view(query, kept)
        whole = found[-1][0]
        print(f"{query}\n  {'':<34}{'seconds':>8}{'processor':>10}{'ratio':>8}{'traces':>8}{'replays':>9}")
        show("counts", found[0][0], whole)
        show_cells("", found, whole)
        show("the whole view", whole, whole, counter)
        for other, changed in OTHERS.items():
            found, counter = view(with_keys(query, changed), InMemoryStore(kept))
            show_cells(f"{other}: ", found, whole)
            show(f"{other}: whole", found[-1][0], whole, counter)
        if cell is None:
            continue
        show_decisions(f"{query}&{cell}", kept, whole)
    os.environ[FOLDER_VARIABLE] = ""
    with closing(JobClient()) as client:
        client.submit(PROBE).result()
        for name in names or QUESTIONS:
            show_jobs(client, *QUESTIONS[name])


def show_decisions(query: str, kept: InMemoryStore, whole: Seconds) -> None:
    """Print the rows of the levers and of the devices."""
    request = parse_query(query)
    found, counter = moments(lambda progress: levers(request, store=InMemoryStore(kept), progress=progress))
    show("levers", found[-1][0], whole, counter)
    for again in ("", ", again"):
        found, counter = moments(lambda progress: devices(request, store=kept, progress=progress))
        first = next(at for at, report in found if len(report.rows) == len(report.pending))
        show(f"which device{again}: where it fits", first, whole)
        show(f"which device{again}: whole", found[-1][0], whole, counter)


def show_jobs(client: JobClient, query: str, cell: str | None) -> None:
    """Print after how many seconds the page has its answers, from jobs that may run at once."""
    if cell is None:
        return
    print(f"{query}, as the page asks: seconds until the first cells, all of them, and the whole")
    for name, changed in {"the whole view": {}, **OTHERS}.items():
        if name != "the same":  # the client has that answer
            print(
                f"  {name:<34}{'  '.join(f'{at:.2f}' for at in job_moments(client, with_keys(query, changed)))}",
                flush=True,
            )
    began = time.perf_counter()
    client.submit_devices(f"{query}&{cell}").result()
    print(f"  {'which device':<34}{time.perf_counter() - began:.2f}", flush=True)


def job_moments(client: JobClient, query: str) -> tuple[float, float, float]:
    """The seconds until a job has its first cells, all of them, and its whole answer."""
    request, began, at = parse_query(query), time.perf_counter(), {}
    job = client.submit(query)
    while (report := job.result(timeout=LOOK_SECONDS)) is None:
        cells = len(job.partial.estimates) if job.partial is not None else 0
        for wanted in (1, len(request.dtypes) * len(request.batches)):
            if cells >= wanted:
                at.setdefault(wanted, time.perf_counter() - began)
    done = time.perf_counter() - began
    return at.get(1, done), at.get(len(report.estimates), done), done


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])

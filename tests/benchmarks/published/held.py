"""An estimate beside each published figure: of the run as its source does it, like held against like."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from inspect import signature

import sizer
from sizer.base.versions import OLDEST, format_version
from sizer.report.bounds import CONTEXT
from sizer.report.estimate import Estimate
from tests.benchmarks.published.cases import CASES
from tests.benchmarks.published.rows import Run, read_arguments

STEPS = 3  # what a step keeps for the next one is there from the second on
TAKES_VERSION = "torch" in signature(sizer.size_step).parameters  # else the installed PyTorch's rules are followed


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A run and the estimate of its figure, in bytes; `within` tells whether the figure is in the estimate's range, None where
    the estimate gives no range for such a figure."""

    run: Run
    estimated_bytes: int
    within: bool | None

    @property
    def error(self) -> float:
        """The difference as a signed fraction of what was published."""
        return (self.estimated_bytes - self.run.figure_bytes) / self.run.figure_bytes


def hold(run: Run, *, by_query: bool = False) -> Held:
    """The estimate of a run's figure: of the work as its source does it, or of its query. Raises SizerError."""
    estimate = ask(run.query) if by_query else do(run.case, run.arguments, run.gpu, rules_of(run))
    estimated_bytes = figure(estimate, run)
    if run.than:
        estimated_bytes -= figure(do(run.case, run.than, run.gpu, rules_of(run)), run)
    return Held(run=run, estimated_bytes=estimated_bytes, within=within(estimate, run, estimated_bytes))


def figure(estimate: Estimate, run: Run) -> int:
    """The estimate's figure of a run's quantity, in bytes; of one of the two runs where the quantity is "growth"."""
    load = next(phase for phase in estimate.phases if phase.phase == "load")
    match run.quantity:
        case "load":
            return load.allocated_bytes
        case "allocated":
            return estimate.peak_allocated_bytes
        case "reserved" | "growth":
            return estimate.peak_reserved_bytes
        case "beyond_load":
            return estimate.peak_reserved_bytes - load.reserved_bytes
        case "process":
            return estimate.process_bytes
        case "device":
            return estimate.peak_reserved_bytes + run.context_bytes
        case quantity:
            raise ValueError(f"no figure of an estimate is a {quantity!r}")


def within(estimate: Estimate, run: Run, estimated_bytes: int) -> bool | None:
    """Whether what the process held is in the estimate's range. Where the allocator's bytes beyond the load or their growth were
    measured, the context is no part of the range; None for any other quantity."""
    if run.quantity == "process":
        return estimate.process_low_bytes <= run.figure_bytes <= estimate.process_high_bytes
    if run.quantity not in ("beyond_load", "growth"):
        return None
    margins = [margin for margin in estimate.margins if margin.name != CONTEXT]
    low = estimated_bytes - sum(margin.less_bytes for margin in margins)
    return low <= run.figure_bytes <= estimated_bytes + sum(margin.more_bytes for margin in margins)


def rules_of(run: Run) -> str:
    """The PyTorch whose rules a run goes by: its own, or the oldest whose rules are known ("2.14" of "2.14.0+cu130")."""
    major, minor = re.match(r"(\d+)(?:\.(\d+))?", run.torch).groups(default="0")
    return format_version(max((int(major), int(minor)), OLDEST))


@cache
def do(case: str, arguments: str, gpu: str, torch: str) -> Estimate:
    """The estimate of a case by the rules of a PyTorch, where `size_step` takes one. Raises SizerError."""
    told = {"torch": torch} if TAKES_VERSION else {}
    return sizer.size_step(CASES[case](**read_arguments(arguments)), gpu=gpu, steps=STEPS, **told).estimates[0]


@cache
def ask(query: str) -> Estimate:
    """The estimate that answers a query. Raises SizerError."""
    return sizer.estimate(query).estimates[0]

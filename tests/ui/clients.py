"""A job client that answers from a script: no job server, no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar

from sizer.base.errors import SizerError
from sizer.query.request import Request
from sizer.query.text import parse_query
from sizer.report.peak import PeakReport
from sizer.report.report import Report
from tests.ui.decisions import (
    budgets_for,
    devices_for,
    levers_for,
    limits_for,
    ranks_for,
    served_devices_for,
    served_ranks_for,
)
from tests.ui.reports import peak_for

Answer = Callable[[Request], Report]
NAMES = ("alexnet", "resnet18", "resnet50", "vit_b_16")
PIPELINES = ("hunyuan-video", "sd1.5")


class ScriptedJob:
    """A job that is done after its progress texts have been read out; `cancelled` says whether it was given up before.

    `left` says whether nobody waits for it any more.
    """

    def __init__(self, make: Callable[[], object], progress: Iterable[str] = ()):
        self._make = make
        self._texts = list(progress)
        self.progress = "starting"
        self.done = False
        self.cancelled = self.left = False
        self.partial: object = None
        self.parts = 0

    def result(self, timeout: float | None = None) -> object:
        if self._texts:
            self.progress = self._texts.pop(0)
            return None
        self.done = True
        return self._make()

    def waited(self, timeout: float, ready: Callable[[], bool] = lambda: False) -> bool:
        if self._texts:
            self.progress = self._texts.pop(0)
        else:
            self.done = True
        return self.done

    def leave(self) -> None:
        self.left = True

    def cancel(self) -> None:
        self.cancelled = not self.done


class ScriptedClient:
    """Answers each query with `answer`, or raises it where it is an error; keeps what was asked in `requests`."""

    missing_layers: ClassVar = {}  # of the wall around jobs
    versions: ClassVar = {"sizer": "0.1.0", "torch": "2.15.0"}

    def __init__(self, answer: Answer | SizerError, *, progress: Iterable[str] = ()):
        self._answer = answer
        self._progress = tuple(progress)
        self.requests: list[Request] = []
        self.stops: list[bool] = []
        self.peaks: list[str] = []
        self.jobs: list[ScriptedJob] = []

    def submit(self, query: str, *, stops: bool = False) -> ScriptedJob:
        request = parse_query(query)
        self.stops.append(stops)
        if self.jobs and self._goes_on(self.jobs[-1]) and self.requests[-1] == request:
            self.jobs[-1].left = False
            return self.jobs[-1]
        self.requests.append(request)
        self.jobs.append(ScriptedJob(lambda: self._make(request), self._progress))
        return self.jobs[-1]

    @staticmethod
    def _goes_on(job: ScriptedJob) -> bool:
        """Return True if a job was abandoned a moment ago and has not ended."""
        return job.left and not job.done

    def submit_levers(self, query: str) -> ScriptedJob:
        return ScriptedJob(lambda: levers_for(query))

    def submit_limits(self, query: str) -> ScriptedJob:
        return ScriptedJob(lambda: limits_for(query))

    def submit_devices(self, query: str) -> ScriptedJob:
        make = served_devices_for if parse_query(query).mode == "serve" else devices_for
        return ScriptedJob(lambda: make(query))

    def submit_ranks(self, query: str) -> ScriptedJob:
        make = served_ranks_for if parse_query(query).mode == "serve" else ranks_for
        return ScriptedJob(lambda: make(query))

    def submit_budget(self, query: str) -> ScriptedJob:
        return ScriptedJob(lambda: budgets_for(query))

    def submit_peak(self, query: str) -> ScriptedJob:
        self.peaks.append(query)
        return ScriptedJob(lambda: self._peak(parse_query(query)), self._progress)

    def submit_models(self) -> ScriptedJob:
        rows = [{"name": name, "family": "test"} for name in NAMES]
        pipelines = [{"name": name, "family": "test"} for name in PIPELINES]
        timm = [*rows, {"name": "convnext_tiny", "family": "test"}]
        return ScriptedJob(lambda: {"torchvision": rows, "timm": timm, "diffusers": pipelines})

    def _peak(self, request: Request) -> PeakReport:
        if isinstance(self._answer, SizerError):
            raise self._answer
        return peak_for(request)

    def _make(self, request: Request) -> Report:
        if isinstance(self._answer, SizerError):
            raise self._answer
        return self._answer(request)

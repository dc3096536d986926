"""A machine of a script in the place of this one: its devices, what it measures, what its job server compares."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from sizer.base.errors import SizerError
from sizer.device.comparison.comparison import Comparison
from sizer.device.ledger.ledger import Ledger
from sizer.device.record.measurement import DeviceFacts
from sizer.device.record.recording import Measured
from sizer.query.request import Request
from sizer.report.report import Report
from sizer.service.settings import PUBLIC_VARIABLE
from sizer.ui import measuring as here
from sizer.ui import service
from tests.ui.clients import ScriptedClient, ScriptedJob
from tests.ui.comparisons import CPU, comparison_of, measured_on
from tests.ui.reports import report_for


class ScriptedMachine:
    """Measures any cell as `measured_on` says, or raises `failure`; `measured` keeps what was asked for, `jobs` the jobs."""

    def __init__(
        self,
        *devices: DeviceFacts,
        measure: Callable[[DeviceFacts, Request], Measured] = measured_on,
        failure: SizerError | None = None,
        progress: Iterable[str] = (),
    ):
        self.devices = devices or (CPU,)
        self.failure = failure
        self.progress = tuple(progress)
        self.measured: list[tuple[Request, str]] = []
        self.jobs: list[ScriptedJob] = []
        self._measure = measure

    def get_devices(self) -> tuple[DeviceFacts, ...]:
        return self.devices

    def start_measurement(self, cell: Request, device: str) -> ScriptedJob:
        self.measured.append((cell, device))
        facts = next(facts for facts in self.devices if facts.device == device)
        self.jobs.append(ScriptedJob(lambda: self._run(facts, cell), self.progress))
        return self.jobs[-1]

    def _run(self, facts: DeviceFacts, cell: Request) -> Measured:
        if self.failure is not None:
            raise self.failure
        return self._measure(facts, cell)


class ComparingClient(ScriptedClient):
    """A scripted client that compares too, as `compare` says."""

    def __init__(
        self,
        answer: Callable[[Request], Report] | SizerError = report_for,
        *,
        compare: Callable[[Measured], Comparison] = comparison_of,
        progress: Iterable[str] = (),
    ):
        super().__init__(answer, progress=progress)
        self._compare = compare
        self.compared: list[Measured] = []

    def submit_comparison(self, measured: Measured) -> ScriptedJob:
        self.compared.append(measured)
        return ScriptedJob(lambda: self._compare(measured), ["comparing"])


def install_machine(
    monkeypatch: pytest.MonkeyPatch, machine: ScriptedMachine, ledger: Ledger, client: ComparingClient | None = None
) -> ComparingClient:
    """Puts a scripted machine, a ledger and a client in the places of the process's own; returns the client."""
    client = client or ComparingClient()
    for variable in (here.MEASURING_VARIABLE, PUBLIC_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(here, "get_devices", machine.get_devices)
    monkeypatch.setattr(here, "start_measurement", machine.start_measurement)
    monkeypatch.setattr(here, "get_ledger", lambda: ledger)
    monkeypatch.setattr(service, "get_client", lambda: client)
    return client

"""Real models measured on this computer's CPU and compared: two by the command line, which keeps them, the others right here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import pytest

from sizer.__main__ import main
from sizer.device.comparison.comparison import Comparison
from sizer.device.ledger.ledger import Ledger
from sizer.device.readers.open import open_reader
from sizer.device.record.recording import Measured
from sizer.device.trial.trial import measure_request
from sizer.query.text import parse_query
from sizer.service.client import JobClient
from sizer.service.job import Job
from sizer.service.settings import Settings
from tests.benchmarks.bench_accuracy import hold
from tests.device.models import REAL_MODELS

# A CNN's and a transformer's training. The way there and back is the same for all of them, each time two processes.
BY_COMMAND = [query for query in REAL_MODELS if "resnet18" in query or "minilm" in query]
OTHERS = [
    query
    for query in REAL_MODELS
    if any(name in query for name in ("resnet18", "efficientnet", "minilm", "swin", "t5", "whisper"))
]


class OpenClient:
    """A job client that several commands use, one after another."""

    def __init__(self, client: JobClient) -> None:
        self._client = client

    def submit_comparison(self, measured: Measured) -> Job:
        return self._client.submit_comparison(measured)

    def close(self) -> None:
        """Nothing: the next command goes on with it."""


@pytest.fixture(scope="module")
def client() -> Iterator[OpenClient]:
    client = JobClient(Settings(max_jobs=1))
    yield OpenClient(client)
    client.close()


def some_in_every_run(queries: Iterable[str]) -> list:
    """Those of OTHERS are left to --exhaustive."""
    return [pytest.param(query, marks=pytest.mark.exhaustive if query in OTHERS else ()) for query in queries]


@pytest.mark.parametrize("query", some_in_every_run(BY_COMMAND))
def test_measured_by_the_command_held_against_its_estimate_and_kept(
    query: str, client: OpenClient, capsys, tmp_path, monkeypatch
):
    monkeypatch.setenv("SIZER_LEDGER", str(tmp_path / "ledger.sqlite3"))
    status = main(["measure", query, "--device", "cpu", "--json", "--no-timing"], make_client=lambda: client)
    captured = capsys.readouterr()
    assert (status, captured.err) == (0, "")
    check(Comparison.from_dict(json.loads(captured.out)["comparison"]), REAL_MODELS[query])
    assert len(Ledger(tmp_path / "ledger.sqlite3").rows()) == 1


@pytest.mark.parametrize("query", some_in_every_run(query for query in REAL_MODELS if query not in BY_COMMAND))
def test_measured_and_held_against_its_estimate(query: str):
    measured = measure_request(parse_query(query), open_reader("cpu"), timing=False)
    check(hold(query, measured).comparison, REAL_MODELS[query])


def check(comparison: Comparison, parameters: int) -> None:
    """Holds what was measured against the model's parameters and the estimate."""
    width = 2 if comparison.measurement.dtype == "bfloat16" else 4
    assert comparison.find("weights_bytes").measured_bytes == width * parameters
    exact = [row for row in comparison.rows if row.tolerance == 0]
    assert {"weights_bytes", "phases.load.allocated_bytes", "phases.forward.allocated_bytes"} <= {
        r.quantity for r in exact
    }
    assert [row for row in exact if abs(row.difference_bytes) > row.allowance_bytes] == []
    assert all(row.allowance_bytes <= 1000 for row in exact)
    assert abs(comparison.find("peak_allocated_bytes").error) < 0.005
    assert comparison.wrong == ()

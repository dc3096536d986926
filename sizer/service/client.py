"""The app's side of the job server: submit a query, look whether it is done, take the report. No torch, no Streamlit.

job = shared_client().submit("arch=torchvision:resnet50&batch=32")
while (report := job.result(timeout=0.1)) is None:
    show(job.progress)
"""

from __future__ import annotations

import base64
import copy
import functools
import hashlib
import json
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from sizer.base.codec import decode
from sizer.base.errors import JobError, RequestError, quote
from sizer.catalogue.gpus import in_parts
from sizer.device.comparison.comparison import Comparison
from sizer.device.record.recording import Measured
from sizer.pasted.snapshot import SnapshotReport
from sizer.placement.report import PlacementReport
from sizer.query.request import check_config_text
from sizer.query.text import complete_query, format_query, parse_query
from sizer.report.decision import (
    BudgetReport,
    DeviceReport,
    DeviceRow,
    LeverReport,
    LimitReport,
    RankReport,
    device_order,
)
from sizer.report.peak import PeakReport
from sizer.report.report import Report
from sizer.service.fair_queue import Visitor
from sizer.service.job import Job, JoinedJob, Read, SharedJob
from sizer.service.messages import COMPILED, STOPS
from sizer.service.pool import Cache, Fetch, JobPool
from sizer.service.settings import Settings
from sizer.service.supervisor import Connect, Connection
from sizer.service.variables import ANSWERS, BROKER_VARIABLE, broker_url, read_limit

MAX_SNAPSHOT_BYTES = 2**28
DEVICE_JOBS = 2  # at most, into which "which GPU?" is split
PROBE = "arch=torchvision:squeezenet1_1&mode=inference&dtype=float32&batch=1&image=64"  # one of the smallest


class JobClient:
    """Runs jobs in a job server, which it starts on first use and again after its death. Thread-safe.

    Finished reports are cached for `ttl_seconds`, at most `max_entries` of them ($SIZER_ANSWERS). Errors are cached for half a
    minute, those of the hub for a minute. `connect` starts the job server, or connects to workers instead. `fetch` (repository,
    revision -> config bytes) and `read` (the result's plain data -> value) can be replaced in tests.

    *Known limitations*: a report of `hub:org/name` without a commit is cached like any other, although the branch may move.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        connect: Connect = Connection,
        fetch: Fetch | None = None,
        read: Read = Report.from_dict,
        ttl_seconds: float = 3600.0,
        max_entries: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        cache: Cache[Any] = Cache(ttl_seconds, max_entries or read_limit(ANSWERS, 64), clock)
        settings = settings or Settings()
        self._pool = JobPool(settings, cache, fetch, connect)
        self._device_jobs = min(settings.max_jobs, DEVICE_JOBS)
        self._read = read
        self._visitor = Visitor()

    def on_behalf_of(self, visitor: Visitor) -> JobClient:
        """Return this client for a visitor: jobs are counted as the visitor's. Everything else is shared."""
        client = copy.copy(self)
        client._visitor = visitor
        return client

    @property
    def versions(self) -> dict[str, str] | None:
        """The versions of torch, torchvision and transformers in the job server; None until one has started."""
        return self._pool.versions

    @property
    def missing_layers(self) -> dict[str, str] | None:
        """The layers of the wall around jobs (`sizer.processes.wall`) that are not to be had, each with why; None until known."""
        return self._pool.missing_layers

    def start(self) -> None:
        """Start the job server now rather than at the first job: it needs some seconds to import torch."""
        self._pool.start()

    def submit(self, query: str, config_text: str | None = None, *, stops: bool = False) -> Job:
        """Return a job that makes the report of a query.

        With `stops` a dtype ends after two consecutive batch sizes that do not fit (`sizer.report.column.left_out`).

        The config of a `hub:` architecture is downloaded by the client, in a thread, because the job is offline; a caller that
        has the config passes it as `config_text`. Raises RequestError for a bad query, ConfigError for a config that is far too
        long, JobError if too many jobs are waiting.
        """
        return self._submit("estimate", query, config_text, self._read, STOPS if stops else None)

    def submit_placement(self, query: str, config_text: str | None = None) -> Job:
        """Return a job for the PlacementReport of a query's model and batch: see `sizer.placement`. Raises as `submit`."""
        return self._submit("placement", query, config_text, PlacementReport.from_dict)

    def submit_levers(self, query: str, config_text: str | None = None, *, compiles: bool = False) -> Job:
        """Return a job for the LeverReport of the one dtype and batch size of a query: possible changes. Raises as `submit`.

        With `compiles` eager code is also tried compiled, which takes longest.
        """
        return self._submit("levers", query, config_text, _decoder(LeverReport), COMPILED if compiles else None)

    def submit_limits(self, query: str, config_text: str | None = None) -> Job:
        """Return a job for the LimitReport of the one dtype and batch size of a query: largest sizes. Raises as `submit`."""
        return self._submit("limits", query, config_text, _decoder(LimitReport))

    def submit_devices(self, query: str, config_text: str | None = None) -> JoinedJob:
        """Return a job for the DeviceReport of the one dtype and batch size of a query: each GPU. Raises as `submit`.

        If several jobs may run at once, it is split into several jobs, each for a part of the devices.
        """
        parts = (f"{number}/{self._device_jobs}" for number in range(1, self._device_jobs + 1))
        jobs = [self._submit("devices", query, config_text, _decoder(DeviceReport), part) for part in parts]
        return JoinedJob(jobs, _join_devices)

    def submit_ranks(self, query: str, config_text: str | None = None) -> Job:
        """Return a job for the RankReport of the one dtype and batch size of a query: numbers of GPUs. Raises as `submit`."""
        return self._submit("ranks", query, config_text, _decoder(RankReport))

    def submit_budget(self, query: str, config_text: str | None = None) -> Job:
        """Return a job for the BudgetReport of the one dtype and batch size of a query: compiled. Raises as `submit`."""
        return self._submit("budget", query, config_text, _decoder(BudgetReport))

    def submit_peak(self, query: str, config_text: str | None = None) -> Job:
        """Return a job for the PeakReport of the one dtype and batch size of a query: live tensors. Raises as `submit`."""
        return self._submit("peak", query, config_text, _decoder(PeakReport))

    def submit_snapshot(self, query: str, config_text: str | None = None) -> Job:
        """Return a job for that peak as PyTorch's memory snapshot, pickled. Raises as `submit`."""
        return self._submit("snapshot", query, config_text, _read_snapshot)

    def submit_script(self, query: str, config_text: str | None = None) -> Job:
        """Return a job for the program that runs and measures the one dtype and batch size of a query. Raises as `submit`."""
        return self._submit("script", query, config_text, _read_script)

    def submit_comparison(self, measured: Measured) -> Job:
        """Return a job for the Comparison of a measurement with the estimate of the same work on the same device.

        Raises RequestError for a measurement of more than one dtype or batch, or with a missing config; ConfigError for a
        recording that is far too long, JobError if too many jobs are waiting.
        """
        measurement = measured.measurement
        request = parse_query(measurement.query)
        if (request.dtypes, request.batches) != ((measurement.dtype,), (measurement.batch,)):
            raise RequestError("a measurement's query names its one dtype and batch", given=quote(measurement.query))
        if request.is_fetched and measurement.config_text is None:
            raise RequestError("a measurement of arch=hub: holds the config that it was made with", given="none")
        text = json.dumps(measured.to_dict(), separators=(",", ":"), allow_nan=False)
        digest = hashlib.sha256(text.encode()).digest()
        message = {"task": "compare", "query": None, "config_text": None, "measured": text}
        self._pool.check_size(message, "measurement")
        return self._pool.submit(SharedJob(("compare", digest), message, Comparison.from_dict, self._visitor))

    def submit_pasted_snapshot(self, data: bytes) -> Job:
        """Return a job for the SnapshotReport of another program's memory snapshot.

        Raises ConfigError for a snapshot that is far too long, JobError if too many jobs are waiting.
        """
        text = base64.b64encode(zlib.compress(data, 1)).decode("ascii")
        digest = hashlib.sha256(data).digest()
        message = {"task": "read_snapshot", "query": None, "config_text": None, "measured": text}
        self._pool.check_size(message, "snapshot")
        return self._pool.submit(SharedJob(("read_snapshot", digest), message, _decoder(SnapshotReport), self._visitor))

    def submit_models(self) -> Job:
        """Return a job for {"torchvision": [{"name", "family"}, ...], ...}: the models of each source's package."""
        return self._pool.submit(SharedJob(("models",), {"task": "models"}, _read_models, self._visitor))

    def submit_probe(self) -> Job:
        """Return a small real job, run again each time, which tests whether jobs can run. Raises as `submit`."""
        message = {"task": "estimate", "query": PROBE, "config_text": None, "anew": True}
        return self._pool.submit(SharedJob(("probe",), message, self._read, Visitor()), anew=True)

    def answered_ago(self) -> float | None:
        """Return the seconds since a job ended with a result; None without one."""
        return self._pool.answered_ago()

    def metrics(self) -> str:
        """Return counts and seconds of the jobs so far, in Prometheus' text format, without any content of questions."""
        return self._pool.metrics()

    def close(self) -> None:
        """End the job server; jobs that run get a JobError. Called by itself when the interpreter ends."""
        self._pool.close()

    def _submit(self, task: str, query: str, config_text: str | None, read: Read, part: str | None = None) -> Job:
        request = parse_query(query)
        check_config_text(request, config_text)
        canonical = complete_query(request)
        # The focus changes no figure of a report; the other answers depend on it.
        question = format_query(replace(request, focus=None), complete=True) if task == "estimate" else canonical
        digest = None if config_text is None else hashlib.sha256(config_text.encode("utf-8", "surrogatepass")).digest()
        message = {"task": task, "query": canonical, "config_text": config_text, "part": part}
        self._pool.check_size(message)
        from_hub = request if request.is_fetched and config_text is None else None
        shared = SharedJob((task, question, digest, part), message, read, self._visitor)
        return self._pool.submit(shared, from_hub, functools.partial(_look_at, request.focus))


def _decoder(kind: type) -> Read:
    return functools.partial(decode, kind)


def _join_devices(found: Sequence[DeviceReport | None]) -> DeviceReport | None:
    """Return the report on all devices from the reports on each part; None if none is known."""
    known = [report for report in found if report is not None]
    if not known:
        return None
    pending = (
        [gpu.key for gpu in part] if report is None else report.pending
        for part, report in zip(in_parts(len(found)), found, strict=True)
    )
    rows = sorted(chain.from_iterable(report.rows for report in known), key=device_order)
    return DeviceReport(
        query=known[0].query,
        rows=tuple(rows),
        pending=tuple(chain.from_iterable(pending)),
        serves=known[0].serves,
        **_smallest_change(known, rows),
    )


def _smallest_change(known: Sequence[DeviceReport], rows: Sequence[DeviceRow]) -> dict[str, Any]:
    """Return the change that helps. Each part has looked for its own. Empty if the work fits some device as it is."""
    if any(row.cell is not None and row.cell.fits is True for row in rows):
        return {}
    titles = dict.fromkeys(report.change for report in known if report.changed)
    if not titles:
        return {}
    change = min(titles, key=len)  # fewer changes have fewer words
    helped = chain.from_iterable(report.changed for report in known if report.change == change)
    return {"change": change, "changed": tuple(sorted(helped, key=lambda row: (row.total_bytes, row.name)))}


def _look_at(cell: tuple[str, int] | None, value: object) -> object:
    """Return a report with the caller's dtype and batch size in focus; any other value unchanged."""
    return value.focused(cell) if isinstance(value, Report) else value


def shared_client() -> JobClient:
    """Return the one client of this process: every page and session shares its job server and its cache."""
    with _SHARED_LOCK:
        return _make_shared()


_SHARED_LOCK = threading.Lock()


@functools.cache
def _make_shared() -> JobClient:
    if (url := broker_url()) is None:
        return JobClient()
    try:
        from sizer.service.broker.connection import BrokerConnection
    except ImportError as error:
        what = f"{BROKER_VARIABLE} needs a package that is not installed ({error.name})"
        raise JobError(what, todo="pip install -r deploy/requirements-broker.txt") from error
    connect: Any = functools.partial(BrokerConnection, url)  # it has the methods of a Connection
    return JobClient(replace(Settings(), spares=0), connect=connect)


def _read_snapshot(data: dict) -> bytes:
    """Return the pickle, which is written to a file and never loaded here. Raises ValueError if it is invalid, or far too long."""
    unpack = zlib.decompressobj()
    pickled = unpack.decompress(base64.b64decode(data["zlib"], validate=True), MAX_SNAPSHOT_BYTES)
    if not unpack.eof:
        raise ValueError(f"a snapshot is at most {MAX_SNAPSHOT_BYTES:,} bytes long")
    return pickled


def _read_script(data: dict) -> str:
    return str(data["text"])


def _read_models(data: dict) -> dict[str, list[dict[str, str]]]:
    return {
        source: [{"name": str(row["name"]), "family": str(row["family"])} for row in rows]
        for source, rows in data.items()
    }

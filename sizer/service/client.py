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

from sizer.base.codec import LIMIT_TEXT, decode
from sizer.base.errors import ConfigError, JobError, RequestError, quote
from sizer.catalogue.gpus import in_parts
from sizer.device.comparison.comparison import Comparison
from sizer.device.record.recording import Measured
from sizer.pasted.snapshot import SnapshotReport
from sizer.placement.report import PlacementReport
from sizer.query.text import format_query, parse_query
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
    """Runs jobs in a job server, which it starts when first needed and again after its death. For use from any thread.

    Finished reports are kept for `ttl_seconds`, at most `max_entries` of them ($SIZER_ANSWERS); errors for half a minute, those of
    the hub for a whole one. `connect` starts the job server, or reaches the workers that stand for one. `fetch` (repository,
    revision -> config bytes) and `read` (the result's plain data -> value) are seams for tests.

    *Known limitations*: a report of `hub:org/name` without a commit is kept like any other, though the branch may move.
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
        """This client as a visitor has it, whose jobs are counted as theirs. It shares all else with this one."""
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
        """A job that makes the report of a query.

        With `stops` a dtype ends after two consecutive batch sizes that do not fit (`sizer.report.column.left_out`).

        The config of a `hub:` architecture is fetched on this side, in a thread, because the job is offline; a caller
        who has it already gives it as `config_text`. Raises RequestError for a bad query, ConfigError for a config that
        is far too long, JobError where too many jobs wait already.
        """
        return self._submit("estimate", query, config_text, self._read, STOPS if stops else None)

    def submit_placement(self, query: str, config_text: str | None = None) -> Job:
        """A job whose result is the PlacementReport of a query's model and batch: see `sizer.placement`. Raises as `submit`."""
        return self._submit("placement", query, config_text, PlacementReport.from_dict)

    def submit_levers(self, query: str, config_text: str | None = None, *, compiles: bool = False) -> Job:
        """A job whose result is the LeverReport of the one dtype and batch size of a query: what to change. Raises as `submit`.

        With `compiles` eager code is compiled, too, which takes longest.
        """
        return self._submit("levers", query, config_text, _decoder(LeverReport), COMPILED if compiles else None)

    def submit_limits(self, query: str, config_text: str | None = None) -> Job:
        """A job whose result is the LimitReport of the one dtype and batch size of a query: how far it goes. Raises as `submit`."""
        return self._submit("limits", query, config_text, _decoder(LimitReport))

    def submit_devices(self, query: str, config_text: str | None = None) -> JoinedJob:
        """A job whose result is the DeviceReport of the one dtype and batch size of a query: on which GPU. Raises as `submit`.

        Where several jobs may run at once it is two, each of which asks about a part of the devices.
        """
        parts = (f"{number}/{self._device_jobs}" for number in range(1, self._device_jobs + 1))
        jobs = [self._submit("devices", query, config_text, _decoder(DeviceReport), part) for part in parts]
        return JoinedJob(jobs, _join_devices)

    def submit_ranks(self, query: str, config_text: str | None = None) -> Job:
        """A job whose result is the RankReport of the one dtype and batch size of a query: on how many GPUs. Raises as `submit`."""
        return self._submit("ranks", query, config_text, _decoder(RankReport))

    def submit_budget(self, query: str, config_text: str | None = None) -> Job:
        """A job whose result is the BudgetReport of the one dtype and batch size of a query: compiled. Raises as `submit`."""
        return self._submit("budget", query, config_text, _decoder(BudgetReport))

    def submit_peak(self, query: str, config_text: str | None = None) -> Job:
        """A job whose result is the PeakReport of the one dtype and batch size of a query: what is alive. Raises as `submit`."""
        return self._submit("peak", query, config_text, _decoder(PeakReport))

    def submit_snapshot(self, query: str, config_text: str | None = None) -> Job:
        """A job whose result is that peak as PyTorch's memory snapshot, pickled. Raises as `submit`."""
        return self._submit("snapshot", query, config_text, _read_snapshot)

    def submit_script(self, query: str, config_text: str | None = None) -> Job:
        """A job whose result is the program that does and measures the one dtype and batch size of a query. Raises as `submit`."""
        return self._submit("script", query, config_text, _read_script)

    def submit_comparison(self, measured: Measured) -> Job:
        """A job whose result is the Comparison of a measurement with the estimate of the same work on the same device.

        Raises RequestError for a measurement of more than one dtype or batch, or whose config is missing; ConfigError for a
        recording that is far too long, JobError where too many jobs wait already.
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
        """A job whose result is the SnapshotReport of a memory snapshot that somebody else has dumped.

        Raises ConfigError for one that is far too long, JobError where too many jobs wait already.
        """
        text = base64.b64encode(zlib.compress(data, 1)).decode("ascii")
        digest = hashlib.sha256(data).digest()
        message = {"task": "read_snapshot", "query": None, "config_text": None, "measured": text}
        self._pool.check_size(message, "snapshot")
        return self._pool.submit(SharedJob(("read_snapshot", digest), message, _decoder(SnapshotReport), self._visitor))

    def submit_models(self) -> Job:
        """A job with the result {"torchvision": [{"name", "family"}, ...], ...}: what the sources' packages build by name."""
        return self._pool.submit(SharedJob(("models",), {"task": "models"}, _read_models, self._visitor))

    def submit_probe(self) -> Job:
        """A small real job, run anew each time, which tells whether jobs can be run. Raises as `submit`."""
        message = {"task": "estimate", "query": PROBE, "config_text": None, "anew": True}
        return self._pool.submit(SharedJob(("probe",), message, self._read, Visitor()), anew=True)

    def answered_ago(self) -> float | None:
        """The seconds since a job ended with a result; None where none has."""
        return self._pool.answered_ago()

    def metrics(self) -> str:
        """Return what has become of the jobs so far, in Prometheus' text format: counts and seconds, nothing of what was asked."""
        return self._pool.metrics()

    def close(self) -> None:
        """End the job server; jobs that run get a JobError. Called by itself when the interpreter ends."""
        self._pool.close()

    def _submit(self, task: str, query: str, config_text: str | None, read: Read, part: str | None = None) -> Job:
        request = parse_query(query)
        if config_text is not None and not request.is_fetched:
            todo = "put the config itself into the query, as arch=config:..."
            raise RequestError("config_text", given=f"arch={request.source}:", allowed="with arch=hub:", todo=todo)
        canonical = format_query(request, complete=True)
        # The focus changes no figure of a report; it is what the other answers are about.
        question = format_query(replace(request, focus=None), complete=True) if task == "estimate" else canonical
        digest = None if config_text is None else hashlib.sha256(config_text.encode("utf-8", "surrogatepass")).digest()
        if len(canonical) > LIMIT_TEXT:
            raise ConfigError(
                "config is too large for a link",
                given=f"a query of {len(canonical):,} characters",
                allowed=f"at most {LIMIT_TEXT:,}",
                todo="keep only the architecture's keys",
            )
        message = {"task": task, "query": canonical, "config_text": config_text, "part": part}
        self._pool.check_size(message)
        from_hub = request if request.is_fetched and config_text is None else None
        shared = SharedJob((task, question, digest, part), message, read, self._visitor)
        return self._pool.submit(shared, from_hub, functools.partial(_look_at, request.focus))


def _decoder(kind: type) -> Read:
    return functools.partial(decode, kind)


def _join_devices(found: Sequence[DeviceReport | None]) -> DeviceReport | None:
    """Return what is known of all devices from what is known of each part; None where nothing is."""
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
    """A report with the dtype and batch size in focus that one of those who asked for it named; any other value as it is."""
    return value.focused(cell) if isinstance(value, Report) else value


def shared_client() -> JobClient:
    """The one client of this process: every page and session shares its job server and its cache."""
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
    connect: Any = functools.partial(BrokerConnection, url)  # it has what a Connection has
    return JobClient(replace(Settings(), spares=0), connect=connect)


def _read_snapshot(data: dict) -> bytes:
    """The pickle, which is written to a file and read by nobody here. Raises ValueError where it is none, or far too long."""
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

"""The app's side of the job server: submit a query, look whether it is done, take the report. No torch, no Streamlit.

job = shared_client().submit("arch=torchvision:resnet50&batch=32")
while (report := job.result(timeout=0.1)) is None:
    show(job.progress)
"""

from __future__ import annotations

import atexit
import base64
import functools
import hashlib
import json
import logging
import secrets
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import replace

from sizer.catalogue.sources import SOURCES
from sizer.device.comparison.comparison import Comparison
from sizer.device.record.recording import Measured
from sizer.errors import ConfigError, JobError, RequestError, SizerError, quote
from sizer.memory.codec import LIMIT_TEXT, decode
from sizer.memory.decision import DeviceReport, LeverReport, LimitReport
from sizer.memory.peak import PeakReport
from sizer.memory.report import Report
from sizer.placement.report import PlacementReport
from sizer.processes.wall import LAYERS
from sizer.processes.wire import clip_progress, error_from_wire, to_line
from sizer.request import Request, format_query, parse_query
from sizer.service.cache import Cache
from sizer.service.connection import Connection
from sizer.service.job import Job, Read, SharedJob, View
from sizer.service.settings import Settings

MAX_SNAPSHOT_BYTES = 2**28
_log = logging.getLogger(__name__)

Fetch = Callable[[str, str | None], bytes]


class JobClient:
    """Runs jobs in a job server, which it starts when first needed and again after its death. For use from any thread.

    Finished reports are kept for `ttl_seconds`, at most `max_entries` of them; errors are not kept. `fetch`
    (repository, revision -> config bytes) and `read` (the result's plain data -> value) are seams for tests.

    *Known limitations*: a report of `hub:org/name` without a commit is kept like any other, though the branch may move.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        fetch: Fetch | None = None,
        read: Read = Report.from_dict,
        ttl_seconds: float = 3600.0,
        max_entries: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._settings = settings or Settings()
        self._fetch = fetch or _fetch_config
        self._read = read
        self._cache = Cache(ttl_seconds, max_entries, clock)
        self._lock = threading.RLock()
        self._shared_jobs: dict[tuple, SharedJob] = {}
        self._connection: Connection | None = None
        self._versions: dict[str, str] | None = None
        self._missing_layers: dict[str, str] | None = None
        self._closed = False

    @property
    def versions(self) -> dict[str, str] | None:
        """The versions of torch, torchvision and transformers in the job server; None until one has started."""
        return self._versions

    @property
    def missing_layers(self) -> dict[str, str] | None:
        """The layers of the wall around jobs (`sizer.processes.wall`) that are not to be had, each with why; None until known."""
        return self._missing_layers

    def start(self) -> None:
        """Start the job server now rather than at the first job: it needs some seconds to import torch."""
        with self._lock:
            self._connect()

    def submit(self, query: str, config_text: str | None = None) -> Job:
        """A job that makes the report of a query.

        The config of a `hub:` architecture is fetched on this side, in a thread, because the job is offline; a caller
        who has it already gives it as `config_text`. Raises RequestError for a bad query, ConfigError for a config that
        is far too long, JobError where too many jobs wait already.
        """
        return self._submit("estimate", query, config_text, self._read)

    def submit_placement(self, query: str, config_text: str | None = None) -> Job:
        """A job whose result is the PlacementReport of a query's model and batch: see `sizer.placement`. Raises as `submit`."""
        return self._submit("placement", query, config_text, PlacementReport.from_dict)

    def submit_levers(self, query: str, config_text: str | None = None) -> Job:
        """A job whose result is the LeverReport of the one dtype and batch size of a query: what to change. Raises as `submit`."""
        return self._submit("levers", query, config_text, _decoder(LeverReport))

    def submit_limits(self, query: str, config_text: str | None = None) -> Job:
        """A job whose result is the LimitReport of the one dtype and batch size of a query: how far it goes. Raises as `submit`."""
        return self._submit("limits", query, config_text, _decoder(LimitReport))

    def submit_devices(self, query: str, config_text: str | None = None) -> Job:
        """A job whose result is the DeviceReport of the one dtype and batch size of a query: on which GPU. Raises as `submit`."""
        return self._submit("devices", query, config_text, _decoder(DeviceReport))

    def submit_peak(self, query: str, config_text: str | None = None) -> Job:
        """A job whose result is the PeakReport of the one dtype and batch size of a query: what is alive. Raises as `submit`."""
        return self._submit("peak", query, config_text, _decoder(PeakReport))

    def submit_snapshot(self, query: str, config_text: str | None = None) -> Job:
        """A job whose result is that peak as PyTorch's memory snapshot, pickled. Raises as `submit`."""
        return self._submit("snapshot", query, config_text, _read_snapshot)

    def submit_comparison(self, measured: Measured) -> Job:
        """A job whose result is the Comparison of a measurement with the estimate of the same work on the same device.

        Raises RequestError for a measurement of more than one dtype or batch, or whose config is missing; ConfigError for a
        recording that is far too long, JobError where too many jobs wait already.
        """
        measurement = measured.measurement
        request = parse_query(measurement.query)
        if (request.dtypes, request.batches) != ((measurement.dtype,), (measurement.batch,)):
            raise RequestError("a measurement's query names its one dtype and batch", given=quote(measurement.query))
        if SOURCES[request.source].fetched and measurement.config_text is None:
            raise RequestError("a measurement of arch=hub: holds the config that it was made with", given="none")
        text = json.dumps(measured.to_dict(), separators=(",", ":"), allow_nan=False)
        digest = hashlib.sha256(text.encode()).digest()
        message = {"task": "compare", "query": None, "config_text": None, "measured": text}
        self._check_size(message, "measurement")
        return self._submit_shared(SharedJob(("compare", digest), message, Comparison.from_dict), None)

    def submit_models(self) -> Job:
        """A job with the result {"torchvision": [{"name", "family"}, ...], ...}: what the sources' packages build by name."""
        return self._submit_shared(SharedJob(("models",), {"task": "models"}, _read_models), None)

    def close(self) -> None:
        """End the job server; jobs that run get a JobError. Called by itself when the interpreter ends."""
        with self._lock:
            self._closed = True
            connection, self._connection = self._connection, None
            shared_jobs = list(self._shared_jobs.values())
            self._shared_jobs.clear()
        for shared in shared_jobs:
            shared.finish(failure=JobError("the job client was closed"))
        if connection is not None:
            connection.close()
        atexit.unregister(self.close)

    # ------------------------------------------------------------------------------------------ from submit to dispatch

    def _submit(self, task: str, query: str, config_text: str | None, read: Read) -> Job:
        request = parse_query(query)
        if config_text is not None and not SOURCES[request.source].fetched:
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
        message = {"task": task, "query": canonical, "config_text": config_text}
        self._check_size(message)
        from_hub = request if SOURCES[request.source].fetched and config_text is None else None
        shared = SharedJob((task, question, digest), message, read)
        return self._submit_shared(shared, from_hub, functools.partial(_look_at, request.focus))

    def _check_size(self, message: dict, what: str = "config") -> None:
        if len(to_line(message)) > self._settings.request_bytes - 100:
            raise ConfigError(f"{what} is too large", allowed=f"{self._settings.request_bytes:,} bytes as a JSON text")

    def _submit_shared(self, shared: SharedJob, from_hub: Request | None, view: View = lambda value: value) -> Job:
        with self._lock:
            if self._closed:
                raise JobError("the job client was closed")
            if (value := self._cache.get(shared.key)) is not None:
                shared.finish(value)
                return Job(shared, self._cancel, view)
            known = self._shared_jobs.get(shared.key)
            if known is None:
                self._admit(shared, from_hub)
            shared = known or shared
            shared.waiters += 1
            return Job(shared, self._cancel, view)

    def _admit(self, shared: SharedJob, from_hub: Request | None) -> None:
        if len(self._shared_jobs) >= self._settings.max_jobs + self._settings.max_waiting:
            raise JobError(
                f"too many jobs: {len(self._shared_jobs)} are running or waiting", todo="try again in a minute"
            )
        if from_hub is None:
            self._dispatch(shared)
        self._shared_jobs[shared.key] = shared
        if from_hub is not None:
            shared.progress = clip_progress(f"fetching the config of {from_hub.name}")
            threading.Thread(target=self._fetch_then_dispatch, args=(shared, from_hub), daemon=True).start()

    def _fetch_then_dispatch(self, shared: SharedJob, request: Request) -> None:
        try:
            shared.message["config_text"] = self._fetch(request.name, request.revision).decode("utf-8")
            self._check_size(shared.message)
            with self._lock:
                if self._shared_jobs.get(shared.key) is shared:  # else cancelled meanwhile
                    self._dispatch(shared)
        except SizerError as error:
            self._finish(shared, failure=error)
        except UnicodeDecodeError:
            self._finish(shared, failure=ConfigError("config is not UTF-8", given=quote(request.name)))
        except Exception as error:  # of any kind: whoever waits for the job must get an answer
            self._finish(shared, failure=JobError(f"the config could not be fetched ({type(error).__name__})"))

    def _dispatch(self, shared: SharedJob) -> None:
        shared.connection = self._connect()
        shared.number = secrets.randbits(128)  # the token of its answers: nobody else can guess it
        shared.progress = "waiting" if shared.connection.ready else "starting the job server"
        shared.connection.send({"run": shared.number, **shared.message})

    def _connect(self) -> Connection:
        if self._closed:
            raise JobError("the job client was closed")
        if self._connection is None:
            self._connection = Connection(self._settings, self._receive, self._lost)
            atexit.register(self.close)
        return self._connection

    # ------------------------------------------------------------------------------------------------ what comes back

    def _receive(self, connection: Connection, message: dict) -> None:
        """Handle a message of the server, on the connection's thread. Raises KeyError, TypeError where it makes no sense."""
        if "ready" in message:
            self._set_missing_layers(message["missing"])
            return self._set_versions(message["ready"])
        with self._lock:
            shared = self._find(connection, message["id"])
        if shared is None:  # cancelled meanwhile
            return
        if "progress" in message:
            shared.progress = clip_progress(message["progress"])
        elif "error" in message:
            self._finish(shared, failure=error_from_wire(message["error"]))
        elif "partial" in message:
            self._take(shared, shared.take_partial, message["partial"])
        else:
            self._take(shared, lambda data: self._finish(shared, value=shared.read(data)), message["result"])

    def _set_missing_layers(self, missing: dict[str, str]) -> None:
        for layer, why in missing.items():
            _log.warning("jobs run without %s (%s): %s", layer, LAYERS[layer], why)
        self._missing_layers = missing

    def _set_versions(self, versions: dict[str, str]) -> None:
        with self._lock:
            if versions != self._versions:
                self._cache.clear()  # a report holds for the versions that it was made with
            self._versions = versions

    def _find(self, connection: Connection, number: int) -> SharedJob | None:
        found = (
            shared
            for shared in self._shared_jobs.values()
            if shared.number == number and shared.connection is connection
        )
        return next(found, None)

    def _take(self, shared: SharedJob, take: Callable[[dict], None], data: dict) -> None:
        """Take an answer, or a part of one; fail the job where it makes no sense."""
        try:
            take(data)
        except Exception as error:  # of any kind: the data come from a process that has read untrusted input
            failure = JobError(f"the job's answer is not what was expected ({quote(str(error), 200)})")
            self._finish(shared, failure=failure)
            if shared.connection is not None:
                shared.connection.send({"cancel": shared.number})

    def _finish(self, shared: SharedJob, value: object = None, failure: SizerError | None = None) -> None:
        with self._lock:
            if self._shared_jobs.get(shared.key) is shared:
                del self._shared_jobs[shared.key]
                if failure is None:
                    self._cache.put(shared.key, value)
        shared.finish(value, failure)

    def _lost(self, connection: Connection, failure: JobError) -> None:
        """Fail the jobs of a connection whose server has ended; the next job starts another."""
        with self._lock:
            if self._connection is connection:
                self._connection = None
            lost = [shared for shared in self._shared_jobs.values() if shared.connection is connection]
        for shared in lost:
            self._finish(shared, failure=failure)

    def _cancel(self, job: Job) -> None:
        with self._lock:
            if job.done:
                return
            shared, job.cancelled = job.shared, True
            shared.waiters -= 1
            if shared.waiters > 0 or self._shared_jobs.get(shared.key) is not shared:
                return
            del self._shared_jobs[shared.key]
            if shared.connection is not None:
                shared.connection.send({"cancel": shared.number})
        shared.finish(failure=JobError("the job was cancelled"))


def _decoder(kind: type) -> Read:
    return functools.partial(decode, kind)


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
    return JobClient()


def _fetch_config(repo_id: str, revision: str | None) -> bytes:
    from sizer.architecture.hub import fetch_config

    return fetch_config(repo_id, revision)


def _read_snapshot(data: dict) -> bytes:
    """The pickle, which is written to a file and read by nobody here. Raises ValueError where it is none, or far too long."""
    unpack = zlib.decompressobj()
    pickled = unpack.decompress(base64.b64decode(data["zlib"], validate=True), MAX_SNAPSHOT_BYTES)
    if not unpack.eof:
        raise ValueError(f"a snapshot is at most {MAX_SNAPSHOT_BYTES:,} bytes long")
    return pickled


def _read_models(data: dict) -> dict[str, list[dict[str, str]]]:
    return {
        source: [{"name": str(row["name"]), "family": str(row["family"])} for row in rows]
        for source, rows in data.items()
    }

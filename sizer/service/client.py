"""The app's side of the job server: submit a query, look whether it is done, take the report. No torch, no Streamlit.

job = shared_client().submit("arch=torchvision:resnet50&batch=32")
while (report := job.result(timeout=0.1)) is None:
    show(job.progress)
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import itertools
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from sizer.catalogue.sources import SOURCES
from sizer.device.comparison.comparison import Comparison
from sizer.device.record.recording import Measured
from sizer.errors import ConfigError, JobError, RequestError, SizerError, quote
from sizer.memory.report import Report
from sizer.placement.placement import Placement
from sizer.processes.wire import clip_progress, error_from_wire, error_to_wire, to_line
from sizer.request import Request, format_query, parse_query
from sizer.service.connection import Connection
from sizer.service.settings import Settings

Fetch = Callable[[str, str | None], bytes]
Read = Callable[[dict], object]


class Job:
    """One caller's share in a piece of work; identical requests share the work, each with a Job of its own."""

    def __init__(self, client: JobClient, work: _Work):
        self._client = client
        self._work = work
        self._cancelled = False

    @property
    def progress(self) -> str:
        """One short line on what is being done now."""
        return self._work.progress

    @property
    def done(self) -> bool:
        """Whether `result` would answer at once."""
        return self._cancelled or self._work.finished.is_set()

    def result(self, timeout: float | None = None) -> Report | None:
        """The report, or None while it is still being made after `timeout` seconds (None: waits until it is done).

        Raises the job's own error (ConfigError, HubError, BuildError, TraceError ...), or JobError where it was
        cancelled, hit a limit, crashed, or the job server died under it; such a job may be submitted again.
        """
        if not self._cancelled:
            self._work.finished.wait(timeout)
        if self._cancelled:
            raise JobError("the job was cancelled")
        return self._work.take()

    def cancel(self) -> None:
        """Gives up this share; the work is stopped when nobody else waits for it. A job that is done stays done."""
        self._client._leave(self)


class _Work:
    """What one or more jobs wait for. Everything but `take` happens under the client's lock."""

    def __init__(self, key: tuple, message: dict, read: Read):
        self.key, self.message, self.read = key, message, read
        self.waiters = 0
        self.finished = threading.Event()
        self.progress = "starting"
        self.number: int | None = None
        self.connection: Connection | None = None
        self._value: object = None
        self._failure: dict | None = None

    def finish(self, value: object = None, failure: SizerError | None = None) -> None:
        if not self.finished.is_set():
            self._value, self._failure = value, failure and error_to_wire(failure)
            self.progress = "failed" if failure else "done"
            self.finished.set()

    def take(self) -> object:
        """The value, None while there is none. Raises the failure, a fresh copy for each caller."""
        if self.finished.is_set() and self._failure is not None:
            raise error_from_wire(self._failure)
        return self._value


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
        self._cache = _Cache(ttl_seconds, max_entries, clock)
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._works: dict[tuple, _Work] = {}
        self._connection: Connection | None = None
        self._versions: dict[str, str] | None = None
        self._closed = False

    @property
    def versions(self) -> dict[str, str] | None:
        """The versions of torch, torchvision and transformers in the job server; None until one has started."""
        return self._versions

    def start(self) -> None:
        """Starts the job server now rather than at the first job: it needs some seconds to import torch."""
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
        """A job whose result is the Placement of a query's model and batch: see `sizer.placement`. Raises as `submit`."""
        return self._submit("placement", query, config_text, Placement.from_dict)

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
        return self._share(_Work(("compare", digest), message, Comparison.from_dict), None)

    def submit_models(self) -> Job:
        """A job with the result {"torchvision": [{"name", "family"}, ...], ...}: what the sources' packages build by name."""
        return self._share(_Work(("models",), {"task": "models"}, _read_models), None)

    def close(self) -> None:
        """Ends the job server; jobs that run get a JobError. Called by itself when the interpreter ends."""
        with self._lock:
            self._closed = True
            connection, self._connection = self._connection, None
            works = list(self._works.values())
            self._works.clear()
        for work in works:
            work.finish(failure=JobError("the job client was closed"))
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
        digest = None if config_text is None else hashlib.sha256(config_text.encode("utf-8", "surrogatepass")).digest()
        message = {"task": task, "query": canonical, "config_text": config_text}
        self._check_size(message)
        from_hub = request if SOURCES[request.source].fetched and config_text is None else None
        return self._share(_Work((task, canonical, digest), message, read), from_hub)

    def _check_size(self, message: dict, what: str = "config") -> None:
        if len(to_line(message)) > self._settings.request_bytes - 100:
            raise ConfigError(f"{what} is too large", allowed=f"{self._settings.request_bytes:,} bytes as a JSON text")

    def _share(self, work: _Work, from_hub: Request | None) -> Job:
        with self._lock:
            if self._closed:
                raise JobError("the job client was closed")
            if (value := self._cache.get(work.key)) is not None:
                work.finish(value)
                return Job(self, work)
            known = self._works.get(work.key)
            if known is None:
                self._admit(work, from_hub)
            shared = known or work
            shared.waiters += 1
            return Job(self, shared)

    def _admit(self, work: _Work, from_hub: Request | None) -> None:
        if len(self._works) >= self._settings.max_jobs + self._settings.max_waiting:
            raise JobError(f"too many jobs: {len(self._works)} are running or waiting", todo="try again in a minute")
        if from_hub is None:
            self._dispatch(work)
        self._works[work.key] = work
        if from_hub is not None:
            work.progress = clip_progress(f"fetching the config of {from_hub.name}")
            threading.Thread(target=self._fetch_then_dispatch, args=(work, from_hub), daemon=True).start()

    def _fetch_then_dispatch(self, work: _Work, request: Request) -> None:
        try:
            work.message["config_text"] = self._fetch(request.name, request.revision).decode("utf-8")
            self._check_size(work.message)
            with self._lock:
                if self._works.get(work.key) is work:  # else cancelled meanwhile
                    self._dispatch(work)
        except SizerError as error:
            self._finish(work, failure=error)
        except UnicodeDecodeError:
            self._finish(work, failure=ConfigError("config is not UTF-8", given=quote(request.name)))
        except Exception as error:  # whatever it is, the job must end
            self._finish(work, failure=JobError(f"the config could not be fetched ({type(error).__name__})"))

    def _dispatch(self, work: _Work) -> None:
        work.connection = self._connect()
        work.number = next(self._numbers)
        work.progress = "waiting" if work.connection.ready else "starting the job server"
        work.connection.send({"run": work.number, **work.message})

    def _connect(self) -> Connection:
        if self._closed:
            raise JobError("the job client was closed")
        if self._connection is None:
            self._connection = Connection(self._settings, self._receive, self._lost)
            atexit.register(self.close)
        return self._connection

    # ------------------------------------------------------------------------------------------------ what comes back

    def _receive(self, connection: Connection, message: dict) -> None:
        """One message of the server, on the connection's thread. Raises KeyError, TypeError where it makes no sense."""
        if "ready" in message:
            return self._welcome(message["ready"])
        with self._lock:
            work = self._find(connection, message["id"])
        if work is None:  # cancelled meanwhile
            return
        if "progress" in message:
            work.progress = clip_progress(message["progress"])
        elif "error" in message:
            self._finish(work, failure=error_from_wire(message["error"]))
        else:
            self._finish_with(work, message["result"])

    def _welcome(self, versions: dict[str, str]) -> None:
        with self._lock:
            if versions != self._versions:
                self._cache.clear()  # an answer holds for the versions that it was made with
            self._versions = versions

    def _find(self, connection: Connection, number: int) -> _Work | None:
        works = (work for work in self._works.values() if work.number == number and work.connection is connection)
        return next(works, None)

    def _finish_with(self, work: _Work, data: dict) -> None:
        try:
            value = work.read(data)
        except Exception as error:  # it comes from a process that read what strangers wrote
            failure = JobError(f"the job's answer is not what was expected ({quote(str(error), 200)})")
            self._finish(work, failure=failure)
        else:
            self._finish(work, value=value)

    def _finish(self, work: _Work, value: object = None, failure: SizerError | None = None) -> None:
        with self._lock:
            if self._works.get(work.key) is work:
                del self._works[work.key]
                if failure is None:
                    self._cache.put(work.key, value)
        work.finish(value, failure)

    def _lost(self, connection: Connection, failure: JobError) -> None:
        """The server of a connection has ended: its jobs fail, the next one starts another."""
        with self._lock:
            if self._connection is connection:
                self._connection = None
            lost = [work for work in self._works.values() if work.connection is connection]
        for work in lost:
            self._finish(work, failure=failure)

    def _leave(self, job: Job) -> None:
        with self._lock:
            if job.done:
                return
            work, job._cancelled = job._work, True
            work.waiters -= 1
            if work.waiters > 0 or self._works.get(work.key) is not work:
                return
            del self._works[work.key]
            if work.connection is not None:
                work.connection.send({"cancel": work.number})
        work.finish(failure=JobError("the job was cancelled"))


class _Cache:
    """The most recently used values, each for a limited time."""

    def __init__(self, ttl_seconds: float, max_entries: int, clock: Callable[[], float]):
        self._ttl_seconds, self._max_entries, self._clock = ttl_seconds, max_entries, clock
        self._entries: OrderedDict[tuple, tuple[float, object]] = OrderedDict()

    def get(self, key: tuple) -> object | None:
        expires, value = self._entries.get(key, (0.0, None))
        if value is None or self._clock() >= expires:
            self._entries.pop(key, None)
            return None
        self._entries.move_to_end(key)
        return value

    def put(self, key: tuple, value: object) -> None:
        self._entries[key] = (self._clock() + self._ttl_seconds, value)
        self._entries.move_to_end(key)
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def clear(self) -> None:
        self._entries.clear()


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


def _read_models(data: dict) -> dict[str, list[dict[str, str]]]:
    return {
        source: [{"name": str(row["name"]), "family": str(row["family"])} for row in rows]
        for source, rows in data.items()
    }

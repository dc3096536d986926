"""A measurement in a process of its own, as seen by whoever asked for it: start, look, cancel. No torch here."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace

from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.gpus import GPUS
from sizer.catalogue.sources import SOURCES
from sizer.device.record.recording import Measured
from sizer.errors import JobError, Refusal, RequestError, SizerError, quote
from sizer.memory.codec import DecodeError
from sizer.processes.outcome import Outcome
from sizer.processes.process import ChildProcess
from sizer.processes.wire import clip_progress, error_from_wire, from_line
from sizer.request import Request, check_one_rank, format_query, parse_query

WALL_SECONDS = 600.0
LIMIT_LINE = 256 * 2**20  # bytes of a result, recording included
POLL_SECONDS = 0.1  # how often a job that waits for the device looks whether it was cancelled

_DEVICE_LOCK = threading.Lock()  # one measurement at a time: each would count the memory of the other


class MeasureJob(Outcome):
    """One measurement on its way, in a process that is killed with all that it started when it has answered. Use `start`.

    `result` is a Measured; it raises what `measure` raises.
    """

    def __init__(self, message: dict, request: Request, seconds: float):
        self._message, self._request, self._seconds = message, request, seconds
        super().__init__("waiting for another measurement to end" if _DEVICE_LOCK.locked() else "starting")
        self._cancelled, self._late = threading.Event(), threading.Event()
        self._process: ChildProcess | None = None
        self._lock = threading.Lock()
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def process_id(self) -> int | None:
        """The process that measures; None before it was started."""
        return self._process.id if self._process else None

    def cancel(self) -> None:
        """Kill the process with all that it started; `result` then raises JobError. A job that is done stays done."""
        self._cancelled.set()
        self._kill()
        self.wait()

    # ------------------------------------------------------------------------------------------------ in a thread of its own

    def _run(self) -> None:
        try:
            self._acquire_device()
            try:
                measured = self._measure()
            finally:
                _DEVICE_LOCK.release()
            self.finish(measured)
        except SizerError as error:
            self.finish(failure=error)
        except Exception as error:  # of any kind: whoever waits for the outcome must get one
            failure = JobError(f"the measurement failed with {type(error).__name__} {quote(str(error), 200)}")
            self.finish(failure=failure)

    def _acquire_device(self) -> None:
        while not _DEVICE_LOCK.acquire(timeout=POLL_SECONDS):
            if self._cancelled.is_set():
                raise JobError("the measurement was cancelled")

    def _measure(self) -> Measured:
        if SOURCES[self._request.source].fetched and self._message["config_text"] is None:
            self._message["config_text"] = self._fetch()
        with self._lock:
            if self._cancelled.is_set():
                raise JobError("the measurement was cancelled")
            self._process = ChildProcess("sizer.device.trial.child", name="the measuring process", accelerators=True)
        clock = threading.Timer(self._seconds, self._end_late)
        clock.daemon = True
        clock.start()
        try:
            return self._read_answer()
        finally:
            clock.cancel()
            self._kill()
            self._process.wait()
            self._process.close_stdin()

    def _fetch(self) -> str:
        from sizer.architecture.hub import fetch_config

        self.progress = clip_progress(f"fetching the config of {self._request.name}")
        return fetch_config(self._request.name, self._request.revision).decode("utf-8")

    def _read_answer(self) -> Measured:
        """Sends the job and reads lines to the answer; stdin stays open, since the child ends with it."""
        with contextlib.suppress(OSError):  # the process has ended already: explained below, where no answer comes
            self._process.send(self._message)
        for line in self._process.lines(LIMIT_LINE):
            try:
                message = from_line(line)
                if "progress" in message:
                    self.progress = clip_progress(message["progress"])
                elif "error" in message:
                    raise error_from_wire(message["error"])
                else:
                    return Measured.from_dict(message["result"])
            except (ValueError, KeyError, DecodeError) as error:
                raise JobError(f"the answer is not what was expected ({quote(str(error), 200)})") from None
        raise self._explain_end(self._process.wait())

    def _end_late(self) -> None:
        self._late.set()
        self._kill()

    def _kill(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def _explain_end(self, status: int) -> JobError:
        if self._cancelled.is_set():
            return JobError("the measurement was cancelled")
        if self._late.is_set():
            return JobError(
                f"the measurement took longer than its limit of {self._seconds:g} s while {self.progress}",
                todo="try a smaller model or batch, or allow more time",
            )
        if os.name == "posix" and status == -signal.SIGKILL:
            return JobError(
                f"the measuring process was killed while {self.progress}",
                todo="the computer's memory may have run out: try a smaller batch",
            )
        ended = f"the measuring process ended (exit status {status}) while {self.progress}"
        return JobError(f"{ended}{self._process.saying()}")


def start(
    query: str,
    device: str,
    *,
    config_text: str | None = None,
    timing: bool = True,
    record: bool = True,
    seconds: float | None = None,
    host_bytes: int | None = None,
) -> MeasureJob:
    """A job that measures one cell of a query (one dtype, one batch) on a device ("cpu", "cuda:0", "mps").

    `config_text` is the config.json of a `hub:` architecture, which is fetched without it. `timing` and `record` can be left
    out; `seconds` limits the wall clock (WALL_SECONDS), `host_bytes` what a measurement on the CPU may take (what is free).
    One measurement runs at a time, others wait. Raises RequestError at once where the query is wrong, names more than one dtype
    or batch, or asks for what such a device cannot do.
    """
    request = parse_query(query)
    check_one_rank(request, "a measurement")
    _check_one(request)
    _check_possible(request, device)
    if config_text is not None and not SOURCES[request.source].fetched:
        todo = "put the config itself into the query, as arch=config:..."
        raise RequestError("config_text", given=f"arch={request.source}:", allowed="with arch=hub:", todo=todo)
    limit = WALL_SECONDS if seconds is None else seconds
    message = {
        "query": format_query(request, complete=True),
        "config_text": config_text,
        "device": device,
        "timing": timing,
        "record": record,
        "seconds": limit,
        "host_bytes": host_bytes,
    }
    return MeasureJob(message, request, limit)


def measure(
    query: str,
    device: str,
    *,
    config_text: str | None = None,
    timing: bool = True,
    record: bool = True,
    progress: Callable[[str], None] | None = None,
    seconds: float | None = None,
) -> Measured:
    """What one piece of work (one dtype, one batch) takes on a device, from a fresh process that is killed afterwards.

    Out of memory is a result, `Measured.measurement.out_of_memory`. Raises RequestError, ConfigError, HubError, BuildError for
    the question, DeviceError for a device that is not there, JobError where the process was killed or hit its limit.
    """
    job = start(query, device, config_text=config_text, timing=timing, record=record, seconds=seconds)
    said = ""
    try:
        while not job.done:
            if progress is not None and job.progress != said:
                said = job.progress
                progress(said)
            job.wait(POLL_SECONDS)
    except BaseException:  # Ctrl-C: the measurement must not go on
        job.cancel()
        raise
    return job.result()


def _check_possible(request: Request, device: str) -> None:
    """Raise RequestError where devices of this kind cannot do what is asked for, by what a query for one of them is refused with.

    Expandable segments are the allocator's: the device itself says whether it has them.
    """
    kind = device.partition(":")[0]
    same = [gpu.key for gpu in GPUS.values() if gpu.backend == kind]
    if same and find_gpu(request.gpu).backend != kind:
        parse_query(format_query(replace(request, gpu=same[0], expandable_segments=False), complete=True))


def _check_one(request: Request) -> None:
    values = {"dtype": request.dtypes, "batch": tuple(map(str, request.batches))}
    refusals = [
        Refusal(key=key, given=",".join(given), allowed="one", todo=f"name one, such as {key}={given[0]}")
        for key, given in values.items()
        if len(given) != 1
    ]
    if refusals:
        raise RequestError(refusals=refusals)

"""A measurement in a process of its own, as seen by whoever asked for it: start, look, cancel. No torch here."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

from sizer.catalogue.sources import SOURCES
from sizer.device.record.recording import Measured
from sizer.device.trial.process import kill, spawn
from sizer.errors import JobError, Refusal, RequestError, SizerError, quote
from sizer.memory.codec import DecodeError
from sizer.processes.wire import clip_progress, error_from_wire, error_to_wire, from_line, to_line
from sizer.request import Request, format_query, parse_query

WALL_SECONDS = 600.0
LIMIT_LINE = 256 * 2**20  # bytes of a result, recording included
TURN_SECONDS = 0.1  # how often a job that waits for its turn looks whether it was cancelled

_TURN = threading.Lock()  # two measurements at once would measure each other


class MeasureJob:
    """One measurement on its way, in a process that is killed with all that it started when it has answered. Use `start`."""

    def __init__(self, message: dict, request: Request, seconds: float):
        self._message, self._request, self._seconds = message, request, seconds
        self._progress = "waiting for another measurement to end" if _TURN.locked() else "starting"
        self._finished, self._cancelled, self._late = threading.Event(), threading.Event(), threading.Event()
        self._measured: Measured | None = None
        self._failure: dict | None = None
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()
        threading.Thread(target=self._work, daemon=True).start()

    @property
    def progress(self) -> str:
        """One short line on what is being done now."""
        return self._progress

    @property
    def done(self) -> bool:
        """Whether `result` would answer at once."""
        return self._finished.is_set()

    @property
    def process_id(self) -> int | None:
        """The process that measures; None before it was started."""
        return self._process.pid if self._process else None

    def result(self, timeout: float | None = None) -> Measured | None:
        """What was measured, or None while it is still being measured after `timeout` seconds (None: waits to the end).

        Raises what `measure` raises.
        """
        self._finished.wait(timeout)
        if self._failure is not None:
            raise error_from_wire(self._failure)
        return self._measured

    def cancel(self) -> None:
        """Kills the process with all that it started; `result` then raises JobError. A job that is done stays done."""
        self._cancelled.set()
        self._kill()
        self._finished.wait()

    # ------------------------------------------------------------------------------------------------ in a thread of its own

    def _work(self) -> None:
        try:
            self._take_turn()
            try:
                self._measured = self._measure()
            finally:
                _TURN.release()
            self._progress = "done"
        except SizerError as error:
            self._fail(error)
        except Exception as error:  # whatever it is, the job must end
            self._fail(JobError(f"the measurement failed with {type(error).__name__} {quote(str(error), 200)}"))
        self._finished.set()

    def _fail(self, error: SizerError) -> None:
        self._failure, self._progress = error_to_wire(error), "failed"

    def _take_turn(self) -> None:
        while not _TURN.acquire(timeout=TURN_SECONDS):
            if self._cancelled.is_set():
                raise JobError("the measurement was cancelled")

    def _measure(self) -> Measured:
        if SOURCES[self._request.source].fetched and self._message["config_text"] is None:
            self._message["config_text"] = self._fetch()
        home = tempfile.mkdtemp(prefix="sizer-")
        try:
            with open(Path(home, "words"), "w+b") as words:
                return self._run(home, words)
        finally:
            shutil.rmtree(home, ignore_errors=True)

    def _fetch(self) -> str:
        from sizer.architecture.hub import fetch_config

        self._progress = clip_progress(f"fetching the config of {self._request.name}")
        return fetch_config(self._request.name, self._request.revision).decode("utf-8")

    def _run(self, home: str, words: IO[bytes]) -> Measured:
        with self._lock:
            if self._cancelled.is_set():
                raise JobError("the measurement was cancelled")
            self._process = spawn(home, words)
        clock = threading.Timer(self._seconds, self._end_late)
        clock.daemon = True
        clock.start()
        try:
            return self._talk(words)
        finally:
            clock.cancel()
            self._kill()
            self._process.wait()
            self._process.stdout.close()
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def _talk(self, words: IO[bytes]) -> Measured:
        """Sends the job and reads lines to the answer; stdin stays open, since the child ends with it."""
        with contextlib.suppress(OSError):  # it died at once: the missing answer tells
            self._process.stdin.write(to_line(self._message))
            self._process.stdin.flush()
        while line := self._process.stdout.readline(LIMIT_LINE):
            try:
                message = from_line(line)
                if "progress" in message:
                    self._progress = clip_progress(message["progress"])
                elif "error" in message:
                    raise error_from_wire(message["error"])
                else:
                    return Measured.from_dict(message["result"])
            except (ValueError, KeyError, DecodeError) as error:
                raise JobError(f"the answer is not what was expected ({quote(str(error), 200)})") from None
        raise self._explain_end(self._process.wait(), words)

    def _end_late(self) -> None:
        self._late.set()
        self._kill()

    def _kill(self) -> None:
        with self._lock:
            if self._process is not None and self._process.returncode is None:
                kill(self._process)

    def _explain_end(self, status: int, words: IO[bytes]) -> JobError:
        if self._cancelled.is_set():
            return JobError("the measurement was cancelled")
        if self._late.is_set():
            return JobError(
                f"the measurement took longer than its limit of {self._seconds:g} s while {self._progress}",
                todo="try a smaller model or batch, or allow more time",
            )
        if os.name == "posix" and status == -signal.SIGKILL:
            return JobError(
                f"the measuring process was killed while {self._progress}",
                todo="the computer's memory may have run out: try a smaller batch",
            )
        words.seek(0)
        said = [line for line in words.read().decode("utf-8", "replace").splitlines() if line.strip()]
        last = f", saying {quote(said[-1], 300)}" if said else ""
        return JobError(f"the measuring process ended (exit status {status}) while {self._progress}{last}")


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
    One measurement runs at a time, others wait. Raises RequestError at once where the query is wrong, or names more than one
    dtype or batch.
    """
    request = parse_query(query)
    _check_one(request)
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
            job._finished.wait(TURN_SECONDS)
    except BaseException:  # Ctrl-C: nothing may go on without us
        job.cancel()
        raise
    return job.result()


def _check_one(request: Request) -> None:
    values = {"dtype": request.dtypes, "batch": tuple(map(str, request.batches))}
    refusals = [
        Refusal(key=key, given=",".join(given), allowed="one", todo=f"name one, such as {key}={given[0]}")
        for key, given in values.items()
        if len(given) != 1
    ]
    if refusals:
        raise RequestError(refusals=refusals)

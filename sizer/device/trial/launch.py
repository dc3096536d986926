"""A measurement in a separate process, as its parent sees it: start, look, read the answer, cancel. No torch here.

Ranks that train together are measured in a process each: by gloo on this computer's CPU, by NCCL on its GPUs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sizer.base.codec import DecodeError
from sizer.base.errors import JobError, Refusal, RequestError, SizerError, quote
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.gpus import GPUS
from sizer.catalogue.parallel import PARALLELS
from sizer.catalogue.sources import fetch
from sizer.device.machine.inventory import find_inventory
from sizer.device.record.recording import Measured
from sizer.processes.outcome import Outcome
from sizer.processes.process import ChildProcess
from sizer.processes.wire import clip_progress, error_from_wire, from_line
from sizer.query.request import Request, check_config_text, check_eager, check_one_rank
from sizer.query.text import format_query, parse_query

LIMIT_LINE = 256 * 2**20  # bytes of a result, recording included


class Measuring:
    """A separate process for a job of `sizer.device.trial.measuring_process`.

    `read` sends the job, `progress` is its last message.

    Raises JobError if it cannot be started.
    """

    def __init__(self, name: str) -> None:
        self.progress = "starting"
        self._name = name
        self._process = ChildProcess("sizer.device.trial.measuring_process", name=name, accelerators=True)

    @property
    def id(self) -> int:
        """The process id."""
        return self._process.id

    @property
    def home(self) -> str:
        """Temporary folder of the process, removed when it has ended."""
        return self._process.home

    def read(self, job: dict, say: Callable[[str], None]) -> Measured:
        """Send the job and read until the answer; stdin stays open, because the child ends when it is closed.

        Raises the child's error, JobError if it ended without an answer.
        """
        with contextlib.suppress(OSError):  # the process has already ended: explained below, if no answer comes
            self._process.send(job)
        for line in self._process.lines(LIMIT_LINE):
            try:
                message = from_line(line)
                if "progress" in message:
                    self.progress = clip_progress(message["progress"])
                    say(self.progress)
                elif "error" in message:
                    raise error_from_wire(message["error"])
                else:
                    return Measured.from_dict(message["result"])
            except (ValueError, KeyError, DecodeError) as error:
                raise JobError(f"the answer is invalid ({quote(str(error), 200)})") from None
        raise self._explain_end(self._process.wait())

    def kill(self) -> None:
        """Kill the process with all its descendants; a process that was waited for is not changed."""
        self._process.kill()

    def end(self) -> None:
        """Kill the process, wait for its end and remove its home."""
        self.kill()
        self._process.wait()
        self._process.close_stdin()

    def _explain_end(self, status: int) -> JobError:
        if os.name == "posix" and status == -signal.SIGKILL:
            return JobError(
                f"{self._name} was killed while {self.progress}",
                todo="the computer's memory may have run out: try a smaller batch",
            )
        ended = f"{self._name} ended (exit status {status}) while {self.progress}"
        return JobError(f"{ended}{self._process.saying()}")


# ----------------------------------------------------------------------------------------------------------------- jobs


WALL_SECONDS = 600.0
POLL_SECONDS = 0.1  # how often a job that waits for the device checks whether it was cancelled

_DEVICE_LOCK = threading.Lock()  # one measurement at a time, because each would count the other's memory


class MeasureJob(Outcome):
    """One running measurement, in a process that is killed with all its descendants after its answer. Use `start`.

    `result` is a Measured; it raises the errors of `measure`.
    """

    name = "the measuring process"

    def __init__(self, message: dict, request: Request):
        self._message, self._request, self._seconds = message, request, message["seconds"]
        super().__init__("waiting for another measurement to end" if _DEVICE_LOCK.locked() else "starting")
        self._cancelled, self._late = threading.Event(), threading.Event()
        self._processes: list[Measuring] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Return the process ids of the measurement; empty before the start."""
        return tuple(process.id for process in self._processes)

    def cancel(self) -> None:
        """Kill the processes with all that they started; `result` then raises JobError. A job that is done stays done."""
        self._cancelled.set()
        self._kill()
        self.wait()

    # ------------------------------------------------------------------------------------------------ in a separate thread

    def _run(self) -> None:
        try:
            self._acquire_device()
            try:
                measured = self._measure()
            finally:
                _DEVICE_LOCK.release()
            self.finish(measured)
        except SizerError as error:
            self.finish(failure=self._why_ended() or error)
        except Exception as error:  # any kind of error: the waiters must get a result
            failure = JobError(f"the measurement failed with {type(error).__name__} {quote(str(error), 200)}")
            self.finish(failure=failure)

    def _acquire_device(self) -> None:
        while not _DEVICE_LOCK.acquire(timeout=POLL_SECONDS):
            self._check_wanted()

    def _measure(self) -> object:
        if self._request.is_fetched and self._message["config_text"] is None:
            self._message["config_text"] = self._fetch()
        clock = threading.Timer(self._seconds, self._end_late)
        clock.daemon = True
        try:
            self._start_processes()
            clock.start()
            return self._read()
        finally:
            clock.cancel()
            for process in self._processes:
                process.end()

    def _start_processes(self) -> None:
        self._start_process(self.name)

    def _read(self) -> object:
        return self._processes[0].read(self._message, self._say)

    def _start_process(self, name: str) -> None:
        with self._lock:
            self._check_wanted()
            self._processes.append(Measuring(name))

    def _fetch(self) -> str:
        request = self._request
        self._say(f"fetching the config of {request.name}")
        return fetch(request.source, request.name, request.revision).decode("utf-8")

    def _say(self, text: str) -> None:
        self.progress = clip_progress(text)

    def _end_late(self) -> None:
        self._late.set()
        self._kill()

    def _kill(self) -> None:
        with self._lock:
            for process in self._processes:
                process.kill()

    def _check_wanted(self) -> None:
        if self._cancelled.is_set():
            raise JobError("the measurement was cancelled")

    def _why_ended(self) -> JobError | None:
        """Return why this process ended the measuring processes; None if it did not."""
        if self._cancelled.is_set():
            return JobError("the measurement was cancelled")
        if self._late.is_set():
            return JobError(
                f"the measurement took longer than its limit of {self._seconds:g} s while {self.progress}",
                todo="try a smaller model or batch, or allow more time",
            )
        return None


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
    """Return a job that measures one cell of a query (one dtype, one batch) on a device ("cpu", "cuda:0", "mps").

    One measurement runs at a time, others wait.

    Args:
        query: The query.
        device: The device.
        config_text: The config.json of a `hub:` architecture, which is downloaded otherwise.
        timing: Also measure the time.
        record: Also record the allocator's events.
        seconds: Limit of the wall clock; WALL_SECONDS by default.
        host_bytes: Limit of a measurement on the CPU; the free memory by default.

    Raises:
        RequestError: The query is wrong, names more than one dtype or batch, or asks for something that such a device cannot
            do.
    """
    request = parse_query(query)
    check_cell(request)
    check_one_rank(request, "a measurement in one process")
    check_eager(request, "a measurement")
    _check_possible(request, device)
    check_config_text(request, config_text)
    message = message_for(request, device, timing=timing, record=record, seconds=seconds)
    return MeasureJob({**message, "config_text": config_text, "host_bytes": host_bytes}, request)


def message_for(request: Request, device: str, *, timing: bool, record: bool, seconds: float | None) -> dict:
    """Return the job of the process that measures a request (`sizer.device.trial.measuring_process`)."""
    return {
        "query": format_query(request, complete=True),
        "config_text": None,
        "device": device,
        "timing": timing,
        "record": record,
        "seconds": WALL_SECONDS if seconds is None else seconds,
        "host_bytes": None,
        "meeting": None,
    }


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
    """Return the measurement of one dtype and batch on a device, from a fresh process that is killed afterwards.

    Out of memory is a result, `Measured.measurement.out_of_memory`. Raises RequestError, ConfigError, HubError, BuildError for
    the question, DeviceError for a missing device, JobError if the process was killed or hit its limit.
    """
    job = start(query, device, config_text=config_text, timing=timing, record=record, seconds=seconds)
    said = ""
    try:
        while not job.done:
            if progress is not None and job.progress != said:
                said = job.progress
                progress(said)
            job.wait(POLL_SECONDS)
    except BaseException:  # Ctrl-C: the measurement must not continue
        job.cancel()
        raise
    measured: Any = job.result()
    return measured


def _check_possible(request: Request, device: str) -> None:
    """Raise RequestError if devices of this kind cannot do the request, with the refusal of a query for such a device.

    Expandable segments depend on the allocator: the device itself says whether it has them.
    """
    kind = device.partition(":")[0]
    same = [gpu.key for gpu in GPUS.values() if gpu.backend == kind]
    if same and find_gpu(request.gpu).backend != kind:
        parse_query(format_query(replace(request, gpu=same[0], expandable_segments=False), complete=True))


def check_cell(request: Request) -> None:
    """Raise RequestError for several dtypes or batch sizes, which are not measured at once."""
    values = {"dtype": request.dtypes, "batch": tuple(map(str, request.batches))}
    refusals = [
        Refusal(key=key, given=",".join(given), allowed="one", todo=f"name one, such as {key}={given[0]}")
        for key, given in values.items()
        if len(given) != 1
    ]
    if refusals:
        raise RequestError(refusals=refusals)


PLACES = {"cpu": "cores", "cuda": "GPUs"}  # each rank needs one of these, by kind of device
GRACE_SECONDS = 10.0  # for the remaining ranks if one has ended early: they wait for it in vain


class RanksJob(MeasureJob):
    """A running measurement of all ranks. Use `start_ranks`.

    `result` is a tuple of Measured by rank. If one rank ended early, it only has the ranks that could still answer.
    """

    def _start_processes(self) -> None:
        for rank in range(self._request.world):
            self._start_process(f"rank {rank}")

    def _read(self) -> tuple[Measured, ...]:
        self._found: dict[int, Measured] = {}
        self._error_of_rank: SizerError | None = None
        self._ending = threading.Event()
        ranks = range(self._request.world)
        threads = [threading.Thread(target=self._read_rank, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error_of_rank is not None:
            raise self._error_of_rank
        return tuple(self._found[rank] for rank in sorted(self._found))

    def _read_rank(self, rank: int) -> None:
        """Read the answer of one rank.

        If a rank fails, all ranks are ended. If a rank ends early, the ranks that do not end by themselves are ended.
        """
        try:
            measured = self._processes[rank].read(self._job_of(rank), self._say)
        except SizerError as error:
            if not self._ending.is_set():
                self._error_of_rank = error
                self._end_all()
            return
        self._found[rank] = measured
        if measured.measurement.failure is not None or measured.measurement.out_of_memory is not None:
            timer = threading.Timer(GRACE_SECONDS, self._end_all)
            timer.daemon = True
            timer.start()

    def _end_all(self) -> None:
        self._ending.set()
        self._kill()

    def _job_of(self, rank: int) -> dict:
        device = self._message["device"]
        meeting = {
            "rank": rank,
            "world": self._request.world,
            "file": str(Path(self._processes[0].home, "meeting")),
        }
        return {
            **self._message,
            "query": format_query(replace(self._request, rank=rank), complete=True),
            "device": device if device == "cpu" else f"{device}:{rank}",
            "meeting": meeting,
        }


def start_ranks(query: str, device: str, *, record: bool = True, seconds: float | None = None) -> RanksJob:
    """Return a job that measures one cell of a query on each of its ranks.

    Ranks use gloo on "cpu", and NCCL on "cuda" with one GPU per rank.

    Measuring on several GPUs is implemented, but was never tried. The time is not measured. Otherwise as
    `sizer.device.trial.launch.start`. Raises RequestError if there are more ranks than cores or GPUs, DeviceError without any
    GPU.
    """
    request = parse_query(query)
    check_cell(request)
    check_places(request, device, count_places(device))
    return RanksJob(message_for(request, device, timing=False, record=record, seconds=seconds), request)


def check_places(request: Request, device: str, places: int) -> None:
    """Raise RequestError for more ranks than `places` on a device (cores, or GPUs), and for keys that need a GPU on the CPU."""
    if request.offload and device == "cpu":
        raise RequestError(
            "offload", given="1 on the CPU", allowed="on GPUs, which have a host to offload to", todo="leave it out"
        )
    if request.cp > 1 and device == "cpu":
        raise RequestError(
            "cp",
            given=f"{request.cp} on the CPU",
            allowed="on GPUs: PyTorch has it only for their attention",
            todo="leave it out",
        )
    if request.world <= places:
        return
    key = "ranks" if "ranks" in PARALLELS[request.parallel].keys else request.parallel
    others = request.world // getattr(request, key)
    raise RequestError(
        key,
        given=f"{request.world} ranks on {device}",
        allowed=f"as many as this computer has {PLACES[device]}: {places}",
        todo=f"ask for {key}={places // others}" if places // others > 1 else "leave parallel out",
    )


def count_places(device: str) -> int:
    """Return the largest possible number of ranks: this computer's cores for "cpu", its GPUs for "cuda".

    Raises RequestError for another kind of device, DeviceError without any GPU.
    """
    if device == "cpu":
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if device == "cuda":
        inventory = find_inventory()
        inventory.find("cuda")  # else it raises, with the available devices
        return sum(facts.kind == "cuda" for facts in inventory.devices)
    raise RequestError(
        "device",
        given=f"{quote(device)} with several ranks",
        allowed="cpu, cuda: each rank has a process, and a core or a GPU",
        todo="ask for cpu or cuda, or leave parallel out",
    )

"""Ranks that train together, measured in a process each: by gloo on this computer's CPU, by NCCL on its GPUs. No torch here."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

from sizer.base.errors import RequestError, SizerError, quote
from sizer.catalogue.parallel import PARALLELS
from sizer.device.machine.inventory import find_inventory
from sizer.device.record.recording import Measured
from sizer.device.trial.launch import MeasureJob, check_cell, message_for
from sizer.query.request import Request
from sizer.query.text import format_query, parse_query

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

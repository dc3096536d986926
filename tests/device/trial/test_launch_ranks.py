"""Ranks measured in a process each: what is refused, what ends all of them, what is left behind."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from sizer.base.config_json import encode_config
from sizer.base.errors import DeviceError, JobError, RequestError, SizerError
from sizer.device.machine.inventory import Inventory
from sizer.device.record.measurement import DeviceFacts
from sizer.device.trial import launch
from sizer.device.trial.launch import RanksJob, check_places, count_places, start, start_ranks
from sizer.estimating.estimator import estimate
from sizer.query.text import parse_query
from tests.processes.running import is_running, wait_until
from tests.tracing.models import LLAMA

RESNET = "arch=torchvision:resnet18&image=32&dtype=float32&batch=2"
OF_TWO = f"{RESNET}&parallel=ddp&ranks=2"


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "count_places", lambda device: 2)


def started(query: str = OF_TWO, **limits: float) -> RanksJob:
    job = start_ranks(query, "cpu", **limits)
    wait_until(lambda: len(job.process_ids) == 2)
    return job


def nothing_is_left(job: RanksJob) -> bool:
    homes = [Path(process.home) for process in job._processes]
    free = not launch._DEVICE_LOCK.locked()
    return free and not any(map(is_running, job.process_ids)) and not any(home.exists() for home in homes)


@pytest.mark.exhaustive
def test_every_rank_is_measured_in_a_process_of_its_own() -> None:
    job = started(OF_TWO.replace("parallel=ddp", "parallel=zero1"))
    first, second = (measured.measurement for measured in job.result())
    assert first.failure is None and second.failure is None
    assert [parse_query(measurement.query).rank for measurement in (first, second)] == [0, 1]
    assert first.tensors.weights_bytes == second.tensors.weights_bytes == 4 * 11_689_512
    # two averages of each weight, and a counter of 4 bytes for each of 62 tensors of them: each rank has a part
    parts = (first.tensors.optimizer_bytes, second.tensors.optimizer_bytes)
    assert sum(parts) == 8 * 11_689_512 + 4 * 62 and min(parts) > 0
    assert nothing_is_left(job)


@pytest.mark.exhaustive
def test_ranks_generate_together() -> None:
    query = f"arch=config:{encode_config(json.dumps(LLAMA))}&seq=16&batch=2&dtype=bfloat16&mode=generate&new=4&tp=2"
    (row,) = estimate(parse_query(query)).estimates
    for measured in start_ranks(query, "cpu").result():
        assert measured.measurement.failure is None
        assert [reading.phase for reading in measured.measurement.phases] == ["load", "prefill", "decode"]
        assert measured.measurement.tensors.weights_bytes == row.weights_bytes


def test_a_killed_rank_ends_all_with_its_words() -> None:
    job = started()
    os.killpg(job.process_ids[1], signal.SIGKILL)
    with pytest.raises(JobError, match=r"rank 1 was killed while .*; the computer's memory may have run out"):
        job.result()
    assert nothing_is_left(job)


def test_cancelling_ends_all() -> None:
    job = started()
    job.cancel()
    with pytest.raises(JobError, match="the measurement was cancelled"):
        job.result()
    assert nothing_is_left(job)


def test_so_does_the_limit_on_time() -> None:
    job = started(seconds=0.3)
    with pytest.raises(JobError, match=r"took longer than its limit of 0.3 s while .*; try a smaller model or batch"):
        job.result()
    assert nothing_is_left(job)


@pytest.mark.parametrize(
    ("keys", "device", "places", "message"),
    [
        ("parallel=fsdp&ranks=8", "cpu", 2, "ranks: given 8 ranks on cpu, allowed .* cores: 2; ask for ranks=2"),
        ("parallel=fsdp&ranks=4&tp=2", "cuda", 4, "ranks: given 8 ranks on cuda, allowed .* GPUs: 4; ask for ranks=2"),
        ("pp=4&schedule=gpipe", "cuda", 2, "pp: given 4 ranks on cuda, .* GPUs: 2; ask for pp=2"),
        ("parallel=tp&tp=4&optimizer_impl=loop", "cuda", 2, "tp: given 4 ranks on cuda, .* GPUs: 2; ask for tp=2"),
        (
            "parallel=ddp&ranks=1&cp=4",
            "cuda",
            2,
            "ranks: given 4 ranks on cuda, allowed .* GPUs: 2; leave parallel out",
        ),
        ("parallel=ddp&ranks=2", "cuda", 1, "ranks: given 2 ranks on cuda, allowed .* GPUs: 1; leave parallel out"),
    ],
)
def test_more_ranks_than_there_are_places(keys: str, device: str, places: int, message: str) -> None:
    request = parse_query(f"arch=hf:gpt2&dtype=float32&batch=1&{keys}")
    with pytest.raises(RequestError, match=message):
        check_places(request, device, places)
    check_places(request, device, request.world)


@pytest.mark.parametrize(
    ("gpus", "error", "message"),
    [
        (0, DeviceError, "given 'cuda', allowed cpu; no driver"),
        (
            1,
            RequestError,
            "ranks: given 2 ranks on cuda, allowed as many as this computer has GPUs: 1; leave parallel out",
        ),
    ],
)
def test_nothing_is_started_for_ranks_that_have_no_gpu(
    monkeypatch: pytest.MonkeyPatch, gpus: int, error: type[SizerError], message: str
) -> None:
    monkeypatch.undo()
    names = ["cpu", *(f"cuda:{number}" for number in range(gpus))]
    devices = tuple(DeviceFacts(device=name, name=name, total_bytes=2**30) for name in names)
    inventory = Inventory(devices=devices, missing=("no driver",), line="", versions={})
    monkeypatch.setattr(launch, "find_inventory", lambda: inventory)
    started: list[str] = []
    monkeypatch.setattr(launch, "Measuring", started.append)
    with pytest.raises(error, match=message):
        start_ranks(OF_TWO, "cuda")
    assert not started and count_places("cpu") >= 1


def test_one_process_is_not_for_several_ranks() -> None:
    with pytest.raises(RequestError, match="a measurement in one process: not for one rank of several"):
        start(OF_TWO, "cpu")


def test_devices_that_have_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(RequestError, match="device: given 'mps' with several ranks, allowed cpu, cuda"):
        start_ranks(OF_TWO, "mps")


@pytest.mark.parametrize("keys", ["dtype=float32,bfloat16&batch=2", "dtype=float32&batch=2,4"])
def test_a_measurement_is_of_one_cell(keys: str) -> None:
    with pytest.raises(RequestError, match="allowed one"):
        start_ranks(f"arch=torchvision:resnet18&{keys}&parallel=ddp&ranks=2", "cpu")


def test_context_parallel_is_for_gpus() -> None:
    request = parse_query("arch=hf:gpt2&dtype=float32&batch=1&parallel=ddp&ranks=1&cp=2")
    with pytest.raises(
        RequestError, match="cp: given 2 on the CPU, allowed on GPUs: PyTorch has it only for their attention"
    ):
        check_places(request, "cpu", 8)

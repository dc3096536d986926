"""Measurements in processes of their own: end to end on the CPU, devices that are not there, limits, cancelling, orphans."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import sizer
from sizer.base.config_json import encode_config
from sizer.base.errors import DeviceError, JobError, RequestError
from sizer.device.record.measurement import PROFILED
from sizer.device.trial import launch
from sizer.device.trial.launch import MeasureJob, measure, start
from tests.processes.running import is_running, wait_until

PROJECT = Path(sizer.__file__).parent.parent
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}  # fmt: skip
TINY = f"arch=config:{encode_config(json.dumps(LLAMA))}&seq=16&dtype=float32&batch=2"
RESNET = "arch=torchvision:resnet18&image=64&dtype=float32&batch=2"


@pytest.fixture(autouse=True)
def _device_is_free_again() -> Iterator[None]:
    """Fails the test whose measurement keeps the device, or a thread that the program's end would wait for."""
    yield
    assert not launch._DEVICE_LOCK.locked()
    assert all(thread.daemon or thread is threading.main_thread() for thread in threading.enumerate())


def ended(job: MeasureJob) -> bool:
    return not any(map(is_running, job.process_ids))


def test_a_language_model_with_its_time_and_recording() -> None:
    said: list[str] = []
    measured = measure(TINY, "cpu", progress=said.append)
    measurement = measured.measurement
    assert [reading.phase for reading in measurement.phases] == ["load", "forward", "backward", "optimizer", "step2"]
    # embedding and head 2*100*64; a layer: q and o 2*64*64, k and v 2*32*64, three of 128*64, two norms of 64; a last norm
    weights = 4 * (2 * 100 * 64 + 2 * (2 * 4096 + 2 * 2048 + 3 * 8192 + 2 * 64) + 64)
    assert measurement.tensors.weights_bytes == measurement.tensors.gradients_bytes == weights
    # rotary frequencies: 64/4 = 16 values a head, 8 of them and once more as they were, 4 bytes each
    assert measurement.phases[0].allocated_bytes == weights + 2 * 8 * 4
    assert measurement.source == PROFILED and measurement.doubts == () and measurement.failure is None
    assert measurement.device.device == "cpu" and measurement.versions["torch"]
    assert measurement.timing.step.median_seconds > 0
    assert measured.recording.marks[-1][1] == "step2"
    assert {"model.layers.1.mlp.up_proj", "lm_head"} <= set(measured.recording.module_names)
    assert said[0] in ("starting", "starting PyTorch") and "timing steps" in said


@pytest.mark.exhaustive
def test_a_picture_model_without() -> None:
    job = start(RESNET, "cpu", timing=False, record=False)
    measured = job.result()
    assert measured.measurement.timing is None and measured.recording is None
    # 11,689,512 parameters; statistics of batch norm: 2*4800 floats and 20 counters of 8 bytes
    assert measured.measurement.phases[0].allocated_bytes == 4 * (11_689_512 + 9_600) + 160
    assert job.done and job.progress == "done"
    assert ended(job)


def test_memory_that_the_computer_has_not_is_a_result() -> None:
    large = {**LLAMA, "hidden_size": 512, "vocab_size": 20_000}
    query = f"arch=config:{encode_config(json.dumps(large))}&seq=16&dtype=float32&batch=2"
    measured = start(query, "cpu", timing=False, host_bytes=250_000_000).result()
    # embedding and head alone are 2*20000*512 floats, 82 MB: gradients fit beside them, the optimizer's 164 MB do not
    found = measured.measurement.out_of_memory
    assert (found.phase, found.requested_bytes) == ("optimizer", 4 * 20_000 * 512)
    assert "can't allocate memory" in found.message
    assert found.allocated_bytes > 2 * 82_000_000 and found.free_bytes < 250_000_000 - 2 * 82_000_000
    assert [reading.phase for reading in measured.measurement.phases] == ["load", "forward", "backward"]


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(DeviceError, match="this device is not here: given 'cuda:97', allowed cpu") as caught:
        measure(TINY, "cuda:97")
    assert caught.value.exit_status == 4


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("arch=hf:gpt2", "dtype: given float32,bfloat16.* name one, such as dtype=float32\nbatch: given 1,2,4"),
        ("arch=hf:gpt2&dtype=float32&batch=1,2", "batch: given 1,2, allowed one; name one, such as batch=1"),
        ("arch=hf:gpt2&dtype=float33&batch=1", "float33"),
    ],
)
def test_a_measurement_is_of_one_cell(query: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        start(query, "cpu")


def test_a_config_goes_with_the_hub_alone() -> None:
    with pytest.raises(RequestError, match="config_text: given arch=torchvision:, allowed with arch=hub:"):
        start(RESNET, "cpu", config_text="{}")


def test_the_limit_on_time() -> None:
    job = start(TINY, "cpu", seconds=0.2)
    with pytest.raises(JobError, match=r"took longer than its limit of 0.2 s while .*; try a smaller model or batch"):
        job.result()
    assert ended(job)


def running() -> MeasureJob:
    job = start(RESNET, "cpu")
    wait_until(lambda: job.process_ids)
    return job


def test_cancelling_kills() -> None:
    job = running()
    assert job.result(timeout=0) is None and not job.done
    job.cancel()
    assert ended(job) and job.done and job.progress == "failed"
    with pytest.raises(JobError, match="the measurement was cancelled"):
        job.result()
    job.cancel()  # once more changes nothing


def test_one_measurement_at_a_time() -> None:
    first = running()
    second = start(TINY, "cpu")
    assert second.progress == "waiting for another measurement to end" and second.process_ids == ()
    second.cancel()
    with pytest.raises(JobError, match="the measurement was cancelled"):
        second.result()
    assert not first.done
    first.cancel()


def test_a_process_that_is_killed_is_told_of() -> None:
    job = running()
    os.killpg(*job.process_ids, signal.SIGKILL)
    with pytest.raises(
        JobError, match=r"the measuring process was killed while .*; the computer's memory may have run out"
    ):
        job.result()


def test_a_process_that_dies_says_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    popen = subprocess.Popen

    def other(command: list[str], **options: object) -> subprocess.Popen:
        return popen([sys.executable, "-c", "raise SystemExit('no such library')"], **options)

    monkeypatch.setattr(subprocess, "Popen", other)
    with pytest.raises(JobError, match=r"ended \(exit status 1\) while starting, saying 'no such library'"):
        measure(TINY, "cpu")


@pytest.mark.parametrize("answer", ["nonsense", '{"result": {"measurement": {}}}', '{"what": 1}'])
def test_an_answer_that_makes_no_sense(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    popen = subprocess.Popen

    def other(command: list[str], **options: object) -> subprocess.Popen:
        return popen([sys.executable, "-c", f"print({answer!r})"], **options)

    monkeypatch.setattr(subprocess, "Popen", other)
    with pytest.raises(JobError, match="the answer is invalid"):
        measure(TINY, "cpu")


ORPHAN = """
import sys, time
from sizer.device.trial.launch import start
job = start(sys.argv[1], "cpu")
while not job.process_ids:
    time.sleep(0.01)
print(*job.process_ids, flush=True)
time.sleep(600)
"""


def test_a_measurement_ends_with_whoever_asked() -> None:
    asker = subprocess.Popen([sys.executable, "-c", ORPHAN, RESNET], cwd=PROJECT, stdout=subprocess.PIPE, text=True)
    try:
        child = int(asker.stdout.readline())
        assert is_running(child)
    finally:
        asker.kill()
        asker.wait()
        asker.stdout.close()
    wait_until(lambda: not is_running(child))


def test_ctrl_c_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[MeasureJob] = []
    real = launch.MeasureJob

    def remember(*args: object) -> MeasureJob:
        seen.append(real(*args))
        return seen[0]

    def interrupt(text: str) -> None:
        wait_until(lambda: seen[0].process_ids)
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "MeasureJob", remember)
    with pytest.raises(KeyboardInterrupt):
        measure(RESNET, "cpu", progress=interrupt)
    assert ended(seen[0])

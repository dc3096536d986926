"""A measurement in this process: exact against the trace by the CPU's rules; whatever ends it is a result."""

from __future__ import annotations

import gc
import json
from dataclasses import replace

import pytest
import torch

from sizer.architecture import make_blueprint
from sizer.base.config_json import encode_config
from sizer.base.errors import RequestError
from sizer.device.readers.cpu_reader import CpuReader
from sizer.device.readers.cuda_reader import CudaReader
from sizer.device.record.measurement import PROFILED, DeviceFacts, Measurement
from sizer.device.record.recording import Measured
from sizer.device.trial import trial
from sizer.device.trial.trial import measure_request
from sizer.estimating.work import work_of
from sizer.query.text import parse_query
from sizer.tape.tape import CATEGORIES
from sizer.tracing.device import Device
from sizer.tracing.trace import build, trace
from tests.device.blueprints import blueprint, perceptron
from tests.device.scripted_devices import ScriptedCuda, counters
from tests.tracing.cpu_truth import tape_bytes
from tests.tracing.models import LLAMA

CPU = DeviceFacts(device="cpu", name="a computer", total_bytes=10**12)
LLAMA_QUERY = f"arch=config:{encode_config(json.dumps(LLAMA))}&seq=16&batch=2&dtype=float32"
ANY_QUERY = "arch=torchvision:resnet18&dtype=float32&batch=3"
TRAINING = ("load", "forward", "backward", "optimizer", "step2")


@pytest.fixture(autouse=True)
def _collected():
    gc.collect()


def phases_of(measured: Measured) -> list[str]:
    return [reading.phase for reading in measured.measurement.phases]


RESNET_QUERY = "arch=torchvision:resnet18&image=64&batch=2&dtype=bfloat16&optimizer=sgd-momentum"


@pytest.mark.parametrize("query", [LLAMA_QUERY, f"{LLAMA_QUERY}&mode=inference", RESNET_QUERY])
def test_bytes_alive_are_those_of_the_trace(query: str) -> None:
    request = parse_query(query)
    plan, work = make_blueprint(request), work_of(request, *request.dtypes)
    measured = measure_request(request, CpuReader(CPU), timing=False)
    tape = trace(plan, build(plan), work, batch=2, device=Device("cpu"))
    alive, _ = tape_bytes(tape)
    found = {reading.phase: reading.allocated_bytes for reading in measured.measurement.phases}
    assert found == alive
    assert measured.measurement.failure is None and measured.measurement.out_of_memory is None
    recorded, _ = tape_bytes(measured.recording.validate())
    assert recorded == found


def test_tensors_are_counted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "blueprint_of", lambda request, config, loaded: blueprint(perceptron, 4))
    steps: list[str] = []
    request = parse_query(f"{ANY_QUERY}&optimizer=adamw")
    measured = measure_request(request, CpuReader(CPU), timing=False, progress=steps.append)
    measurement, tensors = measured.measurement, measured.measurement.tensors
    # 4*8+8 + 8*2+2 = 58 weights; inputs 3*4; AdamW: two averages each and a counter for each of 4 parameters
    assert (tensors.weights_bytes, tensors.buffers_bytes, tensors.gradients_bytes) == (232, 0, 232)
    assert (tensors.inputs_bytes, tensors.optimizer_bytes) == (48, 2 * 232 + 4 * 4)
    # what the forward pass leaves: the first layer's output 3*8 floats, and the loss, one
    assert tensors.activations_bytes == 4 * (24 + 1)
    assert measurement.query.startswith("v=1&arch=torchvision:resnet18") and "&attention=" in measurement.query
    assert (measurement.dtype, measurement.batch, measurement.source) == ("float32", 3, PROFILED)
    assert measurement.doubts == () and measurement.retries is None and measurement.timing is None
    assert steps == ["building the module", *(trial._DOING[phase] for phase in TRAINING)]
    assert Measured.from_dict(json.loads(json.dumps(measured.to_dict()))) == measured


def test_a_recording_says_what_lived_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "blueprint_of", lambda request, config, loaded: blueprint(perceptron, 4))
    tape = measure_request(parse_query(ANY_QUERY), CpuReader(CPU), timing=False).recording
    bytes_of = dict.fromkeys(CATEGORIES, 0)
    for size, category in zip(tape.sizes, tape.categories, strict=True):
        bytes_of[CATEGORIES[category]] += size
    assert (bytes_of["parameter"], bytes_of["gradient"], bytes_of["input"]) == (232, 232, 48)
    assert (bytes_of["optimizer state"], bytes_of["activation"]) == (480, 100)
    loaded = [tape.module_names[tape.modules[block]] for block in range(4)]
    assert loaded == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_time_is_measured_after_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "blueprint_of", lambda request, config, loaded: blueprint(perceptron, 4))
    threads = torch.get_num_threads()
    timing = measure_request(parse_query(ANY_QUERY), CpuReader(CPU), record=False).measurement.timing
    assert timing.step.runs > 1 and timing.step.median_seconds > 0
    assert torch.get_num_threads() == threads


def test_time_that_could_not_be_measured_is_a_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("CUDA error:\n  no more")

    monkeypatch.setattr(trial, "blueprint_of", lambda request, config, loaded: blueprint(perceptron, 4))
    monkeypatch.setattr(trial, "measure_timing", fails)
    measured = measure_request(parse_query(ANY_QUERY), CpuReader(CPU), record=False)
    assert measured.measurement.doubts == ("the time could not be measured: RuntimeError CUDA error: no more",)
    assert tuple(phases_of(measured)) == TRAINING and measured.recording is None


class FailingCuda(ScriptedCuda):
    """Fails in the phase with this number, when the work of the phase is done: the synchronization tells."""

    def __init__(self, phase: int, error: Exception) -> None:
        super().__init__(stats_now=counters(0, 0, 0, 0))
        self.phase, self.error = phase, error

    def synchronize(self) -> None:
        super().synchronize()
        if self.calls.count("synchronize") > self.phase:
            if isinstance(self.error, torch.OutOfMemoryError):
                self.stats_now = counters(900, 900, 1_000, 1_000)
                self.fail(4_096, 512)
                self.stats_now = counters(10, 900, 1_000, 1_000)
            else:
                self.lost = True
            raise self.error


def measure_failing(monkeypatch: pytest.MonkeyPatch, phase: int, error: Exception) -> Measurement:
    # The scripted device computes on the CPU; the reader reads what the script says.
    monkeypatch.setattr(trial, "blueprint_of", lambda request, config, loaded: blueprint(perceptron, 4))
    reader = CudaReader(replace(CPU, device="cpu"), FailingCuda(phase, error))
    measured = measure_request(parse_query(ANY_QUERY), reader)
    assert Measured.from_dict(measured.to_dict()) == measured
    return measured.measurement


@pytest.mark.parametrize("phase", range(5), ids=TRAINING)
def test_out_of_memory_in_each_phase(monkeypatch: pytest.MonkeyPatch, phase: int) -> None:
    measurement = measure_failing(monkeypatch, phase, torch.OutOfMemoryError("CUDA out of memory."))
    assert tuple(reading.phase for reading in measurement.phases) == TRAINING[:phase]
    found = measurement.out_of_memory
    assert (found.phase, found.requested_bytes, found.free_bytes) == (TRAINING[phase], 4_096, 512)
    assert (found.allocated_bytes, found.reserved_bytes) == (900, 1_000)
    assert measurement.failure is None and measurement.timing is None and measurement.doubts == ()


@pytest.mark.parametrize("phase", range(5), ids=TRAINING)
def test_a_device_lost_in_each_phase(monkeypatch: pytest.MonkeyPatch, phase: int) -> None:
    lost = RuntimeError(
        "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronous"
    )
    measurement = measure_failing(monkeypatch, phase, lost)
    assert tuple(reading.phase for reading in measurement.phases) == TRAINING[:phase]
    assert measurement.failure.startswith(f"RuntimeError in the phase {TRAINING[phase]}: CUDA error: an illegal memory")
    assert "\n" not in measurement.failure
    assert measurement.out_of_memory is None and measurement.timing is None


def test_weights_larger_than_the_computer_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "blueprint_of", lambda request, config, loaded: blueprint(perceptron, 4))
    measured = measure_request(parse_query(ANY_QUERY), CpuReader(CPU), free_bytes=231)
    found = measured.measurement.out_of_memory
    assert (found.phase, found.requested_bytes, found.free_bytes) == ("load", 232, 231)
    assert found.message == "not tried: weights and buffers are 232 B, this computer has 231 B free"
    assert measured.measurement.phases == () and measured.recording is None


def test_a_question_that_cannot_be_asked_is_no_result() -> None:
    with pytest.raises(RequestError, match="batch norm would see one value per channel"):
        measure_request(parse_query("arch=torchvision:resnet18&image=32&batch=1&dtype=float32"), CpuReader(CPU))

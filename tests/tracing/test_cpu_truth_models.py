"""The trace by the CPU's rules against torch.profiler, for a model of each kind: what is alive exactly, peaks within a hair.

What may be missing from a peak, all of it below a thousandth of it:
- an operator with a Python number holds it in 8 bytes, and once more in the dtype of the computation;
- autograd saves such numbers in 8 bytes each (`CpuTruth.saved_numbers`);
- oneDNN's buffers whose sizes go by the size of the caches (`sizer/tracing/cpu/onednn.py`).
"""

from __future__ import annotations

import pytest
import torch

from sizer.tracing.device import Device
from sizer.tracing.steps import Work
from sizer.tracing.trace import build, trace
from tests.architecture.oldest import needs_sam2_video
from tests.tracing.cpu_truth import measure_on_cpu, tape_bytes
from tests.tracing.zoo import ZOO

DEEP = (
    "googlenet",
    "mnasnet",
    "densenet",
    "resnext",
    "shufflenet",
    "mobilenet_v2",
    "regnet",
    "segformer",
    "clip",
    "llava",
    "step3p7",
)
WITHOUT_GRADIENTS = ("sam2_video",)
CASES = [
    (name, "float32", "training", "sgd" if name in DEEP else "adamw") for name in ZOO if name not in WITHOUT_GRADIENTS
]  # AdamW's many steps take long
CASES += [pytest.param(name, "float32", "inference", "none", marks=needs_sam2_video) for name in WITHOUT_GRADIENTS]
CASES += [
    (name, "float32", "inference", "none") for name in ("resnet", "convnext", "swin", "unet", "bert", "llama", "t5")
]
CASES += [
    (name, "amp-bfloat16", "training", "sgd")
    for name in ("resnet", "mobilenet_v3", "convnext", "vit", "bert", "mixtral", "bart", "wav2vec2")
]
CASES += [(name, "bfloat16", "training", "sgd-momentum") for name in ("regnet", "unet", "swin", "gpt2", "whisper")]

HAIR = 0.001  # of the peak


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# transformers' DeBERTa compiles functions when it is imported, which PyTorch deprecates.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "dtype", "mode", "optimizer"),
    [
        pytest.param(*case, marks=pytest.mark.exhaustive) if number % 2 and type(case) is tuple else case
        for number, case in enumerate(CASES)
    ],
)
def test_trace_equals_profiler(name: str, dtype: str, mode: str, optimizer: str) -> None:
    blueprint, work = ZOO[name](mode), Work(mode=mode, dtype=dtype, optimizer=optimizer)
    truth = measure_on_cpu(blueprint, work, batch=2)
    tape = trace(blueprint, build(blueprint), work, batch=2, device=Device("cpu"))
    alive, peaks = tape_bytes(tape)

    assert alive == {**truth.alive, "forward": truth.alive["forward"] - truth.saved_numbers}

    for phase, measured in truth.peaks.items():
        assert abs(peaks[phase] / measured - 1) <= HAIR, f"{phase}: {peaks[phase] - measured} bytes beside {measured}"


def test_at_least_25_models() -> None:
    assert len({case.values[0] if hasattr(case, "values") else case[0] for case in CASES}) >= 25

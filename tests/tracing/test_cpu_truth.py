"""The trace by the CPU's rules against torch.profiler on the same step: the oracle that needs no GPU."""

from __future__ import annotations

import pytest
import torch

from sizer.tracing.device import Device
from sizer.tracing.steps import Work
from sizer.tracing.trace import build, trace
from tests.tracing.cpu_truth import measure_on_cpu, tape_bytes
from tests.tracing.models import BERT, GPT2, LLAMA, MIXTRAL, T5, VIT, WHISPER, classifier, text

# An operator with a Python number holds it in 8 bytes, and in 4 more in the dtype of the computation; oneDNN's buffers that go by
# the size of the caches differ by some too (sizer/tracing/cpu/onednn.py).
HAIR = 0.001  # of the peak

MODELS = {
    "resnet18": lambda mode: classifier("resnet18", 64),
    "resnet50": lambda mode: classifier("resnet50", 64),
    "mobilenet_v2": lambda mode: classifier("mobilenet_v2", 64),
    "convnext_tiny": lambda mode: classifier("convnext_tiny", 64),
    "swin_t": lambda mode: classifier("swin_t", 64),
    "vit_b_32": lambda mode: classifier("vit_b_32", 224),
    "gpt2": lambda mode: text(mode, **GPT2),
    "gpt2-eager": lambda mode: text(mode, attention="eager", **GPT2),
    "bert": lambda mode: text(mode, **BERT),
    "llama": lambda mode: text(mode, **LLAMA),
    "mixtral": lambda mode: text(mode, **MIXTRAL),
    "t5": lambda mode: text(mode, **T5),
    "vit": lambda mode: text(mode, length=None, **VIT),
    "whisper": lambda mode: text(mode, length=None, **WHISPER),
}
CASES = [(name, "float32", "training") for name in MODELS]
CASES += [
    (name, dtype, "training") for name in ("gpt2", "bert", "llama", "t5") for dtype in ("amp-bfloat16", "bfloat16")
]
CASES += [(name, "float32", "inference") for name in ("resnet18", "swin_t", "gpt2", "bert", "llama", "t5")]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# GPT-2 and BERT are in every run in float32, the other dtypes with the smaller LLaMA and T5, which is slow under autocast.
OTHERS = [case for case in CASES if case[0] in ("gpt2", "bert") and case[1:] != ("float32", "training")]
OTHERS += [("t5", "amp-bfloat16", "training")]


@pytest.mark.parametrize(
    ("name", "dtype", "mode"),
    [pytest.param(*case, marks=pytest.mark.exhaustive if case in OTHERS else ()) for case in CASES],
)
def test_trace_equals_profiler(name: str, dtype: str, mode: str) -> None:
    blueprint, work = MODELS[name](mode), Work(mode=mode, dtype=dtype)
    truth = measure_on_cpu(blueprint, work, batch=2)
    tape = trace(blueprint, build(blueprint), work, batch=2, device=Device("cpu"))
    alive, peaks = tape_bytes(tape)

    expected = {**truth.alive, "forward": truth.alive["forward"] - truth.saved_numbers}
    assert alive == expected

    for phase, measured in truth.peaks.items():
        assert abs(peaks[phase] - measured) <= HAIR * measured, (
            f"{phase}: {peaks[phase] - measured} bytes beside {measured}"
        )

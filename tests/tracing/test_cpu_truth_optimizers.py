"""Every optimizer in every implementation against torch.profiler on the same two steps, to the byte in what stays alive."""

from __future__ import annotations

import importlib

import pytest
import torch

from sizer.catalogue.optimizers import OPTIMIZERS
from sizer.tracing.device import Device
from sizer.tracing.steps import Work
from sizer.tracing.trace import build, trace
from tests.tracing.cpu_truth import measure_on_cpu, tape_bytes
from tests.tracing.models import text

# Matrices, vectors and an embedding.
SMALL = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 256,
         "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 500}  # fmt: skip
HAIR = 0.001  # of the peak, as in test_cpu_truth.py
# Muon multiplies a matrix with its transpose in bfloat16, where oneDNN holds 8,192 bytes more than its rules in scratch_cpu.py say.
HAIR_OF_MUON = 0.002

CASES = [
    (optimizer, implementation)
    for optimizer, row in OPTIMIZERS.items()
    if not row.has_kernels  # those that have are followed on CUDA alone
    for implementation in (None, *row.implementations)
]


@pytest.mark.parametrize(("optimizer", "implementation"), CASES)
def test_a_step_equals_the_profilers(optimizer: str, implementation: str | None) -> None:
    importlib.import_module(OPTIMIZERS[optimizer].module)  # that of transformers makes a few tensors, which stay
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        blueprint = text(length=16, **SMALL)
        work = Work(mode="training", dtype="float32", optimizer=optimizer, optimizer_impl=implementation)
        truth = measure_on_cpu(blueprint, work, batch=2)
        alive, peaks = tape_bytes(trace(blueprint, build(blueprint), work, batch=2, device=Device("cpu")))
    finally:
        torch.set_num_threads(threads)
    assert alive == {**truth.alive, "forward": truth.alive["forward"] - truth.saved_numbers}
    hair = HAIR_OF_MUON if optimizer == "muon" else HAIR
    for phase, measured in truth.peaks.items():
        assert abs(peaks[phase] - measured) <= hair * measured, (phase, peaks[phase] - measured, measured)

"""Two traces give the memory of every batch size: held against traces at sizes that were not used to fit."""

from __future__ import annotations

import pytest

from sizer.allocator.allocator import replay
from sizer.tape.affine import fit_affine
from sizer.tracing.device import Device
from sizer.tracing.steps import Work
from sizer.tracing.trace import build, trace
from tests.tracing.test_cpu_truth import MODELS

CASES = [(name, "training") for name in MODELS] + [(name, "inference") for name in ("resnet18", "gpt2", "bert", "t5")]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_predicted_peaks_equal_traced_peaks(name: str, mode: str) -> None:
    blueprint, work, device = MODELS[name](mode), Work(mode=mode, dtype="float32"), Device("cuda", (8, 0))
    module = build(blueprint)
    first = trace(blueprint, module, work, batch=2, device=device)
    line = fit_affine(first, trace(blueprint, module, work, batch=3, device=device, short=True))
    for batch in (4, 7):
        traced = trace(blueprint, module, work, batch=batch, device=device)
        predicted = line.at(batch)
        assert predicted.sizes == traced.sizes
        expected, found = (replay(tape, backend="cuda") for tape in (traced, predicted))
        assert found.peak_allocated_bytes == expected.peak_allocated_bytes
        assert found.peak_reserved_bytes == expected.peak_reserved_bytes
        assert found.phases == expected.phases

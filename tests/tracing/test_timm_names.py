"""timm's smallest models trace on meta as they run: a handful of them against the profiler, by the CPU's rules."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

from sizer.architecture import make_blueprint
from sizer.device.trial.trial import one_thread
from sizer.query.text import parse_query
from sizer.tracing.device import Device
from sizer.tracing.steps import Work
from sizer.tracing.trace import build, trace
from tests.tracing.cpu_truth import measure_on_cpu, tape_bytes

pytestmark = pytest.mark.skipif(not find_spec("timm") and not os.environ.get("CI"), reason="timm is not installed")
NAMES = ("test_resnet", "test_vit", "test_vit2", "test_convnext", "test_efficientnet", "test_nfnet", "test_mambaout")
# Of the peak, as in test_cpu_truth.py. oneDNN cuts the columns of wide depthwise kernels by the size of the caches; what some
# processors without AVX-512 take is up to 4.4 % less (sizer.tracing.cpu.onednn, known limitations).
HAIR = 0.001
WIDE, CUT = ("test_convnext", "test_mambaout"), 0.05 if torch.backends.cpu.get_cpu_capability() == "AVX2" else HAIR


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_equals_the_profilers(name: str, mode: str) -> None:
    with one_thread():
        blueprint = make_blueprint(parse_query(f"arch=timm:{name}"))
        work = Work(mode=mode, dtype="float32")
        truth = measure_on_cpu(blueprint, work, batch=2)
        alive, peaks = tape_bytes(trace(blueprint, build(blueprint), work, batch=2, device=Device("cpu")))
    forward = truth.alive["forward"] - (truth.saved_numbers if mode == "training" else 0)
    assert alive == {**truth.alive, "forward": forward}
    for phase, peak in truth.peaks.items():
        assert abs(peaks[phase] - peak) <= (CUT if name in WIDE and phase != "forward" else HAIR) * peak, phase

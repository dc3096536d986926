"""Convolutions by Sizer's rules against PyTorch's own CUDA code, which runs over a driver that only accounts for memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sizer.catalogue.gpus import GPUS
from sizer.catalogue.hardware import HARDWARE
from sizer.tracing.cuda.size_oracle import size_oracle_of
from sizer.tracing.device import Device
from sizer.tracing.recorder import Recorder
from sizer.tracing.trace import recording
from tests.null_driver.build import null_environment
from tests.tracing.convolutions import CASES, most, once, run

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("gpu", ["t4", pytest.param("h100-80gb", marks=pytest.mark.exhaustive)])
def test_events_are_pytorchs_own(gpu: str) -> None:
    environment = {**os.environ, **null_environment(HARDWARE[gpu]), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.tracing.convolutions"]
    answer = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    by_rules = _by_rules(gpu)
    for case, true in zip(CASES, json.loads(answer.stdout), strict=True):
        found = run(case, "meta", by_rules)
        assert [*map(most, found)] == [*map(most, true)], case
        if case.groups == 1 or gpu == "h100-80gb":  # a group's gradients come one after the other, here both at first
            assert found == [*map(once, true)], case


def _by_rules(gpu: str) -> Callable[[Callable[[], object]], tuple[object, list[int]]]:
    """The events of functions that run one after the other: cuBLAS's workspace may stay from the first on."""
    recorder = Recorder(Device("cuda", GPUS[gpu].capability))

    def events(function: Callable[[], object]) -> tuple[object, list[int]]:
        start = len(recorder.log.order)
        with recording(recorder):
            out = function()
            recorder.log.mark("forward")
        tape = recorder.log.tape(batch=1, stand_ins=()).resolve(size_oracle_of(GPUS[gpu]))
        sizes = (tape.sizes[event] if event >= 0 else -tape.sizes[~event] for event in tape.order[start:])
        return out, [size for size in sizes if size]

    return events

"""Every allocation of a step, in order, against those that a real H200 recorded (tests/measured/h200-2.11-2026-11-26)."""

from __future__ import annotations

from pathlib import Path

import pytest

from sizer.base.config_json import read_config
from sizer.base.units import round_up
from sizer.base.versions import installed_version
from sizer.device.comparison.counterpart import gpu_of, request_of
from sizer.device.record.recording import read_measured
from sizer.estimating.estimator import estimate_cell
from sizer.tape.loops import written
from sizer.tape.tape import Tape

MEASURED = Path(__file__).parents[1] / "measured/h200-2.11-2026-11-26"
BLOCK = 512  # bytes; the allocator's unit
CASES = ("vit_b_16-b32-float32", "gpt2-b4-float32", "gpt2-b4-bfloat16", "llama-1b-b4-bfloat16-inference")


def allocated(tape: Tape) -> list[int]:
    """Return the bytes of each block in the order of allocation, rounded up as the allocator does."""
    return [size for block in tape.order if block >= 0 and (size := round_up(tape.sizes[block], BLOCK))]


@pytest.mark.skipif(installed_version() != (2, 11), reason="measured with PyTorch 2.11, whose Python code runs in the trace")
@pytest.mark.parametrize("name", CASES)
def test_blocks_are_allocated_in_the_devices_own_order(name: str) -> None:
    (case,) = [case for case in read_measured(MEASURED) if case.name == name]
    measurement = case.measured.measurement
    config = None if measurement.config_text is None else read_config(measurement.config_text)
    _, tape = estimate_cell(request_of(measurement), config=config, gpu=gpu_of(measurement.device))
    assert allocated(written(tape)) == allocated(case.measured.recording)

"""Operators that PyTorch's CUDA code refuses for their dtypes are refused in a trace, and no others."""

from __future__ import annotations

from sizer.tracing.device import Device
from sizer.tracing.recorder import Recorder
from sizer.tracing.trace import recording
from tests.null_driver.conftest import Run
from tests.tracing.mixed_dtypes import CASES, refuses

NOT_CUDNNS = "LSTM of halves"  # cuDNN runs no recurrent layers over the null driver


def test_a_trace_refuses_what_cuda_refuses(run_on_null: Run):
    found = run_on_null("tests.tracing.mixed_dtypes", "cuda", gpu="a100-80gb")
    assert len(found) > 100
    traced = {}
    for name, case in CASES.items():
        with recording(Recorder(Device("cuda", (8, 0)))):
            traced[name] = refuses(case, "meta")
    asked = [name for name in CASES if not name.startswith(NOT_CUDNNS)]
    assert {name: traced[name] for name in asked} == {name: found[name] for name in asked}

"""Operators that a device refuses for their dtypes are refused in a trace, and no others: the CPU is the judge here.

`tests/null_driver/test_dtypes.py` asks PyTorch's CUDA code the same.
"""

from __future__ import annotations

import pytest

from sizer.tracing.device import Device
from sizer.tracing.recorder import Recorder
from sizer.tracing.trace import recording
from tests.tracing.mixed_dtypes import CASES, refuses

# The CPU has no kernel or another rule than a mismatch where meta and CUDA go on: oneDNN takes no LSTM of mixed states, and in
# float16 that LSTM is a chain of products, which the trace of a CPU has as well.
ONLY_THE_CPU = {"LSTM, float state, bfloat16"}


@pytest.mark.parametrize("name", sorted(CASES.keys() - ONLY_THE_CPU))
def test_a_trace_by_the_cpus_rules_refuses_what_the_cpu_refuses(name):
    with recording(Recorder(Device("cpu"))):
        traced = refuses(CASES[name], "meta")
    assert traced == refuses(CASES[name], "cpu")


def test_a_number_under_a_mask_is_written_from_the_host_alone():
    cases = {name: CASES[f"write {name} under a mask, bfloat16".replace("  ", " ")] for name in ("", "a host's number")}
    with recording(Recorder(Device("cuda", (8, 0)))):
        assert [refuses(case, "meta") for case in cases.values()] == [True, False]

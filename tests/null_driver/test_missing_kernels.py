"""Operators of torchvision that its CUDA kernels refuse for a dtype are refused in a trace, and no others."""

from __future__ import annotations

from tests.null_driver.conftest import Run
from tests.tracing.test_missing_kernels import refused_in_a_trace


def test_a_trace_refuses_what_the_wheels_cuda_kernels_refuse(run_on_null: Run):
    found = run_on_null("tests.tracing.torchvision_dtypes", "cuda", gpu="a100-80gb")
    assert "nms bfloat16" in found and "nms float16" not in found
    assert refused_in_a_trace("cuda") == found

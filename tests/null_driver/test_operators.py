"""Operators one by one, a trace against PyTorch's CUDA code over the null driver: bytes at the peak and strides."""

from __future__ import annotations

import warnings

import pytest
import torch

import sizer
from sizer.errors import SizerError
from tests.null_driver.operators import MODES, cases, layout, moved, work

pytest.importorskip("expecttest", reason="PyTorch's operator samples need the package expecttest")

GPU = "h100-80gb"
EQUAL = 0.98  # of samples; the differences are named in README's limits
BLAS = 32 * 2**20  # cuBLAS' workspace, which an earlier sample of the same process may have made
COUNTED = torch.__version__ >= "2.15"


def traced(case: tuple, mode: str) -> list:
    """Return the peak bytes and layout of a sample in a trace, or the class of the error alone."""
    found: list = []

    def setup():
        arguments = moved(case, mode)

        def step():
            found[:] = [layout(work(case, mode, *arguments))]

        return step

    try:
        estimate = sizer.size_step(setup, steps=1, gpu=GPU).estimates[0]
    except SizerError as error:
        return [str(error)]
    peak = max(phase.peak_allocated_bytes for phase in estimate.phases[1:])
    return [peak - estimate.phases[0].allocated_bytes, found[0]]


def differences(run_on_null, mode: str, dtype: str, first: int, count: int, every: int) -> tuple[int, dict[str, tuple]]:
    """Return how many samples ran on the device, and those that a trace answers differently."""
    numbers = (str(first), str(count), str(every))
    truth = run_on_null("tests.null_driver.operators", mode, dtype, *numbers, gpu=GPU)
    ran, differing = 0, {}
    for case in cases(mode, getattr(torch, dtype), first, count, every):
        right = truth[case[0]]
        if len(right) == 1:
            continue
        ran += 1
        answer = traced(case, mode)
        if answer != right and not (answer[1:] == right[1:] and abs(answer[0] - right[0]) == BLAS):
            differing[case[0]] = (right, answer)
    return ran, differing


@pytest.mark.skipif(not COUNTED, reason="the kernels' rules are those of PyTorch 2.15")
@pytest.mark.parametrize("mode", MODES)
def test_a_sample_of_operators_allocates_as_on_a_device(run_on_null, mode: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ran, differing = differences(run_on_null, mode, "float32", 0, 1, 6)
    assert ran > 40
    assert len(differing) <= 0.05 * ran, differing  # one sample of each sixth operator: fewer than in the whole survey


@pytest.mark.exhaustive
@pytest.mark.skipif(not COUNTED, reason="the kernels' rules are those of PyTorch 2.15")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mode", MODES)
def test_operators_allocate_as_on_a_device(run_on_null, mode: str, dtype: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ran, differing = differences(run_on_null, mode, dtype, 0, 3, 1)
    assert ran > 900
    assert len(differing) <= (1 - EQUAL) * ran, differing

"""Operators one by one, a trace against PyTorch's CUDA code over the null driver: bytes at the peak and strides."""

from __future__ import annotations

import gzip
import json
import os
import warnings
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

import sizer
from sizer.base.errors import SizerError
from tests.null_driver import kernels, layouts, modules, operators
from tests.null_driver.operators import MODES, Case, layout, moved, work

GPU = "h100-80gb"
MEASURED = Path(__file__).parent.parent / "measured" / "h200-2.11-2026-11-26" / "operators.json.gz"
ON_DATA = ("prod|", "cumprod|", "norm.nuc|")  # gradients that depend on values, and a workspace of cuSOLVER
EQUAL = 0.99  # of samples; the differences are named in README's limits
BLAS = 32 * 2**20  # cuBLAS' workspace, which an earlier sample of the same process may have made
OF_2_11 = pytest.mark.skipif(not torch.__version__.startswith("2.11."), reason="the H200 ran PyTorch 2.11")
OF_2_15 = pytest.mark.skipif(torch.__version__ < "2.15", reason="the kernels' rules are those of PyTorch 2.15")
# SIZER_OPERATORS=3:8 takes eight samples from the fourth on, of every operator in every dtype.
OFTEN = (("no_grad", "float32"), ("backward", "float32"), ("backward", "bfloat16"))  # the others are of the third tier
FIRST, COUNT = os.environ.get("SIZER_OPERATORS", "0:3").split(":")
WHOLE = "SIZER_OPERATORS" in os.environ


def traced(case: Case, mode: str) -> list:
    """Return the peak bytes and layout of a sample in a trace, or the class of the error alone."""
    found: list = []

    def setup():
        arguments = moved(case, mode)
        torch.empty(0, device="cuda")  # for samples that compute with the host alone

        def step():
            found[:] = [layout(work(case, mode, *arguments))]

        return step

    try:
        estimate = sizer.size_step(setup, steps=1, gpu=GPU).estimates[0]
    except SizerError as error:
        return [str(error)]
    peak = max(phase.peak_allocated_bytes for phase in estimate.phases[1:])
    return [peak - estimate.phases[0].allocated_bytes, found[0]]


def differences(truth: dict[str, list], cases: Iterable[Case], mode: str) -> tuple[int, dict[str, tuple]]:
    """Return how many samples ran on the device, and those that a trace answers differently."""
    ran, differing = 0, {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases:
            right = truth.get(case[0], [])
            if len(right) < 2:
                continue
            ran += 1
            answer = traced(case, mode)
            if answer != right and not (answer[1:] == right[1:] and abs(answer[0] - right[0]) == BLAS):
                differing[case[0]] = (right, answer)
    return ran, differing


def compared(run_on_null, survey, mode: str, dtype: str, *numbers: int) -> tuple[int, dict[str, tuple]]:
    """Return how many of a survey's samples ran on the device, and those that a trace answers differently."""
    truth = run_on_null(survey.__name__, mode, dtype, *map(str, numbers), gpu=GPU)
    return differences(truth, survey.cases(mode, getattr(torch, dtype), *numbers), mode)


def differences_from_the_h200(run_on_null, mode: str, dtype: str, *numbers: int) -> tuple[int, dict[str, tuple]]:
    """Return how many samples ran on the H200 and on its null driver, and those that differ."""
    measured = json.loads(gzip.decompress(MEASURED.read_bytes()))[f"{mode} {dtype}"]
    null = run_on_null(operators.__name__, mode, dtype, *map(str, numbers), gpu="h200")
    ran = [name for name, answer in null.items() if len(answer) == len(measured.get(name, ())) == 2]
    return len(ran), {name: (measured[name], null[name]) for name in ran if measured[name] != null[name]}


@OF_2_11
def test_a_sample_of_operators_allocates_as_on_an_h200(run_on_null):
    ran, differing = differences_from_the_h200(run_on_null, "backward", "float32", 0, 1, 1)
    assert ran > 300
    assert all(name.startswith(ON_DATA) for name in differing), differing


@pytest.mark.exhaustive
@OF_2_11
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mode", MODES)
def test_operators_allocate_as_on_an_h200(run_on_null, mode: str, dtype: str):
    ran, differing = differences_from_the_h200(run_on_null, mode, dtype, 0, 3, 1)
    assert ran > 1000
    assert all(name.startswith(ON_DATA) for name in differing), differing


@OF_2_15
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_all_samples_of_some_operators_are_equal(run_on_null, monkeypatch, dtype: str):
    """Attention with as many heads of keys as of queries and `enable_gqa`, its mask of a triangle, `ldexp` by integers, `isclose`
    without tolerance, and scans and dropout of complex numbers."""
    names = "ldexp nn.functional.scaled_dot_product_attention isclose cumprod cumulative_trapezoid nn.functional.dropout"
    monkeypatch.setenv(operators.NAMED, names)
    ran, differing = compared(run_on_null, operators, "no_grad", dtype, 0, 40, 1)
    assert ran > 30
    assert not differing


@OF_2_15
@pytest.mark.parametrize("mode", [pytest.param(mode, marks=[pytest.mark.exhaustive] * (mode == "inference")) for mode in MODES])
def test_a_sample_of_operators_allocates_as_on_a_device(run_on_null, mode: str):
    ran, differing = compared(run_on_null, operators, mode, "float32", 0, 1, 6)
    assert ran > 40
    assert len(differing) <= 0.05 * ran, differing  # one sample of each sixth operator: fewer than in the whole survey


@OF_2_15
@pytest.mark.parametrize("mode", ["no_grad", "backward"])
def test_a_sample_of_layouts_allocates_as_on_a_device(run_on_null, mode: str):
    ran, differing = compared(run_on_null, layouts, mode, "bfloat16", 3, 11)
    assert ran > 60
    assert not differing


@OF_2_15
@pytest.mark.parametrize("mode", ["no_grad", "backward"])
def test_a_sample_of_modules_allocates_as_on_a_device(run_on_null, mode: str):
    ran, differing = compared(run_on_null, modules, mode, "float32", 5, 16)
    assert ran > 40
    assert not differing


@OF_2_15
@pytest.mark.parametrize("mode", ["inference", "backward"])
def test_kernels_allocate_as_on_a_device(run_on_null, mode: str):
    ran, differing = compared(run_on_null, kernels, mode, "float32")
    assert ran == len(kernels.KERNELS)
    assert not differing


@pytest.mark.exhaustive
@OF_2_15
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
def test_modules_allocate_as_on_a_device(run_on_null, mode: str, dtype: str):
    ran, differing = compared(run_on_null, modules, mode, dtype, 0, 1)
    assert ran > 800
    assert len(differing) <= (1 - EQUAL) * ran, differing


@OF_2_15
@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        pytest.param(mode, dtype, marks=pytest.mark.exhaustive if (mode, dtype) in OFTEN else pytest.mark.full)
        for mode in MODES
        for dtype in ("float32", "bfloat16", "float16")
    ],
)
def test_operators_allocate_as_on_a_device(run_on_null, mode: str, dtype: str):
    every = 1 if dtype == "float32" or WHOLE else 2
    ran, differing = compared(run_on_null, operators, mode, dtype, int(FIRST), int(COUNT), every)
    assert ran > 400
    assert len(differing) <= (1 - EQUAL) * ran, differing


@pytest.mark.full
@OF_2_15
@pytest.mark.parametrize("dtype", ["float64", "int64", "bool", "complex64", "uint8"])
def test_operators_of_other_dtypes_allocate_as_on_a_device(run_on_null, dtype: str):
    ran, differing = compared(run_on_null, operators, "no_grad", dtype, 0, 2, 3)
    assert ran > 150
    assert len(differing) <= (1 - EQUAL) * ran, differing


@pytest.mark.exhaustive
@OF_2_15
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["no_grad", "backward"])
def test_layouts_allocate_as_on_a_device(run_on_null, mode: str, dtype: str):
    every = 1 if WHOLE or (mode, dtype) == ("backward", "bfloat16") else 3
    ran, differing = compared(run_on_null, layouts, mode, dtype, 0, every)
    assert ran > 250
    assert len(differing) <= (1 - EQUAL) * ran, differing

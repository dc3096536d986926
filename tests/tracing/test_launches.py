"""Triton kernels that code launches by itself."""

from __future__ import annotations

import ast

import pytest
import torch

from sizer.estimating.custom import size_step
from sizer.tracing.compiled.launches import arguments_written

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

ELEMENTS = 2**22


@triton.jit
def _scaled(source, out, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    places = out + offsets
    tl.store(places, 2 * tl.load(source + offsets, mask=mask), mask=mask)


@triton.autotune(configs=[triton.Config({"BLOCK": 512}), triton.Config({"BLOCK": 1024})], key=["count"])
@triton.jit
def _tuned(source, out, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offsets, tl.load(source + offsets))


def test_a_launch_holds_its_arguments_and_is_named():
    def setup():
        source = torch.zeros(ELEMENTS, device="cuda")

        def step():
            out = torch.empty_like(source)
            _scaled[(ELEMENTS // 1024,)](source, out, ELEMENTS, BLOCK=1024)
            grid = lambda found: (triton.cdiv(ELEMENTS, found["BLOCK"]),)  # noqa: E731
            _tuned[grid](out, source, ELEMENTS)

        return step

    report = size_step(setup, gpu="h100-80gb")
    assert report.estimates[0].peak_allocated_bytes == 2 * 4 * ELEMENTS  # float32: source and out
    launched, tuned = (line for line in report.uncounted if "Triton" in line)
    assert launched.endswith(": _scaled, _tuned")
    assert tuned.endswith(": _tuned")


def test_values_that_a_kernel_writes_are_unknown_and_others_stay():
    def setup():
        lengths, counts = torch.full((2,), 3, device="cuda"), torch.full((2,), 5, device="cuda")

        def step():
            _scaled[(1,)](lengths, counts, 2, BLOCK=2)
            return torch.zeros(int(lengths.sum()) * 512, device="cuda"), counts.tolist()

        return step

    report = size_step(setup, gpu="h100-80gb")
    assert report.estimates[0].peak_allocated_bytes == 2 * 512 + 6 * 512 * 4  # two integers each have a block of 512 bytes
    assert any("value" in line for line in report.uncounted)  # of counts


def test_multiprocessors_are_those_of_the_gpu():
    found = []

    def setup():
        from triton.runtime import driver

        zeros = torch.zeros(1, device="cuda")
        found.append(driver.active.utils.get_device_properties(0)["multiprocessor_count"])
        return lambda: zeros + 1

    size_step(setup, gpu="rtx-4090")
    assert found == [128]


@pytest.mark.parametrize(
    ("source", "written"),
    [
        ("tl.store(a + i, tl.load(b))", {"a"}),
        ("p = a + i\ntl.atomic_add(p, 1)\nx = tl.load(b)", {"a"}),
        ("own(a, tl.load(b))", {"a", "b"}),
        ("x = tl.load(a) + tl.load(b)", set()),
    ],
)
def test_arguments_that_reach_a_store_are_found(source: str, written: set[str]):
    assert arguments_written(ast.parse(source)) & {"a", "b"} == written

"""Pointwise operators of several dtypes on the CPU: bytes at the peak of a call, the profiler's and the trace's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from sizer.estimating.custom import size_step

ELEMENTS = 2**16
GIVEN = ELEMENTS * (2 + 4 + 8 + 1)  # bytes of the four tensors that a call gets
NUMBERS = 24  # Python numbers are tensors of 8 and 4 bytes, which the trace does not see
Call = Callable[[Tensor, Tensor, Tensor, Tensor], object]

CALLS: dict[str, Call] = {
    "new results": lambda half, single, whole, mask: (half - single, single * half, torch.maximum(half, single)),
    "in place into less": lambda half, single, whole, mask: half.sub_(single),
    "in place into more": lambda half, single, whole, mask: single.mul_(half),
    "in place of three": lambda half, single, whole, mask: half.addcmul_(single, single),
    "into less": lambda half, single, whole, mask: torch.mul(single, single, out=half),
    "into more": lambda half, single, whole, mask: torch.exp(half, out=single),
    "masks": lambda half, single, whole, mask: (single * mask, single.mul_(mask), single + mask),
    "integers": lambda half, single, whole, mask: (whole / whole, whole.exp(), whole * 2.5, single * whole),
    "comparisons": lambda half, single, whole, mask: (half > single, whole == single, half.eq_(single)),
    "a choice": lambda half, single, whole, mask: (torch.where(mask, half, single), torch.clamp(half, single)),
    "broadcast": lambda half, single, whole, mask: half.view(256, 256).mul_(single[:256]),
    "floats of two tensors": lambda half, single, whole, mask: (torch.atan2(half, single), torch.xlogy(half, single)),
    "sums": lambda half, single, whole, mask: (half.sum(dtype=torch.float32), half.cumsum(0, dtype=torch.float32)),
}


def _given() -> tuple[Tensor, ...]:
    return tuple(torch.ones(ELEMENTS, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.bool))


def _measured(call: Call) -> int:
    given = _given()
    with profile(profile_memory=True, activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        call(*given)
    now = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_copies_in_the_dtype_of_the_computation_are_those_that_the_profiler_sees(call: Call):
    def setup() -> Callable[[], object]:
        given = _given()
        return lambda: call(*given)

    traced = size_step(setup, gpu="cpu", steps=1).estimates[0].peak_allocated_bytes - GIVEN
    assert abs(traced - _measured(call)) <= NUMBERS

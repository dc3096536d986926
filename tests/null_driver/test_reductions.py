"""Reductions by the rules against PyTorch's own, at random."""

from __future__ import annotations

import pytest

from sizer.catalogue.gpus import GPUS
from sizer.tracing.cuda.size_oracle import size_oracle_of
from sizer.tracing.device import Device
from sizer.tracing.device_rules import rules_for
from tests.null_driver.reductions import OPERATORS, cases, make

COUNT = 150


@pytest.mark.parametrize("gpu", ["h100-80gb", "t4"])
def test_reductions_hold_what_pytorchs_own_do(run_on_null, gpu: str):
    truth = run_on_null("tests.null_driver.reductions", "1", str(COUNT), gpu=gpu)
    device, answer = Device("cuda", GPUS[gpu].capability), size_oracle_of(GPUS[gpu])
    held, staged = rules_for(device).allocations, 0
    for (name, dtype, shape, order, dims), freed in zip(cases(1, COUNT), truth, strict=True):
        tensor = make("meta", dtype, shape, order)
        out = OPERATORS[name](tensor, list(dims))
        (*_, asked) = held[OPERATORS[name]](device, (tensor, list(dims)), {}, out)
        sizes = answer([(one.kind, one.words, one.numbers) for one in asked])
        if tensor.nbytes < 2**31:  # beyond, pieces come one after the other and the largest stands for all
            assert sorted(size for size in sizes if size) == sorted(freed), (name, dtype, shape, order, dims)
        staged += bool(freed)
    assert staged > 10

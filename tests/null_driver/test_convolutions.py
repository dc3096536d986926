"""What convolutions hold inside by the rules against PyTorch's own and cuDNN's, at random."""

from __future__ import annotations

import json

import pytest
import torch

from sizer.catalogue.gpus import GPUS
from sizer.tracing.allocations import During
from sizer.tracing.cuda.convolution import as_call, backend_of
from sizer.tracing.cuda.size_oracle import size_oracle_of
from sizer.tracing.device import Device
from sizer.tracing.device_rules import rules_for
from sizer.tracing.log import DeferredSize
from tests.null_driver.convolutions import BACKWARD, FORWARD, backward_arguments, cases, make, options, precision

COUNT = 60


@pytest.mark.parametrize("benchmark", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "gpu",
    ["t4", pytest.param("a100-40gb", marks=pytest.mark.exhaustive), pytest.param("b200", marks=pytest.mark.exhaustive)],
)
def test_convolutions_hold_what_pytorchs_own_do(run_on_null, monkeypatch, gpu: str, benchmark: bool):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
    capability = GPUS[gpu].capability
    asked = cases(7, COUNT, capability)
    arguments = "7", str(COUNT), json.dumps(capability), *["benchmark"] * benchmark
    truth = run_on_null("tests.null_driver.convolutions", *arguments, gpu=gpu)
    device, answer = Device("cuda", capability), size_oracle_of(GPUS[gpu])

    def held(operator, case: dict, arguments: tuple, out) -> list[int]:  # type: ignore[no-untyped-def]
        with precision(case):
            steps = [*rules_for(device).allocations[operator](device, arguments, {}, out)]
        parts = [part for step in flat(steps) if isinstance(step, list | tuple) for part in step]
        sizes = [size for part in parts for size in (part if isinstance(part, tuple) else (part,))]
        found = [
            answer([(one.kind, one.words, one.numbers)])[0] if isinstance(one, DeferredSize) else one for one in sizes
        ]
        return sorted(rounded(size) for size in found if size)

    def flat(steps):  # type: ignore[no-untyped-def]
        for step in steps:
            yield from (step.sizes, *flat(step.steps)) if isinstance(step, During) else (step,)

    def rounded(size: int) -> int:
        return (size + 511) // 512 * 512

    workspaces = 0
    wrong = []
    for case, (first, second) in zip(asked, truth, strict=True):
        input, weight, bias = make("meta", case)
        if backend_of(as_call(input, weight, options(case)), capability) != "cudnn":
            continue  # these multiply through cuBLAS, whose workspace is no business of convolutions
        result = FORWARD(input, weight, bias, *options(case))
        backward = backward_arguments(case, result, input, weight)
        gradients = (torch.empty_like(input), torch.empty_like(weight), bias)
        for operator, arguments, out, freed in (
            (FORWARD, (input, weight, bias, *options(case)), result, first),
            (BACKWARD, backward, gradients, second),
        ):
            found, true = held(operator, case, arguments, out), sorted(rounded(size) for size in freed)
            workspaces += sum(true) > 0
            if found != true:
                wrong.append((operator.name(), case, found, true))
    assert workspaces > COUNT // 2
    assert wrong == []

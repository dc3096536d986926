"""Convolves random tensors over the null driver and prints what each convolution held inside, forward and backward.

python -m tests.null_driver.convolutions SEED COUNT CAPABILITY [benchmark]
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor

Case = dict[str, Any]
FORWARD, BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
LARGEST = 2**27  # elements
_SIDES = {1: (50, 400, 3000), 2: (7, 14, 28, 56, 112, 224), 3: (7, 14, 28)}


def cases(seed: int, count: int, capability: tuple[int, int]) -> list[Case]:
    """Convolutions of one to three dimensions as networks have them: pointwise, square, strided, grouped, depthwise, dilated,
    transposed; in every dtype that the device multiplies, contiguous and in channels last, with TF32 and without."""
    chance = random.Random(seed)
    dtypes = ("float32", "float16", "bfloat16") if capability >= (8, 0) else ("float32", "float16")
    found: list[Case] = []
    while len(found) < count:
        rank, kernel = chance.choice((1, 2, 2, 2, 2, 2, 2, 3)), chance.choice((1, 1, 1, 3, 3, 5, 7))
        inputs = chance.choice((3, 16, 24, 32, 64, 96, 128, 256, 512, 1024))
        outputs = chance.choice((16, 24, 32, 64, 96, 128, 256, 512))
        groups = chance.choice((1, 1, 1, 1, 4, inputs))
        outputs = inputs if groups == inputs else outputs
        one = {
            "input": [chance.choice((1, 2, 8, 32, 64)), inputs, *[chance.choice(_SIDES[rank])] * rank],
            "transposed": groups == 1 and chance.random() < 0.1,
            "stride": chance.choice((1, 1, 1, 2)), "padding": kernel // 2, "groups": groups,
            "dilation": chance.choice((1, 1, 1, 2)) if kernel > 1 else 1,
            "dtype": chance.choice(dtypes), "tf32": chance.random() < 0.7,
            "channels_last": rank == 2 and chance.random() < 0.4,
            "bias": chance.random() < 0.4,
        }  # fmt: skip
        one["weight"] = (
            [inputs, outputs, *[kernel] * rank] if one["transposed"] else [outputs, inputs // groups, *[kernel] * rank]
        )
        if inputs % groups or outputs % groups or prod(one["input"]) * max(1, outputs // inputs) > LARGEST:
            continue
        try:
            FORWARD(*make("meta", one), *options(one))
        except RuntimeError:  # a kernel larger than its input
            continue
        found.append(one)
    return found


def make(device: str, case: Case) -> tuple[Tensor, Tensor, Tensor | None]:
    """Input, weight, and the bias where there is one."""
    layout = torch.channels_last if case["channels_last"] else torch.contiguous_format
    dtype = getattr(torch, case["dtype"])
    input, weight = (
        torch.empty(case[name], dtype=dtype, device=device, memory_format=layout) for name in ("input", "weight")
    )
    channels = case["weight"][1 if case["transposed"] else 0]
    return input, weight, torch.empty(channels, dtype=dtype, device=device) if case["bias"] else None


@contextmanager
def precision(case: Case) -> Iterator[None]:
    """Within the context float32 is multiplied in TF32 where the case says so, and nowhere else."""
    convolutions = torch.backends.cudnn.conv
    before, convolutions.fp32_precision = convolutions.fp32_precision, "tf32" if case["tf32"] else "ieee"
    try:
        yield
    finally:
        convolutions.fp32_precision = before


def options(case: Case) -> tuple:
    """What aten.convolution takes after the bias."""
    rank = len(case["input"]) - 2
    stride, padding, dilation = ([case[name]] * rank for name in ("stride", "padding", "dilation"))
    return stride, padding, dilation, case["transposed"], [0] * rank, case["groups"]


def backward_arguments(case: Case, result: Tensor, input: Tensor, weight: Tensor) -> tuple:
    """Of aten.convolution_backward, for a gradient like the result on a device, which is laid out as the operands are."""
    layout = torch.channels_last if case["channels_last"] else torch.contiguous_format
    grad = torch.empty_like(result, memory_format=layout)
    return (grad, input, weight, None, *options(case), [True, True, case["bias"]])


def held(case: Case) -> list[list[int]]:
    """The bytes of the blocks that came and went in the forward and in the backward operator."""
    with precision(case):
        input, weight, bias = make("cuda", case)
        result, freed = _watch(lambda: FORWARD(input, weight, bias, *options(case)))
        arguments = backward_arguments(case, result, input, weight)
        return [freed, _watch(lambda: BACKWARD(*arguments))[1]]


def _watch(call: Any) -> tuple[Any, list[int]]:
    torch.cuda.memory._record_memory_history(max_entries=1000, stacks="python")
    before = len(torch.cuda.memory._snapshot()["device_traces"][0])
    kept = call()
    events = torch.cuda.memory._snapshot()["device_traces"][0][before:]
    torch.cuda.memory._record_memory_history(enabled=None)
    return kept, [event["size"] for event in events if event["action"] == "free_completed"]


if __name__ == "__main__":
    capability = tuple(json.loads(sys.argv[3]))
    torch.backends.cudnn.benchmark = "benchmark" in sys.argv
    print(json.dumps([held(case) for case in cases(int(sys.argv[1]), int(sys.argv[2]), capability)]), flush=True)
    os._exit(0)

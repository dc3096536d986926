"""Reduces random tensors over the null driver and prints what each reduction held inside.

python -m tests.null_driver.reductions SEED COUNT
"""

from __future__ import annotations

import json
import math
import os
import random
import sys

import torch

SIZES = (
    1,
    2,
    3,
    4,
    7,
    8,
    16,
    24,
    32,
    50,
    56,
    64,
    100,
    128,
    196,
    197,
    256,
    512,
    768,
    1000,
    1024,
    2048,
    3072,
    4096,
    8192,
)
OPERATORS = {
    "aten.sum.dim_IntList": torch.ops.aten.sum.dim_IntList,
    "aten.mean.dim": torch.ops.aten.mean.dim,
    "aten.amax.default": torch.ops.aten.amax.default,
    "aten.var_mean.correction": torch.ops.aten.var_mean.correction,
}
LARGEST = 2**30


def cases(seed: int, count: int) -> list[tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Operator, dtype, shape, order of its dimensions in memory, and those that go."""
    chance = random.Random(seed)
    found: list = []
    while len(found) < count:
        shape = tuple(chance.choice(SIZES) for _ in range(chance.choice((1, 2, 2, 3, 4))))
        order = tuple(chance.sample(range(len(shape)), len(shape)) if chance.random() < 0.3 else range(len(shape)))
        dims = tuple(sorted(chance.sample(range(len(shape)), chance.randint(1, len(shape)))))
        if 1 < math.prod(shape) <= LARGEST:
            found.append((chance.choice(tuple(OPERATORS)), chance.choice(("float32", "bfloat16")), shape, order, dims))
    return found


def make(device: str, dtype: str, shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    """A tensor of that shape whose dimensions lie in memory in that order."""
    laid = torch.empty([shape[dim] for dim in order], dtype=getattr(torch, dtype), device=device)
    return laid.permute([order.index(dim) for dim in range(len(shape))])


def held(operator: str, dtype: str, shape: tuple, order: tuple, dims: tuple) -> list[int]:
    """The bytes of the blocks that came and went."""
    tensor = make("cuda", dtype, shape, order)
    torch.cuda.memory._record_memory_history(max_entries=1000, stacks="python")
    before = len(torch.cuda.memory._snapshot()["device_traces"][0])
    kept = OPERATORS[operator](tensor, list(dims))
    events = torch.cuda.memory._snapshot()["device_traces"][0][before:]
    torch.cuda.memory._record_memory_history(enabled=None)
    del kept
    return [event["size"] for event in events if event["action"] == "free_completed"]


if __name__ == "__main__":
    print(json.dumps([held(*case) for case in cases(int(sys.argv[1]), int(sys.argv[2]))]), flush=True)
    os._exit(0)

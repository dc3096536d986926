"""Generations by transformers' own generate over the null driver: PyTorch's own peaks, as JSON.

python -m tests.null_driver.generations CASES

CASES is JSON: a list of [head, cache, dtype, batch, prompt, new].
"""

from __future__ import annotations

import json
import os
import sys

import torch

from sizer.architecture.generation import generate
from sizer.device.trial.materialize import allocate_parameters, build_without_weights, load
from sizer.tracing.steps import place, weight_dtype
from sizer.tracing.trace import repeatable
from tests.null_driver.emptied import empty_the_allocator
from tests.null_driver.values import KnownValues
from tests.tracing.generations import generation

DEVICE = torch.device("cuda")


def peaks(head: str, cache: str, dtype: str, batch: int, prompt: int, new: int) -> list[int]:
    """The most bytes allocated and reserved, from an empty allocator on."""
    empty_the_allocator()
    blueprint, _ = generation(head, prompt=prompt)
    with repeatable(), torch.no_grad(), KnownValues():
        module = build_without_weights(blueprint, weight_dtype(dtype)).eval()
        allocate_parameters(module)
        load(module, DEVICE)
        example = place(blueprint.example(batch, False), weight_dtype(dtype), lambda tensor: tensor.to(DEVICE))
        generate(module, example, new=new, cache=cache, on_token=lambda number, held: number < new)
        found = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
    return found


if __name__ == "__main__":
    torch.cuda.init()
    print(json.dumps([peaks(*case) for case in json.loads(sys.argv[1])]), flush=True)
    os._exit(0)  # nothing to take down: the device is none

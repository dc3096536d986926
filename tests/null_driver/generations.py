"""Generations by transformers' own generate over the null driver: PyTorch's own peaks, as JSON.

python -m tests.null_driver.generations CASES

CASES is JSON: a list of [head, cache, dtype, batch, prompt, new]. Quantized caches are tests.tracing.quantized_caches'.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from sizer.device.trial.materialize import allocate_parameters, build_without_weights, load
from sizer.device.trial.trial import generate_on
from sizer.tracing.steps import weight_dtype
from sizer.tracing.trace import repeatable
from tests.null_driver.emptied import empty_the_allocator
from tests.null_driver.values import KnownValues
from tests.tracing.generations import generation, work
from tests.tracing.quantized_caches import four_bit_caches

DEVICE = torch.device("cuda")


def peaks(head: str, cache: str, dtype: str, batch: int, prompt: int, new: int) -> list[int]:
    """The most bytes allocated and reserved, from an empty allocator on."""
    empty_the_allocator()
    blueprint, _ = generation(head, prompt=prompt)
    with repeatable(), KnownValues(), four_bit_caches():
        module = build_without_weights(blueprint, weight_dtype(dtype))
        allocate_parameters(module)
        load(module, DEVICE)
        asked = work(new, cache=cache, dtype=dtype)
        generate_on(module, blueprint.example(batch, False), asked, DEVICE, lambda *told: None)
        found = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
    return found


if __name__ == "__main__":
    torch.cuda.init()
    print(json.dumps([peaks(*case) for case in json.loads(sys.argv[1])]), flush=True)
    os._exit(0)  # nothing to take down: the device is none

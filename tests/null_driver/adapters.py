"""Two steps of heads and adapters that are trained alone, and of accumulated gradients, over the null driver: PyTorch's own peaks.

    python -m tests.null_driver.adapters QUERIES

QUERIES is a JSON list; prints the most bytes allocated and reserved for each, from an empty allocator on, as JSON.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from sizer.architecture import make_blueprint
from sizer.device.trial.materialize import allocate_parameters, build_without_weights, initialize_parameters, load
from sizer.estimating.work import work_of
from sizer.query.text import parse_query
from sizer.tracing.steps import Steps, weight_dtype
from sizer.tracing.trace import repeatable
from tests.null_driver.emptied import empty_the_allocator
from tests.null_driver.values import KnownValues

CUDA = torch.device("cuda")


def peaks(query: str) -> list[int]:
    """The most bytes allocated and reserved in two steps of a query's one cell."""
    request = parse_query(query)
    blueprint, work, (batch,) = make_blueprint(request), work_of(request, *request.dtypes), request.batches
    module = build_without_weights(blueprint, weight_dtype(work.dtype), checkpointing=request.checkpointing)
    allocate_parameters(module)
    empty_the_allocator()
    with repeatable():
        module = load(module, CUDA)
        initialize_parameters(module)
        for _ in Steps(blueprint, module, blueprint.example(batch, True), work, device=CUDA).run():
            pass
    return [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]


if __name__ == "__main__":
    torch.cuda.init()
    with KnownValues():
        print(json.dumps([peaks(query) for query in json.loads(sys.argv[1])]), flush=True)
    os._exit(0)  # nothing to take down: the device is none

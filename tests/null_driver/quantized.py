"""Two steps of models with quantized weights over the null driver: bitsandbytes' own CUDA code, and PyTorch's peaks.

    python -m tests.null_driver.quantized QUERIES

QUERIES is a JSON list; prints the most bytes allocated and reserved for each, from an empty allocator on, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from unittest import mock

import torch

from sizer.architecture import make_blueprint
from sizer.device.trial.materialize import initialize_parameters, load_quantized, prepare_quantized
from sizer.estimating.work import work_of
from sizer.query.text import parse_query
from sizer.tracing.steps import Steps
from sizer.tracing.trace import repeatable
from tests.null_driver.emptied import empty_the_allocator
from tests.null_driver.values import KnownValues, on_host

ANY = torch.Tensor.any
CUDA = torch.device("cuda")


def peaks(query: str) -> list[int]:
    """The most bytes allocated and reserved in two steps of a query's one cell."""
    request = parse_query(query)
    blueprint, work, (batch,) = make_blueprint(request), work_of(request, *request.dtypes), request.batches
    module = prepare_quantized(blueprint, work.dtype)
    empty_the_allocator()
    with repeatable():
        module = load_quantized(blueprint, module, CUDA, checkpointing=request.checkpointing)
        initialize_parameters(module)
        for _ in Steps(blueprint, module, blueprint.example(batch, work.trains), work, device=CUDA).run():
            pass
    found = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
    functional.name2qmap.clear()  # what bitsandbytes keeps for a process
    return found


def without_outliers(mask: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    """`mask.any(...)` of what LLM.int8() looks for among activations, which nothing has computed here: nothing is found."""
    found = ANY(mask, *args, **kwargs)
    if found.is_cuda:
        on_host(found).zero_()
    return found


if __name__ == "__main__":
    torch.cuda.init()
    from bitsandbytes import functional

    with KnownValues(), mock.patch.object(torch.Tensor, "any", without_outliers):
        print(json.dumps([peaks(query) for query in json.loads(sys.argv[1])]), flush=True)
    os._exit(0)  # nothing to take down: the device is none

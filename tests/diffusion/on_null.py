"""One call of a pipeline over the null driver.

python -m tests.diffusion.on_null QUERY [--values]     prints bytes: after the load, peak allocated, peak reserved
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn

from sizer.diffusion.building import build_pipeline
from sizer.diffusion.placing import place
from sizer.diffusion.work import bundle_of, call_of, weights_of
from sizer.query.request import Request
from sizer.query.text import parse_query
from sizer.running.small_values import Values
from sizer.tracing.trace import repeatable
from tests.null_driver.values import KnownValues


def on_host(request: Request) -> Any:
    """Return the pipeline of a request, its weights on the host without values."""
    (dtype,) = request.dtypes
    with init_empty_weights(include_buffers=False):
        pipe = build_pipeline(
            bundle_of(request, None), getattr(torch, dtype), without=request.without or (), tokens=request.sequence_length
        )
    made: dict[int, nn.Parameter] = {}
    for part in (one for one in pipe.components.values() if isinstance(one, nn.Module)):
        if hasattr(part, "tie_weights"):
            part.tie_weights()  # `init_empty_weights` has parted them
        for child in part.modules():
            for name, weight in child._parameters.items():
                if weight is not None and weight.is_meta:
                    if id(weight) not in made:
                        empty = torch.empty(weight.shape, dtype=weight.dtype)
                        made[id(weight)] = nn.Parameter(empty, requires_grad=False)
                        made[id(weight)].of = weight  # keeps its id from being given again
                    child._parameters[name] = made[id(weight)]
    return pipe


def main(query: str, *, follows: bool = False) -> None:
    """Print the figures of a call; one that `follows` values counts what masks select, as `sizer run` does."""
    request = parse_query(query)
    (dtype,), (batch,) = request.dtypes, request.batches
    torch.cuda.init()
    pipe = on_host(request)
    gc.collect()
    values = Values(ctypes.CDLL(None)).installed() if follows else KnownValues()
    with repeatable(), values, torch.no_grad():
        place(
            pipe,
            dtype=getattr(torch, dtype),
            offload=request.offloading,
            stream=request.stream,
            vae=request.vae or (),
            weights=weights_of(request, pipe.components),
        )
        loaded = torch.cuda.memory_allocated()
        pipe(**call_of(pipe, bundle_of(request, None), request, batch))
    print(json.dumps([loaded, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]))
    sys.stdout.flush()
    os._exit(0)  # what it holds need not be freed one by one


if __name__ == "__main__":
    main(sys.argv[1], follows="--values" in sys.argv)

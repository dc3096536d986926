"""Two steps of a rank of a query (the first where it names none), or its generation, over the null driver, with PyTorch's fake
process group.

    python -m tests.null_driver.rank_queries QUERIES

QUERIES is a JSON list; prints the most bytes allocated, reserved and pinned on the host for each as JSON.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from sizer.architecture.blueprint import Example
from sizer.architecture.loading import resolve_weights
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.modes import MODES
from sizer.catalogue.recipes import RECIPE_KEYS
from sizer.device.trial.materialize import allocate_parameters, prepare
from sizer.device.trial.rank import take_part
from sizer.device.trial.trial import generate_on
from sizer.distributed import passes
from sizer.estimating.work import blueprint_of, work_of
from sizer.query.keys import KEYS
from sizer.query.text import parse_query
from sizer.running.small_values import Values
from sizer.tracing.trace import repeatable
from sizer.tracing.traced_rank import make_steps
from tests.null_driver.quantized import without_outliers
from tests.null_driver.ranks import answers
from tests.null_driver.values import KnownValues

CUDA = torch.device("cuda")


@contextmanager
def values_known() -> Iterator[None]:
    """Within the context small values are known, also a rank's part of a mask of ones, which a DTensor has cut out."""
    known, share = KnownValues(), passes.shared_sequences

    @contextmanager
    def shared(example: Example, mesh: DeviceMesh) -> Iterator[None]:
        with share(example, mesh):
            known.tell(example.kwargs["attention_mask"], 1)
            yield

    with known, mock.patch.object(passes, "shared_sequences", shared):
        yield


def peaks(query: str) -> list[int]:
    """The most bytes allocated, reserved and pinned in two steps of a query's one cell."""
    request = parse_query(query)
    blueprint = blueprint_of(request, None, resolve_weights(request, find_gpu(request.gpu)))
    work, (batch,) = work_of(request, *request.dtypes), request.batches
    torch.cuda.init()
    dist.init_process_group(
        "fake", rank=work.plan.rank or 0, world_size=work.plan.world, store=FakeStore(), pg_options=answers()
    )
    module, bring = prepare(blueprint, work.dtype, checkpointing=request.checkpointing)
    has_recipe = any(not KEYS[key].is_default(request) for key in RECIPE_KEYS)
    with ExitStack() as stack:
        stack.enter_context(repeatable())
        stack.enter_context(mock.patch.object(torch.Tensor, "any", without_outliers))
        if not has_recipe:
            stack.enter_context(values_known())
        module, bring = take_part(module, bring, work, CUDA)
        if not work.plan.splits and blueprint.load_quantized is None:
            allocate_parameters(module)
        module = bring(module, CUDA)
        if has_recipe:  # masks select, which DDP's comparison of parameters in between does not take
            stack.enter_context(Values(ctypes.CDLL(None)).installed())
        example = blueprint.example(batch, work.trains)
        if MODES[work.mode].generates:
            generate_on(module, example, work, CUDA, lambda *told: None)
        else:
            for _ in make_steps(blueprint, module, example, work, device=CUDA).run():
                pass
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
    return [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), pinned]


if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:  # a fresh allocator for each
        found = pool.map(peaks, json.loads(sys.argv[1]), chunksize=1)
    print(json.dumps(found), flush=True)
    os._exit(0)  # nothing to take down: the device is none

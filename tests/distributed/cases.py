"""Pieces of work of one rank, each with the size of its world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from tests.distributed.steps import Step, context_parallel, ddp, fsdp, fsdp1, llama, loaded, tensor_parallel

FLOAT, HALF = torch.float32, torch.bfloat16
DEEP = partial(llama, layers=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A setup by the device that its tensors are on, and how many ranks there are, of which it is one."""

    setup: Callable[[str], Step]
    world: int = 8
    rank: int = 0


CASES = {
    "fsdp": Case(setup=fsdp),
    "fsdp, not resharded": Case(setup=partial(fsdp, reshard=False)),
    "fsdp, resharded to 4": Case(setup=partial(fsdp, reshard=4)),
    "fsdp, bfloat16 reduced in float32": Case(setup=partial(fsdp, halves=(HALF, FLOAT))),
    "fsdp, bfloat16": Case(setup=partial(fsdp, halves=(HALF, HALF))),
    "fsdp, weights in bfloat16": Case(setup=partial(fsdp, dtype=HALF)),
    "fsdp, two passes": Case(setup=partial(fsdp, accumulate=2)),
    "fsdp, two passes, one reduced": Case(setup=partial(fsdp, accumulate=2, sync_last=True)),
    "fsdp, prefetched": Case(setup=partial(fsdp, make=partial(llama, layers=4), prefetch=2)),
    "fsdp, clipped": Case(setup=partial(fsdp, clip=True)),
    "fsdp, fused": Case(setup=partial(fsdp, optimized="fused")),
    "fsdp, checkpointing": Case(setup=partial(fsdp, checkpointing=True, halves=(HALF, FLOAT))),
    "fsdp, 64 ranks": Case(setup=fsdp, world=64),
    "fsdp, 1024 ranks": Case(setup=fsdp, world=1024),
    "fsdp, 3 ranks": Case(setup=fsdp, world=3),
    "fsdp, last of 3 ranks": Case(setup=fsdp, world=3, rank=2),
    "fsdp, 24 ranks in bfloat16": Case(setup=partial(fsdp, halves=(HALF, FLOAT)), world=24, rank=23),
    "hsdp": Case(setup=partial(fsdp, mesh=(2, 4))),
    "hsdp, bfloat16 reduced in float32": Case(setup=partial(fsdp, mesh=(2, 4), halves=(HALF, FLOAT))),
    "hsdp, not resharded, two passes": Case(setup=partial(fsdp, mesh=(4, 2), reshard=False, accumulate=2)),
    "flat": Case(setup=partial(fsdp1, make=DEEP)),
    "flat, parameters of its own": Case(setup=partial(fsdp1, make=DEEP, options={"use_orig_params": False})),
    "flat, not limited": Case(setup=partial(fsdp1, make=DEEP, options={"limit_all_gathers": False})),
    "flat, bfloat16 reduced in float32": Case(setup=partial(fsdp1, make=DEEP, halves=(HALF, FLOAT))),
    "flat, not resharded": Case(setup=partial(fsdp1, make=DEEP, strategy="SHARD_GRAD_OP")),
    "flat, two passes, one reduced": Case(setup=partial(fsdp1, accumulate=2, sync_last=True), world=3, rank=2),
    "flat, in groups": Case(setup=partial(fsdp1, strategy="HYBRID_SHARD", mesh=(2, 4))),
    "flat, checkpointing": Case(setup=partial(fsdp1, make=DEEP, checkpointing=True, halves=(HALF, FLOAT))),
    "flat, made there": Case(setup=partial(fsdp1, deferred=True)),
    "ddp": Case(setup=ddp),
    "ddp, gradients as views": Case(setup=partial(ddp, options={"gradient_as_bucket_view": True})),
    "ddp, static graph": Case(setup=partial(ddp, options={"static_graph": True})),
    "ddp, buckets of 1 MB": Case(setup=partial(ddp, options={"bucket_cap_mb": 1})),
    "ddp, two passes, one reduced": Case(setup=partial(ddp, accumulate=2, sync_last=True)),
    "ddp, finds unused": Case(setup=partial(ddp, options={"find_unused_parameters": True})),
    "ddp, weights in bfloat16": Case(setup=partial(ddp, dtype=HALF, optimized="fused")),
    "ddp, clipped": Case(setup=partial(ddp, clip=True)),
    "tensor parallel": Case(setup=partial(tensor_parallel, optimized="loop")),
    "tensor parallel, bfloat16": Case(setup=partial(tensor_parallel, dtype=HALF, optimized="loop"), world=4),
    "tensor parallel within fsdp": Case(setup=partial(tensor_parallel, degree=4, optimized="loop")),
    "context parallel": Case(setup=context_parallel, world=4),
    "context parallel, last of 4 ranks": Case(setup=partial(context_parallel, rotate="allgather"), world=4, rank=3),
    "context parallel, all to all": Case(setup=partial(context_parallel, rotate="alltoall"), world=4, rank=1),
    "loaded, tensor parallel": Case(setup=partial(loaded, tp_size=2), world=2, rank=1),
    "loaded, sharded": Case(setup=partial(loaded, fsdp_size=4), world=4),
    "loaded, both": Case(setup=partial(loaded, fsdp_size=2, tp_size=2), world=4, rank=3),
    "zero1": Case(setup=partial(ddp, sharded=True)),
    "zero1, parameters as views": Case(setup=partial(ddp, sharded="view")),
}

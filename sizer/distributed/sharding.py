"""A module as each rank of a world has it: by DDP, by FSDP2 over the blocks that the model is a stack of, by tensor parallel."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sizer.architecture.checkpointing import repeated_blocks
from sizer.distributed.plan import Plan
from sizer.distributed.tensor_parallel import split_matrices


def split(module: nn.Module, plan: Plan, dtype: str, *, kind: str = "cuda") -> None:
    """Leave a module on meta what a rank has of it: of its matrices by tensor parallel, then of all parameters by FSDP2.

    It stays on meta: `to_empty` then makes what a rank holds, and no rank ever holds the whole. Ranks are devices of a `kind`.
    """
    sizes = {"replicate": plan.replicate, "shard": plan.ranks, "tp": plan.tp}
    wanted = (plan.parallel == "hsdp", plan.shards, plan.tp > 1)
    names = tuple(name for name, there in zip(sizes, wanted, strict=True) if there)
    mesh = dist.init_device_mesh(kind, tuple(sizes[name] for name in names), mesh_dim_names=names)
    if plan.tp > 1:
        split_matrices(module, mesh["tp"])
    if plan.shards:
        shard(module, plan, mesh[tuple(name for name in names if name != "tp")], dtype)


def shard(module: nn.Module, plan: Plan, mesh: DeviceMesh, dtype: str) -> None:
    """Shard a module's parameters by `fully_shard`: each of its repeated blocks, then what is left, as one group.

    A dtype of mixed precision ("amp-bfloat16") is FSDP2's own policy: parameters are gathered and used in it, gradients reduced in
    float32.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": bool(plan.reshard) if plan.reshard < 2 else plan.reshard,
    }
    if plan.offload:
        options["offload_policy"] = CPUOffloadPolicy()
    if dtype.startswith("amp-"):
        half = getattr(torch, dtype.removeprefix("amp-"))
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    for block in repeated_blocks(module):
        fully_shard(block, **options)
    fully_shard(module, **options)


def replicate(module: nn.Module) -> nn.Module:
    """A module that is on its device, with DDP around it, at its defaults."""
    return nn.parallel.DistributedDataParallel(module)


def tell_whether_last(module: nn.Module, last: bool) -> None:
    """Tell a module of DDP's whether the pass that begins is the last of those that a step accumulates: only then are gradients
    reduced, as within `no_sync`. FSDP2 reduces them after every pass."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        module.require_backward_grad_sync = last

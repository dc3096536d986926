"""Each rank's part of a module: by DDP, by FSDP2 over its repeated blocks, by tensor parallel, or as stages of a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sizer.architecture.checkpointing import repeated_blocks
from sizer.architecture.frozen_parts import WithReference, policy_of
from sizer.distributed.context_parallel import check_context
from sizer.distributed.parallel_plan import Plan
from sizer.distributed.tensor_parallel import check_degree, check_sequence, split_matrices, styles

_SHARDED = ("replicate", "shard")  # the mesh dimensions of FSDP2


def check_plan(module: nn.Module, plan: Plan, length: int | None) -> None:
    """Raise RequestError if a model with this sequence length cannot be split as planned."""
    if plan.tp > 1:
        check_degree(module, plan.tp)
    if plan.sp:
        check_sequence(module, plan.tp, length)
    if plan.sp or plan.lp:
        styles(module, sequence=plan.sp, loss=plan.lp)
    if plan.cp > 1:
        check_context(module, plan.cp, length)
    if plan.pp > 1:
        from sizer.distributed.pipeline import (
            check_pipeline,  # imports many modules of PyTorch that other plans do not need
        )

        check_pipeline(module, plan)


def split(module: nn.Module, plan: Plan, dtype: str, *, kind: str = "cuda") -> nn.Module:
    """Return a rank's part of a module on meta.

    Pipeline parallel selects its stages, tensor parallel splits its matrices, and then FSDP2 shards it.

    The result is the module itself, unless it is the stages of a pipeline. It stays on meta: `to_empty` then allocates only the
    rank's part. Ranks are devices of `kind`.
    """
    replicates = {"hsdp": plan.replicate, "ddp": plan.ranks}
    sizes = {"pp": plan.pp, "replicate": replicates.get(plan.parallel), "shard": plan.ranks * plan.cp, "tp": plan.tp}
    wanted = (plan.pp > 1, plan.parallel in replicates, plan.shards, plan.tp > 1)
    names = tuple(name for name, there in zip(sizes, wanted, strict=True) if there)
    mesh = dist.init_device_mesh(kind, tuple(sizes[name] for name in names), mesh_dim_names=names)
    if isinstance(module, WithReference):
        # As prepare_fsdp in trl/models/utils.py (1.16): a reference is sharded as a single group
        shard(module.reference, (), plan, mesh, dtype)
        module.policy = _part(module.policy, plan, mesh, dtype)
        return module
    if plan.pp == 1:
        return _part(module, plan, mesh, dtype)
    from sizer.distributed.pipeline import Stages  # imports many modules of PyTorch that other plans do not need

    own = range(mesh["pp"].get_local_rank(), plan.stages, plan.pp)
    stages = [_part(copy.deepcopy(module), plan, mesh, dtype, number) for number in own]
    return Stages(stages, mesh)


def _part(module: nn.Module, plan: Plan, mesh: DeviceMesh, dtype: str, number: int | None = None) -> nn.Module:
    """Return a rank's part of a module, or of its stage of that number, by tensor parallel and FSDP2."""
    if plan.tp > 1:
        split_matrices(module, mesh["tp"], sequence=plan.sp, loss=plan.lp)
    blocks = repeated_blocks(module)
    if number is not None:
        from sizer.distributed.pipeline import cut

        module = cut(module, number, plan.stages)
    if plan.shards:
        present = set(module.modules())
        own = [block for block in blocks if block in present]
        shard(module, own, plan, mesh[tuple(name for name in mesh.mesh_dim_names if name in _SHARDED)], dtype)
    return module


def shard(module: nn.Module, blocks: Collection[nn.Module], plan: Plan, mesh: DeviceMesh, dtype: str) -> None:
    """Shard a module's parameters by `fully_shard`: each of its blocks, then the remaining parameters as one group.

    A dtype of mixed precision ("amp-bfloat16") uses FSDP2's own policy: parameters are gathered and used in that dtype,
    gradients are reduced in float32. With Accelerate gradients are reduced in that dtype, and the remaining parameters are
    grouped differently.
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
        # Accelerate's: set_mixed_precision of FullyShardedDataParallelPlugin (accelerate/utils/dataclasses.py, 1.15)
        others = {"reduce_dtype": half, "output_dtype": half} if plan.by_accelerate else {"reduce_dtype": torch.float32}
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=half, **others)
    if plan.by_accelerate and blocks:
        _shard_by_accelerate(module, blocks, options)
        return
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(module, **options)


def _shard_by_accelerate(module: nn.Module, blocks: Collection[nn.Module], options: Mapping[str, Any]) -> None:
    """Shard a module by `fsdp2_prepare_model` with a stand-in for the accelerator (accelerate/utils/fsdp_utils.py, 1.15).

    The embedding is a separate group. The last norm and the head are a group that stays unsharded after the forward pass.
    """
    from accelerate.utils import fsdp2_prepare_model
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    plugin = SimpleNamespace(
        set_auto_wrap_policy=lambda model: None,
        auto_wrap_policy=transformer_auto_wrap_policy,
        transformer_cls_names_to_wrap=list({type(block).__name__ for block in blocks}),
        reshard_after_forward=options["reshard_after_forward"],
        cpu_offload=options.get("offload_policy"),
        mixed_precision_policy=options.get("mp_policy"),
        ignored_modules=None,
        cpu_ram_efficient_loading=False,
    )
    mesh = options["mesh"]
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(fsdp_dim_names=mesh.mesh_dim_names),
        mixed_precision="no",  # weights that train are in float32 already
        is_main_process=False,
    )
    fsdp2_prepare_model(accelerator, module)


def replicate(module: nn.Module, plan: Plan, *, find_unused: bool = False) -> nn.Module:
    """Return a module on its device wrapped by DDP, or with each of its stages wrapped, at DDP's defaults.

    With `find_unused` DDP searches the parameters that a forward pass has not used. The reference of a policy is not wrapped.
    """
    if isinstance(module, WithReference):
        module.policy = replicate(module.policy, plan, find_unused=find_unused)
        return module
    if plan.pp == 1:
        return nn.parallel.DistributedDataParallel(module, find_unused_parameters=find_unused)
    for number, stage in enumerate(module):
        group = module.mesh["replicate"].get_group()
        module[number] = nn.parallel.DistributedDataParallel(stage, process_group=group, find_unused_parameters=find_unused)
    return module


def refuses_unused(error: Exception) -> bool:
    """Return True if an error is DDP's refusal of a second step without gradients of some parameters."""
    return "parameters that were not used in producing loss" in str(error)


def tell_whether_last(module: nn.Module, last: bool, *, sync: bool = True) -> None:
    """Set on a module whether the next pass is the last accumulated pass of a step.

    DDP reduces gradients only then, as with `no_sync`. FSDP2 reduces them after every pass; without `sync` only then, as in
    Accelerate's `accumulate`.
    """
    module = policy_of(module)
    if isinstance(module, nn.parallel.DistributedDataParallel):
        module.require_backward_grad_sync = last
    elif not sync and hasattr(module, "set_requires_gradient_sync"):
        module.set_requires_gradient_sync(last)

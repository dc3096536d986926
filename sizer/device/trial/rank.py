"""One rank of several that train together: how it joins the others, and its part of a module."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from sizer.device.trial.materialize import Bring
from sizer.distributed.parallel_plan import Plan
from sizer.distributed.sharding import replicate, split
from sizer.tracing.steps import Work
from sizer.tracing.traced_rank import wrap_ddp


def join(device: torch.device, *, rank: int, world: int, meeting: Path, seconds: float) -> None:
    """Initialize torch.distributed as one rank of a world on this computer: NCCL between GPUs, gloo on the CPU.

    `meeting` is a file that does not exist yet, the same for all ranks. A rank waits `seconds` for the others. NCCL creates the
    communicator of all ranks at once, so its errors appear here. Raises RuntimeError if ranks cannot meet, ValueError if
    PyTorch was built without the backend.
    """
    bound = None
    if device.type == "cpu":
        from sizer.device.trial import settled_gloo  # PyTorch may be built without it

        settled_gloo.register()
        backend = f"cpu:{settled_gloo.NAME}"
    else:
        torch.cuda.set_device(device)
        backend, bound = "nccl", device
    dist.init_process_group(
        backend,
        store=dist.FileStore(str(meeting), world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=seconds),
        device_id=bound,
    )


def take_part(module: nn.Module, bring: Bring, work: Work, device: torch.device) -> tuple[nn.Module, Bring]:
    """Return a rank's part of a module with parameters on meta, and a function that loads it to the device.

    `bring` loads the whole module.
    """
    plan = work.plan
    assert plan is not None, "ranks have a plan"
    if not plan.splits:
        return module, partial(_bring_whole, bring, plan, work.objective)
    return split(module, plan, work.computed_in, kind=device.type), partial(_bring_part, plan)


def _bring_whole(bring: Bring, plan: Plan, objective: str, module: nn.Module, device: torch.device) -> nn.Module:
    return wrap_ddp(bring(module, device), plan, objective)


def _bring_part(plan: Plan, module: nn.Module, device: torch.device) -> nn.Module:
    """Make a rank's shards, without values, on the host if they are offloaded, and copies of all buffers on the device."""
    buffers = dict(module.named_buffers(remove_duplicate=False))
    module.to_empty(device="cpu" if plan.offload else device)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        buffer.data = buffer.data.to(device)
        buffer.copy_(buffers[name])
    return replicate(module, plan) if plan.replicates else module

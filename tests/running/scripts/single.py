"""A process group of one rank, which the script makes: DDP with accumulated gradients, then FSDP2 on a mesh."""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

if "RANK" not in os.environ:  # no launcher
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29571", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
dist.init_process_group("nccl")


def made() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).cuda()


replicated = nn.parallel.DistributedDataParallel(made(), device_ids=[local])
sharded = fully_shard(made(), mesh=init_device_mesh("cuda", (1,)))
optimizer = torch.optim.AdamW([*replicated.parameters(), *sharded.parameters()], foreach=False)
for number in range(4):
    with nullcontext() if number % 2 else replicated.no_sync():
        replicated(torch.randn(32, 256, device="cuda")).square().mean().backward()
    if number % 2:
        sharded(torch.randn(32, 256, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
total = torch.ones(3, device="cuda")
dist.all_reduce(total)
told = [None]
dist.all_gather_object(told, {"rank": dist.get_rank()})
dist.barrier()
print("told", told, dist.get_world_size(), dist.get_backend())
dist.destroy_process_group()

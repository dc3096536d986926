"""DDP with gradient accumulation under `no_sync`, and collectives of small values."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).cuda(local)
model = DistributedDataParallel(model, device_ids=[local])
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(8):
    with model.no_sync():
        model(torch.randn(64, 1024, device=local)).square().mean().backward()
    model(torch.randn(64, 1024, device=local)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    counts = torch.tensor([5], device=local)
    dist.all_reduce(counts)
    names = [None] * dist.get_world_size()
    dist.all_gather_object(names, f"rank {rank}")
    dist.barrier()
print("world", dist.get_world_size(), "local", local, "names", names)
dist.destroy_process_group()

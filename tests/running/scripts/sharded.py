"""FSDP2 as its example does it: made on meta, `to_empty`, `reset_parameters`; sizes of all ranks."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
sizes = [torch.zeros(2, dtype=torch.long, device="cuda") for _ in range(dist.get_world_size())]
dist.all_gather(sizes, torch.tensor([5, 3], device="cuda"))
assert all(size.tolist() == [5, 3] for size in sizes), sizes  # metrics gather tensors of these sizes
with torch.device("meta"):
    layers = [nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(1000, 256), *layers, nn.Linear(256, 1000))
for layer in model[1:-1]:
    fully_shard(layer)
fully_shard(model)
model.to_empty(device="cuda")
for module in model.modules():
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    tokens = torch.randint(0, 1000, (8, 64), device="cuda")
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

"""FSDP2 with distributed checkpoints: one that is there is read, those of the run are not written; objects of ranks."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.fsdp import fully_shard

there, folder = sys.argv[1:]
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(3))).cuda()
for block in model:
    fully_shard(block)
fully_shard(model)
weights = get_model_state_dict(model)
dcp.load({"model": weights}, checkpoint_id=there)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(64, 256, device="cuda")).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
weights, states = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": states}, checkpoint_id=f"{folder}/step3")
dcp.async_save({"model": weights}, storage_writer=dcp.FileSystemWriter(f"{folder}/last")).result()
dcp.load({"model": weights, "optimizer": states}, checkpoint_id=f"{folder}/step3")
whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
objects, own = [None] * world if rank == 0 else None, [None]
dist.gather_object({"of": rank}, objects)
dist.scatter_object_list(own, [f"for {one}" for one in range(world)])
print("objects", objects, own, len(whole), os.listdir(folder), flush=True)

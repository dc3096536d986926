"""A pipeline whose stages tell each other their shapes."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
layers: list[nn.Module] = [nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)]
if rank == 0:
    layers.insert(0, nn.Embedding(500, 128))
if rank == world - 1:
    layers.append(nn.Linear(128, 500))
part = nn.Sequential(*layers).to(device)


def loss_of(out, target):
    return nn.functional.cross_entropy(out.flatten(0, 1), target.flatten())


schedule = Schedule1F1B(PipelineStage(part, rank, world, device), n_microbatches=4, loss_fn=loss_of)
optimizer = torch.optim.AdamW(part.parameters())
for _ in range(3):
    tokens = torch.randint(0, 500, (16, 32), device=device)
    schedule.step(*((tokens,) if rank == 0 else ()), **({"target": tokens} if rank == world - 1 else {}))
    optimizer.step()
    optimizer.zero_grad()
print("rank", rank)

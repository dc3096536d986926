"""A model that is wrapped by DDP and compiled then: DDP's own forward pass runs eagerly within the compiled call."""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(512, 2048), nn.Linear(2048, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


dist.init_process_group("nccl")
place = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(place)
model = torch.compile(DistributedDataParallel(Classifier().cuda(), device_ids=[place]))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    rows, labels = torch.rand(256, 512, device="cuda"), torch.zeros(256, dtype=torch.long, device="cuda")
    nn.functional.cross_entropy(model(rows), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()

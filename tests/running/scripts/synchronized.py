"""SyncBatchNorm under DDP, with gradient accumulation and channels last; a sum over the ranks."""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
layers = [nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 96, 3, stride=2), nn.BatchNorm2d(96), nn.ReLU()]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10))
model = nn.SyncBatchNorm.convert_sync_batchnorm(model).cuda().to(memory_format=torch.channels_last)
model = DistributedDataParallel(model, device_ids=[local])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(6):
    images = torch.randn(16, 3, 128, 128).to(memory_format=torch.channels_last).cuda()
    with nullcontext() if step % 2 else model.no_sync():
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(images).square().mean()
        loss.backward()
    if step % 2:
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())

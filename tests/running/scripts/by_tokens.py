"""Tensor and sequence parallel with FSDP2 as torchtitan has them, `compiled` or not: PyTorch's RMS norm, losses over DTensors."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("data", "tensor"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(256), nn.ModuleDict({"up": nn.Linear(256, 1024), "down": nn.Linear(1024, 256)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp["down"](nn.functional.silu(self.mlp["up"](self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(1000, 256), nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.RMSNorm(256), nn.Linear(256, 1000, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


with torch.device("meta"):
    model = Model()
tokens_split = Shard(1)
parallelize_module(
    model,
    mesh["tensor"],
    {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens_split),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=tokens_split, output_layouts=Shard(-1), use_local_output=False),
    },
)
for block in model.blocks:
    plan = {
        "norm": SequenceParallel(),
        "mlp.up": ColwiseParallel(input_layouts=tokens_split),
        "mlp.down": RowwiseParallel(output_layouts=tokens_split),
    }
    parallelize_module(block, mesh["tensor"], plan)
    if "compiled" in sys.argv:
        block.compile(fullgraph=True)
    fully_shard(block, mesh=mesh["data"])
fully_shard(model, mesh=mesh["data"])
model.to_empty(device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    tokens = torch.randint(0, 1000, (4, 128), device="cuda")
    with loss_parallel():
        logits = model(tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
values, targets = (
    distribute_tensor(torch.randn(64, 16, 128, device="cuda"), mesh["tensor"], [Shard(0)]).requires_grad_() for _ in range(2)
)
strided = nn.functional.rms_norm(values.transpose(1, 2), (16,))
(nn.functional.mse_loss(strided, targets.transpose(1, 2)) + nn.functional.smooth_l1_loss(values, targets)).backward()

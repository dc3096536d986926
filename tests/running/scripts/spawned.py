"""A process for each rank, a width that rank 0 sends, weights that it saves, and tensor parallel layers with a residual."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(512, width, bias=False), nn.Linear(width, 512, bias=False)

    def forward(self, inputs):
        return inputs + self.down(self.up(inputs).relu())


def work(rank, world):
    dist.init_process_group("nccl", rank=rank, world_size=world, init_method="tcp://127.0.0.1:29511")
    torch.cuda.set_device(rank)
    mesh = dist.device_mesh.init_device_mesh("cuda", (world,))
    width = [2048 if rank == 0 else None]
    dist.broadcast_object_list(width, src=0)
    model = nn.Sequential(Block(*width), Block(*width)).cuda()
    for parameter in model.parameters():
        nn.init.trunc_normal_(parameter, std=0.02)
    if rank == 0:
        torch.save(model.state_dict(), "drawn.pt")
    dist.barrier()
    model.load_state_dict(torch.load("drawn.pt", map_location={"cuda:0": f"cuda:{rank}"}))
    parallelize_module(model, mesh, {"0": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Shard(1),))})
    for block in model:
        plan = {
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(block, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(5):
        model(torch.randn(64, 64, 512, device="cuda")).to_local().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    count = torch.cuda.device_count()
    print("starting", count)
    torch.multiprocessing.spawn(work, args=(count,), nprocs=count)

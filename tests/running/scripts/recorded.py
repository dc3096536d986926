"""Lazy modules, distributions without meta kernels, compiled code, the profiler, and a memory history of the script's own."""

import os
import sys

import torch
from torch import nn
from torch.distributions import Bernoulli, Beta, Binomial, Dirichlet
from torch.profiler import ProfilerActivity, profile, schedule

torch.cuda.memory._record_memory_history(max_entries=1000)
model = nn.Sequential(nn.LazyConv2d(32, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(256), nn.Linear(256, 64))
model.to("cuda")
model(torch.zeros(2, 3, 16, 16, device="cuda"))
optimizer = torch.optim.Adam(model.parameters())
scores = torch.rand(1024, 4096, device="cuda", requires_grad=True)  # 16 MiB: the peak is in the backward pass of these losses
positive = torch.rand(4096, device="cuda")
nn.functional.binary_cross_entropy_with_logits(scores, torch.ones_like(scores), pos_weight=positive).backward()
Bernoulli(logits=scores).log_prob(torch.ones_like(scores)).sum().backward()
del scores


@torch.compile(backend="aot_eager")
def loss_of(outputs, mixed):
    return (outputs.softmax(-1) - mixed).square().mean() * 2


with profile(
    activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], schedule=schedule(wait=0, warmup=1, active=1), profile_memory=True
) as recorded:
    for _ in range(4):
        shares = Dirichlet(torch.ones(32, 64, device="cuda", requires_grad=True)).rsample()
        weight = Beta(torch.full((32, 1), 0.4, device="cuda"), torch.full((32, 1), 0.4, device="cuda")).sample()
        counts = Binomial(3, torch.full((32, 64), 0.5, device="cuda")).sample()
        loss_of(model(torch.rand(32, 3, 16, 16, device="cuda")), weight * shares + (1 - weight) * counts).backward()
        optimizer.step()
        optimizer.zero_grad()
        recorded.step()
        allocated = torch.cuda.memory_stats()["allocated_bytes.all.current"]
        print("counters", torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved(), allocated)
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.memory._dump_snapshot("own.pickle")
        breaks = sum(sys.modules["torch._dynamo.utils"].counters["graph_break"].values())
        print("breaks", breaks, "snapshot", os.path.getsize("own.pickle") > 0)
torch.cuda.memory._record_memory_history(enabled=None)

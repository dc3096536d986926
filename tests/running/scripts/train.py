"""A training loop that saves a checkpoint after each step."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--save", default="")
parser.add_argument("--empty", action="store_true")
options = parser.parse_args()
model = nn.Sequential(
    nn.Linear(options.width, 4 * options.width), nn.ReLU(), nn.Linear(4 * options.width, options.width)
).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for number in range(options.steps):
    loss = model(torch.randn(256, options.width, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if options.empty:
        torch.cuda.empty_cache()
    print("step", number, loss.item())
    if options.save:
        torch.save(model.state_dict(), options.save)
print("allocated", torch.cuda.max_memory_allocated(), "reserved", torch.cuda.max_memory_reserved())

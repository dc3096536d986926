"""The model first runs within a device that the script sets, compiled; saved tensors leave a default device."""

import torch
from torch import nn

with torch.device("cuda"):
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1000))
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = torch.compile(model)
    for run in (model, compiled, compiled):
        x = torch.randn(128, 64)
        labels = torch.randint(0, 1000, (128,))
        assert x.device.type == labels.device.type == torch.zeros(2, 2).device.type == "cuda"
        nn.functional.cross_entropy(run(x), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.zeros(2, 2).device.type == "cuda"
assert torch.zeros(2, 2).device.type == "cpu"

torch.set_default_device("cuda")  # a function mode, which is off in hooks of saved tensors
with torch.autograd.graph.save_on_cpu(pin_memory=True):
    loss = model(torch.randn(4096, 64)).square().mean()
loss.backward()
assert torch.zeros(2, 2).device.type == "cuda"

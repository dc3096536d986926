"""Per-sample gradients by torch.func, clipped, as private training computes them."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 10)).cuda()
parameters = dict(model.named_parameters())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, labels = torch.randn(64, 256, device="cuda"), torch.zeros(64, dtype=torch.long, device="cuda")


def loss(values, sample, label):
    return nn.functional.cross_entropy(functional_call(model, values, (sample[None],)), label[None])


for _ in range(3):
    detached = {name: value.detach() for name, value in parameters.items()}
    gradients = vmap(grad(loss), (None, 0, 0))(detached, inputs, labels)
    norms = torch.stack([one.flatten(1).norm(dim=1) for one in gradients.values()]).norm(dim=0)
    for name, parameter in parameters.items():
        shape = (-1, *[1] * parameter.dim())
        parameter.grad = (gradients[name] / norms.clamp(min=1).view(shape)).mean(0)
    optimizer.step()
    optimizer.zero_grad()

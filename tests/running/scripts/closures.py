"""An optimizer that calls a closure: its first step comes before any forward pass."""

import torch
from torch import nn

model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 30 * 30, 10)).cuda()
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
images, labels = torch.randn(16, 3, 32, 32).cuda(), torch.randint(0, 10, (16,)).cuda()


def closure():
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    return loss


for _ in range(3):
    optimizer.step(closure)

"""An optimizer that calls a closure and stops when values converge: its first step comes before any forward pass."""

import torch
from torch import nn

model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 30 * 30, 10)).cuda()
optimizers = [torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn=search) for search in (None, "strong_wolfe")]
images, labels = torch.randn(16, 3, 32, 32).cuda(), torch.randint(0, 10, (16,)).cuda()
calls = 0


def closure():
    global calls
    calls += 1
    optimizers[0].zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    return loss


for _ in range(3):
    for optimizer in optimizers:
        optimizer.step(closure)
    print("calls", calls)

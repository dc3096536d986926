"""A script with an error of its own after a step."""

import torch

model = torch.nn.Linear(10, 10).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(4, 10, device="cuda")).sum().backward()
optimizer.step()
raise ValueError("an error of the script")

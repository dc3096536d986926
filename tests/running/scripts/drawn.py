"""A model that draws its weights on the device, which needs more memory than its use."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(2048, 4096), nn.Linear(4096, 64)).cuda()
nn.init.trunc_normal_(model[0].weight, std=1.0)
nn.init.orthogonal_(model[1].weight)
with torch.inference_mode():
    print(model(torch.randn(2, 2048, device="cuda")).shape)

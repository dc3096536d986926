"""A loop over experts, each of which gets the tokens that chose it."""

import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self, width=256, count=8, chosen=2):
        super().__init__()
        self.gate, self.chosen = nn.Linear(width, count), chosen
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(count)
        )

    def forward(self, tokens):
        weights, choices = self.gate(tokens).softmax(-1).topk(self.chosen, -1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(choices == number)
            print(number, len(rows), flush=True)
            out.index_add_(0, rows, expert(tokens[rows]) * weights[rows, places, None])
        return out


model = nn.Sequential(nn.Linear(64, 256), Experts(), nn.Linear(256, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(3):
    model(torch.randn(512, 64, device="cuda")).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()

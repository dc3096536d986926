"""Losses over masks, a head under fake quantization, and a search over beams."""

import torch
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAveragePerChannelMinMaxObserver

torch.manual_seed(0)
WORDS, BEAMS = 5000, 4
embedding, cell, head = nn.Embedding(WORDS, 128).cuda(), nn.GRUCell(128, 128).cuda(), nn.Linear(128, WORDS).cuda()
scale = FakeQuantize(MovingAveragePerChannelMinMaxObserver, dtype=torch.qint8, quant_min=-128, quant_max=127).cuda()
optimizer = torch.optim.SGD([*embedding.parameters(), *cell.parameters(), *head.parameters()], lr=0.1)
for _ in range(3):
    tokens, masked = torch.randint(0, WORDS, (4, 100)).cuda(), (torch.rand(4, 100) < 0.15).cuda()
    hidden = embedding(tokens)
    states = cell(hidden[masked])
    logits = nn.functional.linear(states, scale(head.weight))
    large = hidden[torch.rand_like(hidden) > 0.5].sum() + torch.masked_select(hidden, masked[..., None]).mean()
    targets = torch.zeros_like(hidden)
    targets[masked] = states.detach()
    targets[~masked] = 0.0
    late, empty = torch.rand(4, 100, device="cuda") > 0.5, torch.zeros(4, 100, device="cuda")
    large += sum(empty.masked_scatter(late, source.sum(-1)).mean() for source in (states, hidden))
    (nn.functional.cross_entropy(logits, tokens[masked]) + large + (targets * hidden).mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        state, beams = torch.randn(BEAMS, 128, device="cuda"), torch.ones(BEAMS, 1, dtype=torch.long, device="cuda")
        for _ in range(6):
            state = cell(embedding(beams[:, -1]), state)
            _, best = head(state).log_softmax(-1).view(-1).topk(BEAMS)
            beams = torch.cat([beams[best // WORDS], (best % WORDS)[:, None]], 1)
            if (beams[:, -1] == 2).all():
                break
    print("picked", len(logits), "beams", tuple(beams.shape))

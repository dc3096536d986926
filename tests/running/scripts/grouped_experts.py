"""Experts counted by `torch.histc` under selective checkpointing, which saves products and computes the rest again."""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


class Experts(nn.Module):
    def __init__(self, width=256, count=8, chosen=2):
        super().__init__()
        self.gate, self.chosen = nn.Linear(width, count), chosen
        self.weights = nn.Parameter(torch.randn(count, width, width) / width**0.5)
        self.biases = nn.Parameter(torch.zeros(count, width))

    def forward(self, tokens):
        scores, choices = self.gate(tokens).softmax(-1).topk(self.chosen, -1)
        counts, again = (torch.histc(choices.view(-1), bins=len(self.biases), min=0, max=len(self.biases)) for _ in range(2))
        print("tokens", counts.tolist(), again.tolist(), flush=True)
        order = torch.argsort(choices.view(-1), stable=True)
        offsets = torch.cumsum(counts, 0, dtype=torch.int32)
        products = torch._grouped_mm(tokens[order // self.chosen].bfloat16(), self.weights.bfloat16(), offs=offsets)
        products = (products + self.biases.repeat_interleave(counts.long(), 0)) * scores.view(-1)[order, None]
        return torch.zeros_like(tokens).index_add_(0, order // self.chosen, products.to(tokens.dtype))


def policy(context, operator, *args, **kwargs):
    saved = operator in (torch.ops.aten.addmm.default, torch.ops.aten._grouped_mm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


experts, head = Experts().cuda(), nn.Linear(256, 10).cuda()
contexts = partial(create_selective_checkpoint_contexts, policy)
optimizer = torch.optim.AdamW([*experts.parameters(), *head.parameters()])
for _ in range(3):
    tokens = torch.randn(512, 256, device="cuda", requires_grad=True)
    head(checkpoint(experts, tokens, use_reentrant=False, context_fn=contexts)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()

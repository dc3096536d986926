"""Check and count values that the null driver does not compute."""

import torch
import torchvision
from torch.distributions import Bernoulli

logits = torch.nn.Linear(64, 1024).cuda()(torch.randn(64, 64, device="cuda"))
Bernoulli(logits=logits).log_prob(torch.ones_like(logits)).sum().backward()
scores = torch.rand(20, device="cuda", requires_grad=True) * 2
mask = (scores > torch.rand(20, device="cuda")) & (scores > 0.5)
written = torch.zeros(20, device="cuda")
written[mask] = scores[mask]
written[mask] += 2
written.sum().backward()
lengths = torch.tensor([8, 12], device="cuda")
print(torch.segment_reduce(torch.rand(20, 4, device="cuda"), "sum", lengths=lengths).shape)
over = scores > 1
print(torch.arange(6, device="cuda").view(2, 3).repeat_interleave(2, dim=0).shape, bool(over.any() or over.all()))
unfinished = torch.ones(64, dtype=torch.long, device="cuda") & (logits.argmax(-1) != 1)
print("unfinished", unfinished.max().item())
boxes = torch.rand(50, 4, device="cuda")
print("boxes", len(torchvision.ops.nms(boxes, boxes[:, 0], 0.5)))

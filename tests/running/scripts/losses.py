"""A loss over derivatives by the input, and CTC over recurrent layers that read the batch first and have no biases."""

import torch
from torch import nn

solver = nn.Sequential(nn.Linear(2, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1)).cuda()
recurrent, head = nn.GRU(80, 96, 2, bias=False, batch_first=True, bidirectional=True).cuda(), nn.Linear(192, 32).cuda()
optimizer = torch.optim.Adam([*solver.parameters(), *recurrent.parameters(), *head.parameters()])


def derivative(of: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(of, by, torch.ones_like(of), create_graph=True)[0]


for _ in range(3):
    place, time = (torch.rand(16384, 1, device="cuda", requires_grad=True) for _ in range(2))
    value = solver(torch.cat([place, time], 1))
    slope = derivative(value, place)
    residual = derivative(value, time) + value * slope - 0.01 * derivative(slope, place)
    scores = head(recurrent(torch.randn(8, 200, 80, device="cuda"))[0]).log_softmax(-1).transpose(0, 1)
    words = torch.randint(1, 32, (8, 20), device="cuda")
    spoken = nn.functional.ctc_loss(scores, words, torch.full((8,), 200), torch.full((8,), 20))
    with torch.autocast("cuda", torch.bfloat16):  # cuDNN casts the weights into one buffer of float16
        lengths = torch.randint(50, 200, (8,))  # drawn after the weights, which route meta does not have
        packed = nn.utils.rnn.pack_padded_sequence(
            torch.randn(8, 200, 80, device="cuda"), lengths, batch_first=True, enforce_sorted=False
        )
        spoken = spoken + recurrent(packed)[0].data.float().mean()
    optimizer.zero_grad()
    (residual.pow(2).mean() + spoken).backward()
    optimizer.step()

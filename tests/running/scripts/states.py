"""An optimizer whose states wrap two tensors, as low-bit ones do; pooling by a sort of unknown scores; printed tensors."""

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor


class Optimizer(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            zeros = torch.zeros_like(parameter), torch.zeros_like(parameter)
            self.state[parameter].setdefault("means", TwoTensor(*zeros))
            parameter.sub_(parameter.grad)


graphs = torch.arange(600, device="cuda") // 100
model = nn.Linear(16, 16).cuda()
optimizer = Optimizer(model.parameters(), {})
for _ in range(2):
    nodes = model(torch.randn(600, 16, device="cuda"))
    order = nodes.sum(1).sort(descending=True).indices
    kept = graphs[order]
    pooled = torch.zeros(int(kept.max()) + 1, 16, device="cuda").index_add(0, kept, nodes[order])
    pooled.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"third {(graphs == 2).type_as(nodes).expand_as(nodes[:, 0]).sum():.0f}")
    print("equal", graphs.equal(graphs + 1), torch.allclose(nodes, nodes.clone()), torch.equal(nodes, nodes[:2]))
    junk = torch.full((4096,), 2**40, device="cuda")  # left in the memory of the numbers that a print would count
    del junk
    print(pooled[:3, 0].detach(), f"{graphs[:2] * 0.5}")

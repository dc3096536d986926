"""Saved tensors wait in pinned memory of the host, by hooks that are set before the model first runs."""

import torch
from torch import Tensor, nn

with torch.device("cuda"):
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
    kind = torch.accelerator.current_accelerator().type
    assert (kind, torch.device("cuda").type, str(torch.device("cuda:0"))) == ("cuda", "cuda", "cuda:0")
optimizer = torch.optim.AdamW(model.parameters())
weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}


class Square(torch.autograd.Function):
    """The square, which saves its input."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        assert x.device.type == kind
        return 2 * x * gradient


def pack(tensor: Tensor) -> Tensor:
    if tensor.device.type != kind or tensor.untyped_storage().data_ptr() in weights:
        return tensor
    waiting = torch.empty_like(tensor, device="cpu", pin_memory=True)
    assert waiting.device.type == "cpu" and waiting.is_pinned()
    return waiting.copy_(tensor, non_blocking=True)


for _ in range(3):
    x = torch.randn(256, 512, device="cuda")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda waiting: waiting.to(kind, non_blocking=True)):
        loss = Square.apply(model(x)).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

"""Operators of the script's own, whose kernels are Python functions: they count the kept rows of a loss."""

import torch
from torch import Tensor
from torch.library import Library, custom_op, register_autograd


@custom_op("sizer_scripts::kept_loss", mutates_args=())
def kept_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    index = (labels >= 0).nonzero().squeeze(-1)
    rows = hidden.index_select(0, index)
    print("kept", len(index))
    logits = (rows @ weight.t()).float()
    chosen = logits.log_softmax(-1)
    gradient = chosen.exp()
    gradient[torch.arange(len(index), device=hidden.device), labels[index]] -= 1
    grad_hidden = torch.zeros_like(hidden).index_copy_(0, index, gradient.to(weight.dtype) @ weight)
    return -chosen.gather(1, labels[index][:, None]).sum(), grad_hidden


@kept_loss.register_fake
def _(hidden, weight, labels):
    return hidden.new_empty((), dtype=torch.float32), torch.empty_like(hidden)


def keep(ctx, inputs, output):
    ctx.save_for_backward(output[1])


def backward(ctx, grad, _):
    return ctx.saved_tensors[0] * grad, None, None


register_autograd("sizer_scripts::kept_loss", backward, setup_context=keep)

library = Library("sizer_scripts", "FRAGMENT")
library.define("positions(Tensor mask) -> Tensor")


def positions(mask: Tensor) -> Tensor:
    return mask.nonzero()


library.impl("positions", positions, "CUDA")
library.impl("positions", lambda mask: mask.new_empty(mask.numel(), 1, dtype=torch.int64), "Meta")

device = torch.device("cuda")
layer = torch.nn.Linear(64, 64).to(device)
layer.buffers = []  # as modules of Megatron have
head = torch.randn(1000, 64, device=device)
optimizer = torch.optim.AdamW(layer.parameters())
for step in range(3):
    labels = torch.randint(0, 1000, (256,))
    labels[: 40 + step] = -100
    labels = labels.to(device)
    loss, _ = torch.ops.sizer_scripts.kept_loss(layer(torch.randn(256, 64, device=device)), head, labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("positions", len(torch.ops.sizer_scripts.positions(labels < 0)))

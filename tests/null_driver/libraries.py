"""Steps of other libraries' own code, which move tensors between device and host or ask where they are.

python -m tests.null_driver.libraries NAME     runs two steps and prints the peaks, allocated and reserved, in bytes
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

Step = Callable[[], None]
WIDTH, TOKENS = 1024, 4096


def network() -> nn.Module:
    """Return six feed-forward blocks, on the host."""
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(6)
    ]
    return nn.Sequential(*blocks)


def offloaded_optimizer(**options: bool) -> Step:
    """torchao's CPUOffloadOptimizer, which keeps parameters and their state on the host and streams gradients there."""
    from torchao.optim import CPUOffloadOptimizer

    model = network().cuda()
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, **options)
    inputs = torch.zeros(64, WIDTH, device="cuda")

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def offloaded_activations(offloading: Callable[[], AbstractContextManager]) -> Step:
    """A step whose saved tensors are on the host between the forward and the backward pass."""
    model = network().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.zeros(TOKENS, WIDTH, device="cuda")

    def step() -> None:
        with offloading():
            loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def trl(use_streams: bool) -> Step:
    """TRL's activation offloading, which compares devices before it moves a tensor."""
    from trl.models.activation_offloading import OffloadActivations

    return offloaded_activations(lambda: OffloadActivations(use_streams=use_streams))


def torchtune_offloading() -> Step:
    """torchtune's activation offloading."""
    from torchtune.training import OffloadActivations

    return offloaded_activations(lambda: OffloadActivations(use_streams=False))


def torchtune() -> Step:
    """A Llama of torchtune, whose rotary embedding asks whether its cache is on meta."""
    from torchtune.models.llama3_1 import llama3_1

    sizes = {"num_layers": 2, "num_heads": 8, "num_kv_heads": 4, "embed_dim": 512, "intermediate_dim": 1024}
    model = llama3_1(vocab_size=1000, max_seq_len=512, **sizes).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(2, 256, dtype=torch.int64, device="cuda")

    def step() -> None:
        model(tokens).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def language_model(loss_of: Callable[[Tensor, Tensor, Tensor], Tensor], *between: nn.Module) -> Step:
    """Train tied embeddings in bfloat16; `loss_of` takes hidden states [N, H], the head's weight [V, H] and targets [N]."""
    embeddings, layers = nn.Embedding(32_000, 512), nn.Sequential(*(between or (nn.Linear(512, 512),)))
    model = nn.ModuleList((embeddings, layers)).to(torch.bfloat16).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.zeros(2, 511, dtype=torch.int64, device="cuda")
    targets = torch.zeros(1022, dtype=torch.int64, device="cuda")

    def step() -> None:
        loss_of(layers(embeddings(tokens)).view(-1, 512), embeddings.weight, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def liger() -> Step:
    """Liger's loss, which multiplies and reduces chunks of tokens in Triton kernels."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    fused = LigerFusedLinearCrossEntropyLoss()
    return language_model(lambda states, weight, targets: fused(weight, states, targets))


def liger_layers() -> Step:
    """Liger's norms and feed-forward layers."""
    from types import SimpleNamespace

    from liger_kernel.transformers import LigerRMSNorm, LigerSwiGLUMLP
    from torch.nn.functional import cross_entropy

    config = SimpleNamespace(hidden_size=512, intermediate_size=1024, hidden_act="silu")
    layers = (LigerRMSNorm(512), LigerSwiGLUMLP(config), LigerRMSNorm(512), LigerSwiGLUMLP(config))
    return language_model(lambda states, weight, targets: cross_entropy(states @ weight.t(), targets), *layers)


def trl_loss() -> Step:
    """The loss of TRL's SFTTrainer: tiles of logits, multiplied into given results and reduced by Triton kernels."""
    from trl.kernels import ChunkedLogProbFunction

    def loss(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        found = ChunkedLogProbFunction.apply(states, weight, None, targets, 1.0, 8192, None, 1.0, ("entropy", "is_top1"))
        return -found[0].sum()

    return language_model(loss)


def fabric() -> Step:
    """Lightning Fabric, which moves the model to the device and wraps its forward pass."""
    from lightning.fabric import Fabric

    runs = Fabric(accelerator="cuda", devices=1, precision="bf16-mixed")
    model = network()
    model, optimizer = runs.setup(model, torch.optim.AdamW(model.parameters()))
    inputs: Tensor = torch.zeros(64, WIDTH)

    def step() -> None:
        runs.backward(model(runs.to_device(inputs)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return step


STEPS: dict[str, Callable[[], Step]] = {
    "torchao": offloaded_optimizer,
    "torchao-gradients": lambda: offloaded_optimizer(offload_gradients=True),
    "trl": lambda: trl(use_streams=False),
    "trl-streams": lambda: trl(use_streams=True),
    "torchtune": torchtune,
    "torchtune-offloading": torchtune_offloading,
    "fabric": fabric,
    "liger": liger,
    "liger-layers": liger_layers,
    "trl-loss": trl_loss,
}


if __name__ == "__main__":
    run = STEPS[sys.argv[1]]()
    run()
    run()
    print(json.dumps([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]), flush=True)
    os._exit(0)

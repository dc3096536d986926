"""Convolutional networks of torchvision as their sources train them: float32, cross entropy, a new batch each step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision import models

from tests.benchmarks.published.language import Setup, Step, load, on_the_host

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


def vision_training(model: str, batch: int, image: int, optimizer: str, zero_grad: str) -> Setup:
    """A network with its thousand classes. Gradients are dropped before the forward pass ("first"), or between forward and
    backward pass ("between"), where they live beside the activations."""

    def setup() -> Step:
        with on_the_host(), torch.device("cpu"):  # constructors read values
            module = models.get_model(model)
        module = load(module).train()
        chosen = OPTIMIZERS[optimizer](module.parameters(), lr=1e-3)
        kept: dict[str, Tensor] = {}

        def step() -> None:
            kept["images"] = torch.zeros(batch, 3, image, image).cuda()
            kept["labels"] = torch.zeros(batch, dtype=torch.int64).cuda()
            if zero_grad == "first":
                chosen.zero_grad()
            kept["outputs"] = module(kept["images"])
            kept["loss"] = F.cross_entropy(kept["outputs"], kept["labels"])
            if zero_grad == "between":
                chosen.zero_grad()
            kept["loss"].backward()
            chosen.step()

        return step

    return setup

"""Questions whose answers must not depend on what a process was asked before: `python -m tests.tracing.estimates NAME,NAME… …`.

Prints the answers of each list in JSON, a line for a list, asked of a process that has imported PyTorch and answered nothing.
Between them they take kernels that PyTorch imports, registers or remembers on first use.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import sizer


def _cross_entropy() -> Callable[[], None]:
    logits = torch.zeros(1024, 4096, device="cuda", requires_grad=True)
    target = torch.zeros(1024, dtype=torch.long, device="cuda")

    def step() -> None:
        nn.functional.cross_entropy(logits, target).backward()

    return step


def _mixed_precision() -> Callable[[], None]:
    layers = (
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.Dropout(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 8),
    )
    model = nn.Sequential(*layers).cuda()
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
    images = torch.zeros(8, 3, 32, 32, device="cuda")

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(images).var()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def _sequences() -> Callable[[], None]:
    words, layer = nn.Embedding(5000, 64).cuda(), nn.LSTM(64, 64, 2, dropout=0.1).cuda()
    optimizer = torch.optim.Adagrad([*words.parameters(), *layer.parameters()])
    tokens = torch.randint(5000, (64, 100)).cuda()

    def step() -> None:
        layer(words(tokens))[0].log_softmax(-1).std().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _attention() -> Callable[[], None]:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).cuda()
    optimizer = torch.optim.NAdam(layer.parameters())
    tokens = torch.zeros(8, 50, 64, device="cuda")

    def step() -> None:
        out: Tensor = torch.utils.checkpoint.checkpoint(layer, tokens, use_reentrant=False)
        (out.topk(3).values.sum() + nn.functional.normalize(out).cumsum(1).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


QUESTIONS: dict[str, Callable[[], Any]] = {
    "cross entropy": lambda: sizer.size_step(_cross_entropy, steps=3),
    "mixed precision": lambda: sizer.size_step(_mixed_precision, gpu="h100-80gb", steps=3),
    "sequences": lambda: sizer.size_step(_sequences, gpu="t4", steps=3),
    "attention": lambda: sizer.size_step(_attention, steps=3),
    "attention on the CPU": lambda: sizer.size_step(_attention, gpu="cpu", steps=3),
    "a model of transformers": lambda: sizer.estimate("arch=hf:t5-small&seq=32&batch=1,4&dtype=amp-bfloat16&gpu=t4"),
    "a model of torchvision": lambda: sizer.estimate("arch=torchvision:resnet18&image=64&batch=1,4&dtype=float16"),
}


def _answer(names: list[str]) -> None:
    print(json.dumps({name: json.loads(QUESTIONS[name]().to_json()) for name in names}), flush=True)


if __name__ == "__main__":
    for order in sys.argv[1:]:
        if (child := os.fork()) == 0:
            _answer(order.split(","))
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            sys.exit(f"no answer to {order}")

"""Steps of plain modules whose memory follows from PyTorch's version by the rules alone.

    python -m tests.tracing.by_version

writes what they come to by the installed PyTorch's own rules into by_version.json, beside what other versions said. The tests ask
for every recorded version under whatever PyTorch is installed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import sizer
from sizer.base.versions import format_version, installed_version

RECORDED = Path(__file__).with_suffix(".json")
GPUS = ("t4", "a100-80gb", "h100-80gb", "b200")

Step = Callable[[], None]


def _trained(module: nn.Module, *inputs: torch.Tensor) -> Step:
    optimizer = torch.optim.AdamW(module.parameters())

    def step() -> None:
        module(*inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def perceptron() -> Step:
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512, bias=False), nn.LayerNorm(512)).cuda()
    return _trained(model, torch.zeros(64, 512, device="cuda"))


def embedding() -> Step:
    return _trained(nn.Embedding(50_000, 32).cuda(), torch.zeros(16, 1024, dtype=torch.int64, device="cuda"))


def recurrent() -> Step:
    class Last(nn.LSTM):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs)[0]

    return _trained(Last(64, 128, 2, dropout=0.1).cuda(), torch.zeros(20, 8, 64, device="cuda"))


def _attention(shapes: list[tuple[int, ...]], dtype: torch.dtype, *, train: bool = True, **options: object) -> Step:
    query, key, value = (torch.zeros(shape, dtype=dtype, device="cuda", requires_grad=train) for shape in shapes)

    def step() -> None:
        out = F.scaled_dot_product_attention(query, key, value, **options)
        if train:
            out.sum().backward()
            query.grad = key.grad = value.grad = None

    return step


WHOLE, GROUPED, ONE = (
    [(4, 8, 256, 64)] * 3,
    [(4, 8, 256, 64), *[(4, 2, 256, 64)] * 2],
    [(4, 8, 256, 64), *[(4, 1, 256, 64)] * 2],
)
QUESTIONS: dict[str, Callable[[], Step]] = {
    "perceptron": perceptron,
    "embedding": embedding,
    "recurrent": recurrent,
    "attention in float32": lambda: _attention(WHOLE, torch.float32),
    "attention in bfloat16, causal": lambda: _attention(WHOLE, torch.bfloat16, is_causal=True),
    "attention in float32, dropout": lambda: _attention(WHOLE, torch.float32, dropout_p=0.1),
    "attention in float32, grouped": lambda: _attention(GROUPED, torch.float32, enable_gqa=True),
    "attention in float16, one key head": lambda: _attention(ONE, torch.float16),
    "attention in float16, unbatched": lambda: _attention([(8, 256, 64)] * 3, torch.float16),
    "attention in bfloat16, wide heads": lambda: _attention([(2, 4, 128, 256)] * 3, torch.bfloat16),
    "attention in bfloat16, inference": lambda: _attention(WHOLE, torch.bfloat16, train=False),
}


def peaks(version: str | None = None) -> dict[str, dict[str, list[int]]]:
    """Per GPU and question the peaks (bytes, allocated and reserved), by the rules of a version; None is the installed one."""
    found: dict[str, dict[str, list[int]]] = {}
    for gpu in GPUS:
        for name, setup in QUESTIONS.items():
            estimate = sizer.size_step(setup, gpu=gpu, torch=version).estimates[0]
            found.setdefault(gpu, {})[name] = [estimate.peak_allocated_bytes, estimate.peak_reserved_bytes]
    return found


def recorded() -> dict[str, dict[str, dict[str, list[int]]]]:
    """What was recorded, by version."""
    return json.loads(RECORDED.read_text()) if RECORDED.exists() else {}


if __name__ == "__main__":
    RECORDED.write_text(json.dumps({**recorded(), format_version(installed_version()): peaks()}, indent=1) + "\n")

"""Run steps with flex_attention outside of torch.compile over the null driver, and print the bytes at the end and at the peak.

python -m tests.null_driver.flexible
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

CASES: dict[str, dict[str, Any]] = {
    "inference": {"trains": False},
    "training": {},
    "causal": {"causal": True},
    "bfloat16": {"dtype": "bfloat16"},
    "causal bfloat16 inference": {"dtype": "bfloat16", "trains": False, "causal": True},
    "float64": {"dtype": "float64", "length": 64},
    "positions with a factor": {"bias": "positions"},
    "a captured tensor": {"bias": "captured"},
    "a captured parameter": {"bias": "learned"},
    "fewer heads of keys": {"groups": 2},
    "autocast": {"autocast": True},
    "log-sum-exp": {"returns_sums": True},
    "two calls": {"calls": 2, "causal": True},
    "more queries than keys": {"queries": 256, "causal": True},
    "float16, odd": {"length": 100, "width": 40, "dtype": "float16"},
    "large": {"length": 512, "width": 64, "dtype": "bfloat16", "causal": True},
}


def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def positions(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return score + (query - key) * 0.1


def setup(
    dtype: str = "float32",
    trains: bool = True,
    causal: bool = False,
    bias: str = "",
    length: int = 128,
    width: int = 32,
    queries: int | None = None,
    groups: int = 1,
    autocast: bool = False,
    returns_sums: bool = False,
    calls: int = 1,
) -> Callable[[], None]:
    """Return a step of attention with 4 heads and 2 sequences."""
    rows = queries or length
    shapes = [(2, 4, rows, width), *[(2, 4 // groups, length, width)] * 2]
    tensors = [torch.randn(shape, dtype=getattr(torch, dtype), device="cuda", requires_grad=trains) for shape in shapes]
    mask = create_block_mask(globals()["causal"], None, None, rows, length, device="cuda") if causal else None
    biases = torch.randn(4, device="cuda", requires_grad=bias == "learned") if bias in ("captured", "learned") else None

    def captured(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert biases is not None
        return score + biases[head]

    score_mod = None if not bias else positions if bias == "positions" else captured

    def step() -> None:
        found, key, value = tensors
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            for _ in range(calls):
                found = flex_attention(
                    found, key, value, score_mod, mask, enable_gqa=groups > 1, return_lse=returns_sums
                )
                found = found[0] if returns_sums else found
        if trains:
            found.sum().backward()
        for tensor in tensors if biases is None else (*tensors, biases):
            tensor.grad = None

    return step


def main() -> None:
    torch.cuda.init()
    warnings.simplefilter("ignore")
    found = {}
    for name, options in CASES.items():
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step = setup(**options)
        for _ in range(2):
            step()
        found[name] = [torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before]
        del step
    print(json.dumps(found))


if __name__ == "__main__":
    main()

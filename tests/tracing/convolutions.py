"""A few convolutions for tests, and what happens to memory inside one: bytes allocated, and with a minus released, in order.

Run as a program under the null driver (tests/null_driver) it prints PyTorch's own events as JSON; `by_rules` says Sizer's.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One convolution: sizes of input and weight, then its options."""

    input: tuple[int, ...]
    weight: tuple[int, ...]
    stride: int = 1
    padding: int = 1
    dilation: int = 1
    transposed: bool = False
    groups: int = 1
    dtype: str = "float32"
    last: bool = False


CASES = (
    Case(input=(2, 64, 56, 56), weight=(64, 64, 3, 3)),
    Case(input=(32, 3, 224, 224), weight=(64, 3, 7, 7), stride=2, padding=3),
    Case(input=(2, 64, 56, 56), weight=(64, 64, 3, 3), dtype="bfloat16"),
    Case(input=(2, 64, 56, 56), weight=(64, 64, 3, 3), dtype="float16", last=True),
    Case(input=(2, 64, 56, 56), weight=(64, 64, 3, 3), padding=2, dilation=2, dtype="bfloat16"),
    Case(input=(2, 64, 56, 56), weight=(64, 8, 3, 3), groups=8, dtype="bfloat16"),
    Case(input=(2, 64, 56, 56), weight=(64, 1, 3, 3), groups=64),
    Case(input=(2, 64, 56, 56), weight=(64, 1, 3, 3), groups=64, dtype="float16"),
    Case(input=(2, 64, 28, 28), weight=(64, 32, 2, 2), stride=2, padding=0, transposed=True),
    Case(input=(2, 64, 28, 28), weight=(64, 32, 2, 2), stride=2, padding=0, transposed=True, dtype="bfloat16"),
    Case(input=(2, 64, 100), weight=(32, 64, 3), dtype="bfloat16"),
    Case(input=(2, 3, 8, 56, 56), weight=(16, 3, 3, 3, 3), dtype="bfloat16"),
    Case(input=(2, 1, 28, 28), weight=(8, 1, 5, 5), padding=0, last=True),
)


def run(case: Case, device: str, events: Callable[[Callable[[], object]], tuple[object, list[int]]]) -> list[list[int]]:
    """The events of the convolution and of its gradients for input and weight."""
    input, weight = (torch.empty(s, dtype=getattr(torch, case.dtype), device=device) for s in (case.input, case.weight))
    if case.last:
        input, weight = (t.to(memory_format=torch.channels_last) for t in (input, weight))
    rank = input.dim() - 2
    options = (
        [case.stride] * rank,
        [case.padding] * rank,
        [case.dilation] * rank,
        case.transposed,
        [0] * rank,
        case.groups,
    )
    out, forward = events(lambda: _aten.convolution.default(input, weight, None, *options))
    assert isinstance(out, Tensor)
    grad = torch.empty_like(out)
    wanted = [True, True, False]
    _, backward = events(lambda: _aten.convolution_backward.default(grad, input, weight, None, *options, wanted))
    return [forward, backward]


def once(events: list[int]) -> list[int]:
    """Events without what is allocated and released again and again, once for each sample: a product's workspace."""
    kept: list[int] = []
    for event in events:
        if event < 0 and len(kept) > 2 and kept[-3:] == [-event, event, -event]:
            kept.pop()
        else:
            kept.append(event)
    return kept


def most(events: list[int]) -> int:
    """The most bytes at once beyond those that stay."""
    level, levels = 0, [0]
    for event in events:
        level += event
        levels.append(level)
    return max(levels) - level


def _recorded(function: Callable[[], object]) -> tuple[object, list[int]]:
    torch.cuda.memory._record_memory_history(max_entries=10_000)
    out = function()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    signs = {"alloc": 1, "free_completed": -1}
    return out, [signs[entry["action"]] * entry["size"] for entry in trace if entry["action"] in signs]


if __name__ == "__main__":
    print(json.dumps([run(case, "cuda", _recorded) for case in CASES]))
    sys.stdout.flush()
    os._exit(0)  # nothing to take down: the device is none

"""Traceable wrapper subclasses, as torchao's quantized weights are: what counts is what they hold, and what they do inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sizer.estimating.custom import size_step


class Scaled(Tensor):
    """A float32 matrix kept as int8 with a float32 scale a row. A product makes the float32 matrix, for its own time."""

    @staticmethod
    def __new__(cls, numbers: Tensor, scales: Tensor) -> Scaled:
        return Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32, device=numbers.device)

    def __init__(self, numbers: Tensor, scales: Tensor) -> None:
        self.numbers, self.scales = numbers, scales

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], meta: None, size: Any, stride: Any) -> Scaled:
        return cls(inner["numbers"], inner["scales"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].numbers.detach(), args[0].scales.detach())
        assert func is torch.ops.aten.mm.default, func
        inputs, weight = args
        return inputs @ (weight.numbers * weight.scales)


def setup() -> Callable[[], None]:
    """A frozen weight of 64 x 256 elements before a trained layer."""
    model = nn.Linear(256, 2, bias=False, device="cuda")
    numbers = torch.zeros(64, 256, dtype=torch.int8, device="cuda")
    model.frozen = nn.Parameter(Scaled(numbers, torch.ones(64, 1, device="cuda")), requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.zeros(8, 64, device="cuda")

    def step() -> None:
        model(x @ model.frozen).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_a_wrapper_weighs_what_it_holds() -> None:
    report = size_step(setup)
    # int8 64*256, scales 64*4; the layer 2*256*4
    assert report.estimates[0].weights_bytes == 64 * 256 + 64 * 4 + 2 * 256 * 4
    assert report.model.parameters == 64 * 256 + 2 * 256
    assert report.model.trainable_parameters == 2 * 256


def test_what_it_does_inside_is_seen() -> None:
    report = size_step(setup, gpu="cpu")
    forward = next(use for use in report.estimates[0].phases if use.phase == "forward")
    load = next(use for use in report.estimates[0].phases if use.phase == "load")
    # int8 numbers times float32 scales: the CPU copies the numbers to float32 first, 64*256*4 bytes as the result has
    assert forward.peak_allocated_bytes - load.allocated_bytes == 2 * 64 * 256 * 4

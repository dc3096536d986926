"""Blueprints of tiny modules, for tests that run on the CPU in milliseconds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from sizer.architecture.blueprint import Blueprint, Example


def blueprint(factory: Callable[[], nn.Module], *shape: int) -> Blueprint:
    """The sum of the module's output as loss, for inputs of `shape` a sample."""
    return Blueprint(
        name="tiny",
        class_name="Tiny",
        build=factory,
        example=lambda batch, training: Example(args=(torch.ones(batch, *shape),)),
        loss=lambda module, example: module(*example.args).sum(),
        predict=lambda module, example: module(*example.args),
    )


def perceptron() -> nn.Module:
    """Two layers: 4*8+8 and 8*2+2 weights, 58 in all."""
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))

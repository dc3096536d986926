"""Recipes: the steps whose memory is asked for, written as one writes them for a real device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sizer.architecture.blueprint import Blueprint, Example
from sizer.tracing.meta.optimizers import Optimizers, build_optimizers
from sizer.tracing.recorder import Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What to do with a blueprint: mode "training" or "inference", dtype of the contract, optimizer and implementation."""

    mode: str
    dtype: str
    optimizer: str = "adamw"
    optimizer_impl: str | None = None


def weight_dtype(dtype: str) -> torch.dtype:
    """The dtype of the weights: mixed precision keeps float32."""
    return torch.float32 if dtype.startswith("amp-") else getattr(torch, dtype)


def autocast(kind: str, dtype: str) -> Callable[[], AbstractContextManager]:
    """A function that returns the autocast context of the dtype, or one that does nothing."""
    if not dtype.startswith("amp-"):
        return nullcontext
    half = getattr(torch, dtype.removeprefix("amp-"))
    return lambda: torch.autocast(kind, dtype=half)


def place(example: Example, dtype: torch.dtype, move: Callable[[Tensor], Tensor]) -> Example:
    """The example with every tensor moved, floating-point inputs in the weights' dtype.

    Targets keep their dtype, in `targets`, under "labels" or inside dicts (boxes of a picture), as data loaders give them.
    """

    def walk(value: Any, cast: bool) -> Any:
        if isinstance(value, Tensor):
            return move(value.to(dtype) if cast and value.dtype.is_floating_point else value)
        if isinstance(value, dict):
            return {key: walk(item, False) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(walk(item, cast) for item in value)
        return value

    kwargs = {name: walk(value, cast=name != "labels") for name, value in example.kwargs.items()}
    return Example(args=walk(example.args, cast=True), kwargs=kwargs, targets=walk(example.targets, cast=False))


def train(
    recorder: Recorder, blueprint: Blueprint, module: nn.Module, example: Example, work: Work, *, short: bool = False
) -> None:
    """Two training steps. The first shows when optimizer state appears, the peak often falls in the second.

    `short` ends it with the first backward pass: all that depends on the batch size has been seen by then.
    """
    module.train()
    optimizers = build_optimizers(work.optimizer, work.optimizer_impl, module)
    example = place(example, weight_dtype(work.dtype), recorder.place)
    cast = autocast(recorder.device.kind, work.dtype)
    scaler = torch.amp.GradScaler("meta", enabled=work.dtype == "amp-float16")
    trained = [p for p in module.parameters() if p.requires_grad]
    for step in (1, 2):
        start = len(recorder.log.order)
        with cast():
            loss = blueprint.loss(module, example)
        _classify_activations(recorder, start)
        if step == 1:
            recorder.log.mark("forward")
        else:
            recorder.log.second_forward = len(recorder.log.order)
        scaler.scale(loss).backward()
        del loss
        recorder.classify((p.grad for p in trained), "gradient")
        if step == 1:
            recorder.log.mark("backward")
        if short:
            return
        _step(optimizers, scaler)
        recorder.classify(optimizers.state_tensors(), "optimizer state")
        if step == 1:
            recorder.log.mark("optimizer")
        module.zero_grad(set_to_none=True)
    recorder.log.mark("step2")


def infer(
    recorder: Recorder, blueprint: Blueprint, module: nn.Module, example: Example, work: Work, *, short: bool = False
) -> None:
    """Two forward passes without gradients, the output dropped after each; one with `short`."""
    module.eval()
    example = place(example, weight_dtype(work.dtype), recorder.place)
    cast = autocast(recorder.device.kind, work.dtype)
    for phase in ("forward", "step2"):
        start = len(recorder.log.order)
        with torch.no_grad(), cast():
            output = blueprint.predict(module, example)
        _classify_activations(recorder, start)
        if phase == "forward":
            recorder.log.mark(phase)
        if short:
            return
        del output
    recorder.log.mark("step2")


def _classify_activations(recorder: Recorder, start: int) -> None:
    for block in recorder.log.alive(start):
        if recorder.log.category(block) == "temporary":
            recorder.log.classify(block, "activation")


def _step(optimizers: Optimizers, scaler: torch.amp.GradScaler) -> None:
    for optimizer in optimizers.optimizers:
        scaler.step(optimizer)
    if optimizers.optimizers:
        scaler.update()


RECIPES = {"training": train, "inference": infer}

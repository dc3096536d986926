"""The steps of a rank that is one of a pipeline: a schedule of PyTorch's takes the place of the passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sizer.architecture.blueprint import Blueprint, Example
from sizer.base.errors import TraceError
from sizer.tracing.steps import Steps, Work, weight_dtype


def make_steps(blueprint: Blueprint, module: torch.nn.Module, example: Example, work: Work, **others: Any) -> Steps:
    """The steps of a piece of work, by a pipeline's schedule where it has one; `others` as Steps takes them."""
    pipelined = work.plan is not None and work.plan.pp > 1
    return (PipelinedSteps if pipelined else Steps)(blueprint, module, example, work, **others)


class PipelinedSteps(Steps):
    """Steps of the stages that a rank has of a pipeline, `module`, which is Stages of sizer.distributed.pipeline.

    Its forward phase ends where the first backward pass begins, its backward phase with the schedule: in between there are more
    passes of both kinds, of which `told` is called.
    """

    def __init__(
        self, blueprint: Blueprint, module: torch.nn.Module, example: Example, work: Work, **others: Any
    ) -> None:
        from sizer.distributed.pipeline import Passes, make_schedule, stage_of

        if work.dtype == "amp-float16":
            raise TraceError(
                "the gradient scaler scales the loss of the last stage alone, whose scale the other ranks do not know",
                todo="ask for amp-bfloat16",
            )
        super().__init__(blueprint, module, example, work, **others)
        plan = work.plan
        assert plan is not None, "pipelines have a plan"
        tensors = {name: value for name, value in self.example.kwargs.items() if isinstance(value, Tensor)}
        self._tokens, self._labels = tensors.pop("input_ids"), tensors.pop("labels")
        self._others = tensors
        stages = [stage_of(part) for part in module]
        self._first, self._last = any(stage.first for stage in stages), any(stage.last for stage in stages)
        mixed = work.dtype.startswith("amp-")
        logits = getattr(torch, work.dtype.removeprefix("amp-"))
        hidden = logits if mixed and plan.shards else weight_dtype(work.dtype)
        self._begun: set[int] = set()
        self._number = 0
        passes = Passes(self._tell, self._cast)
        self._schedule = make_schedule(module, plan, self._tokens, hidden, logits, passes)

    def run_passes(self, number: int) -> Iterator[tuple[int, str, bool]]:
        """The schedule of a step; yields its end as `run_all` does."""
        self._number = number
        self._begun.discard(number)
        self.forward()
        yield number, "backward", True

    def forward(self) -> None:
        """Does all passes of a step: on the first stage with the tokens, on the last with the labels."""
        given = (self._tokens,) if self._first else ()
        wanted = {"target": self._labels, "losses": []} if self._last else {}
        self._schedule.step(*given, **wanted, return_outputs=False, **self._others)

    def _tell(self, phase: str) -> None:
        first = phase == "forward" and self._number not in self._begun
        if first:
            self._begun.add(self._number)
        self.told(self._number, phase, first)

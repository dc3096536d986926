"""The steps that are measured: what is alive after each phase, that no step is left out, what inference does not do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sizer.device.trial.materialize import build_without_weights, initialize_parameters, load
from sizer.tracing.steps import Steps, Work, weight_dtype
from tests.device.blueprints import blueprint, perceptron

CPU = torch.device("cpu")


def steps_of(work: Work, factory=perceptron, *shape: int) -> Steps:
    plan = blueprint(factory, *(shape or (4,)))
    module = load(build_without_weights(plan, weight_dtype(work.dtype)), CPU)
    initialize_parameters(module)
    return Steps(plan, module, plan.example(3, True), work, device=CPU)


def test_training_goes_through_its_phases() -> None:
    steps = steps_of(Work(mode="training", dtype="float32"))
    weights = [parameter.detach().clone() for parameter in steps.module.parameters()]
    seen = []
    for phase in steps.run():
        has_gradients = all(parameter.grad is not None for parameter in steps.module.parameters())
        seen.append((phase, steps.loss is not None, has_gradients, len(steps.optimizers.state_tensors())))
    # AdamW keeps two averages and a counter for each of four parameters, from its first step on
    assert seen == [
        ("forward", True, False, 0),
        ("backward", False, True, 0),
        ("optimizer", False, True, 12),
        ("step2", False, False, 12),
    ]
    moved = [not torch.equal(a, b) for a, b in zip(weights, steps.module.parameters(), strict=True)]
    assert all(moved) and steps.module.training


def test_inference_keeps_its_output_until_the_phase_has_ended() -> None:
    steps = steps_of(Work(mode="inference", dtype="bfloat16"))
    seen = [(phase, steps.output is not None) for phase in steps.run()]
    assert seen == [("forward", True), ("step2", False)]
    assert not steps.module.training and steps.optimizers.optimizers == []
    steps.forward()
    assert steps.output.dtype == torch.bfloat16 and not steps.output.requires_grad


@pytest.mark.parametrize("dtype", ["amp-bfloat16", "amp-float16"])
def test_mixed_precision_steps_for_real(dtype: str) -> None:
    steps = steps_of(Work(mode="training", dtype=dtype))
    marks = list(steps.run())
    assert marks == ["forward", "backward", "optimizer", "step2"]
    assert not steps.skipped
    assert len(steps.optimizers.state_tensors()) == 12
    assert steps.module[0].weight.dtype == torch.float32


class Overflowing(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * torch.inf


def test_a_step_that_overflows_is_told() -> None:
    steps = steps_of(Work(mode="training", dtype="amp-float16"), lambda: Overflowing(4, 2))
    list(steps.run())
    assert steps.skipped


def test_a_whole_step_leaves_nothing() -> None:
    steps = steps_of(Work(mode="training", dtype="float32", optimizer="none"))
    steps.step()
    assert steps.loss is None and all(parameter.grad is None for parameter in steps.module.parameters())


@pytest.mark.parametrize(("optimizer", "implementation"), [("sgd", "foreach"), ("adamw", "fused"), ("adam", "loop")])
def test_the_implementation_asked_for_runs(optimizer: str, implementation: str) -> None:
    work = Work(mode="training", dtype="float32", optimizer=optimizer, optimizer_impl=implementation)
    defaults = steps_of(work).optimizers.optimizers[0].defaults
    chosen = {name for name in ("foreach", "fused") if defaults[name]} or {"loop"}
    assert chosen == {implementation}

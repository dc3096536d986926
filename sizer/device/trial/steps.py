"""The steps of `sizer.tracing.recipes` on a real device: one loop, by which memory is measured, recorded and timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from sizer.architecture.blueprint import Blueprint, Example
from sizer.tracing.meta.optimizers import build_optimizers
from sizer.tracing.recipes import Work, autocast, place, weight_dtype

# Of the gradient scaler: PyTorch's own 65536 overflows in the first steps, and the optimizer's step is then left out.
INIT_SCALE = 1.0


class Steps:
    """Training or inference steps of a module that is on `device`, with the inputs of one batch.

    `loss` and `output` are what the last forward pass left, None once they were dropped; `example` the inputs on the device,
    `optimizers` what steps. PyTorch chooses the optimizer's implementation where the work names none, as it does for everybody.
    """

    def __init__(
        self, blueprint: Blueprint, module: nn.Module, example: Example, work: Work, *, device: torch.device
    ) -> None:
        self._blueprint, self._work = blueprint, work
        self.module = module.train(work.mode == "training")
        # the whole of training's state: inference has neither
        optimizer = work.optimizer if work.mode == "training" else "none"
        self.optimizers = build_optimizers(optimizer, work.optimizer_impl, module)
        self._scaler = torch.amp.GradScaler(device.type, init_scale=INIT_SCALE, enabled=_scales(work))
        self._cast = autocast(device.type, work.dtype)
        # On the CPU `.to` would not copy: a clone stands for the batch that a data loader just made.
        move = torch.clone if device.type == "cpu" else (lambda tensor: tensor.to(device))
        self.example = place(example, weight_dtype(work.dtype), move)
        self.loss: Tensor | None = None
        self.output: object = None

    def run(self) -> Iterator[str]:
        """Two steps; yields the name of each phase when it has ended ("forward" ... "step2")."""
        self.forward()
        yield "forward"
        if self._work.mode == "training":
            self.backward()
            yield "backward"
            self.optimize()
            yield "optimizer"
        self.clear()
        self.step()
        yield "step2"

    def step(self) -> None:
        """One whole step, after which neither gradients nor output are left."""
        self.forward()
        if self._work.mode == "training":
            self.backward()
            self.optimize()
        self.clear()

    def forward(self) -> None:
        """The forward pass: `loss` in training, `output`, without gradients, in inference."""
        if self._work.mode == "training":
            with self._cast():
                self.loss = self._blueprint.loss(self.module, self.example)
        else:
            with torch.no_grad(), self._cast():
                self.output = self._blueprint.predict(self.module, self.example)

    def backward(self) -> None:
        """The backward pass, after which the loss is dropped."""
        self._scaler.scale(self.loss).backward()
        self.loss = None

    def optimize(self) -> None:
        """The optimizer's step, through the gradient scaler."""
        for optimizer in self.optimizers.optimizers:
            self._scaler.step(optimizer)
        if self.optimizers.optimizers:
            self._scaler.update()

    def clear(self) -> None:
        """Drops the gradients, and the output of inference."""
        self.module.zero_grad(set_to_none=True)
        self.output = None

    @property
    def skipped(self) -> bool:
        """Whether the gradient scaler met an overflow, so that an optimizer's step was left out."""
        return self._scaler.is_enabled() and self._scaler.get_scale() < INIT_SCALE


def run_steps(
    blueprint: Blueprint,
    module: nn.Module,
    example: Example,
    work: Work,
    *,
    device: torch.device,
    mark: Callable[[str], None],
) -> Steps:
    """Two steps of a module that is on the device, with `mark(phase)` called at each phase's end; what is left of them.

    `example` is on the CPU and is placed as part of the phase "forward". Raises whatever the model or the device raises.
    """
    steps = Steps(blueprint, module, example, work, device=device)
    for phase in steps.run():
        mark(phase)
    return steps


def _scales(work: Work) -> bool:
    return work.mode == "training" and work.dtype == "amp-float16"

"""Steps of the estimated work, written as for a real device: traced on meta, measured and timed on a device."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sizer.architecture.blueprint import Blueprint, Example
from sizer.architecture.frozen_parts import policy_of, reference_in
from sizer.base.errors import Refusal, RequestError
from sizer.catalogue.modes import DEFAULT, MODES, REDUCE_OVERHEAD
from sizer.catalogue.recipes import (
    AFTER,
    FULL,
    GROUP,
    GRPO,
    IN_BACKWARD,
    KEEP,
    LM,
    NO_SYNC,
    NONE,
    OFFLOAD,
    SUMMED,
    TRANSFORMERS,
    TRL,
    cached_texts,
    is_contrastive,
    is_library,
)
from sizer.distributed.parallel_plan import Plan
from sizer.distributed.passes import rank_example, rank_pass
from sizer.distributed.sharding import tell_whether_last
from sizer.recipes.evaluation import run_evaluation
from sizer.recipes.in_backward import StepsInBackward
from sizer.recipes.liger import liger_layers
from sizer.recipes.linear_attention import linear_attention
from sizer.recipes.losses import loss_of
from sizer.recipes.offloading import OffloadedActivations, hooks_removed
from sizer.recipes.preferences import loss_under
from sizer.tracing.meta.device_optimizers import Optimizers, build_optimizers, build_optimizers_of

if TYPE_CHECKING:
    from sizer.recipes.grpo import GroupSteps

# For the gradient scaler: PyTorch's own 65536 overflows in the first steps, so the optimizer's step is skipped.
INIT_SCALE = 1.0



@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work to do with a blueprint: a key of MODES, dtype of the contract, optimizer and implementation.

    - `accumulate`: number of forward and backward passes of an optimizer's step; `accumulates`: one of ACCUMULATES.
    - `tell_frozen`: whether weights that are not trained have a category of their own.
    - `keeps_outputs`: whether the loop keeps the model's output during the backward pass, until the next pass or the end of the
      step.
    - `new`: tokens after the prompt in a generation, or of a completion; `cache`: its implementation in transformers.
    - `plan`: plan of ranks; the work is that of one rank.
    - `cudnn_benchmark`: value of `torch.backends.cudnn.benchmark`.
    - `compile_scope`: one of SCOPES (sizer.catalogue.modes), None for eager code; `compile_mode`: one of COMPILE_MODES
      there.
    - `budget`: the compiler's activation memory budget, None for PyTorch's own.
    - `loss`, `objective`, `reference`, `group`, `rollout`, `activations`, `optimizer_offload`, `step` and `evaluate`: values of
      these keys (sizer.catalogue.recipes).
    - `autocasts`: whether a step with weights in 16 bits runs under autocast, as accelerate's mixed precision.
    - `liger`: whether the model has Liger's layers.
    - `fla`: whether flash-linear-attention runs its linear attention.
    """

    mode: str
    dtype: str
    optimizer: str = "adamw"
    optimizer_impl: str | None = None
    accumulate: int = 1
    tell_frozen: bool = False
    new: int = 1
    cache: str = "dynamic"
    plan: Plan | None = None
    keeps_outputs: bool = False
    accumulates: str = "each"
    cudnn_benchmark: bool = False
    compile_scope: str | None = None
    compile_mode: str = DEFAULT
    budget: float | None = None
    loss: str = FULL
    objective: str = LM
    reference: str | None = None
    group: int = GROUP
    rollout: str = TRANSFORMERS
    activations: str = KEEP
    optimizer_offload: bool = False
    step: str = AFTER
    evaluate: str = NONE
    autocasts: bool = False
    liger: bool = False
    fla: bool = False

    @property
    def computed_in(self) -> str:
        """Return the dtype of the contract in which a step computes: under autocast also if weights are in 16 bits."""
        return f"amp-{self.dtype}" if self.autocasts and self.dtype in ("bfloat16", "float16") else self.dtype

    @property
    def steps(self) -> int:
        """Return the number of steps to run: the first shows the tensors that a training step keeps.

        With CUDA graphs the first step runs eagerly, the second is recorded, and the third replayed.
        """
        return 3 if self.compile_scope is not None and self.compile_mode == REDUCE_OVERHEAD else 2

    @property
    def library(self) -> str:
        """Return the loss of the library that is called.

        TRL's is also called for other objectives and for offloading, Liger's for its layers.
        """
        calls = self.objective != LM or self.activations != KEEP or self.optimizer_offload
        return "trl" if calls else "liger" if self.liger and not is_library(self.loss) else self.loss

    def phase_after(self, phase: str) -> str:
        """Return the phase that begins when one has ended; the last phase continues."""
        if self.objective == GRPO:
            begins = [name for name, is_there in (("rollout", self.rolls_out), ("reference", self.scores)) if is_there]
            order = ("load", *begins, "forward")
            if phase in order[:-1]:
                return order[order.index(phase) + 1]
        return MODES[self.mode].phase_after(phase)

    @property
    def rolls_out(self) -> bool:
        """Return True if each step generates completions by transformers."""
        return self.objective == GRPO and self.rollout == TRANSFORMERS

    @property
    def scores(self) -> bool:
        """Return True if completions get log-probabilities without gradients: a reference's, or the policy's with a server."""
        return self.objective == GRPO and (self.reference != NONE or not self.rolls_out)

    @property
    def trains(self) -> bool:
        """Return whether there are a backward pass and an optimizer's step."""
        return MODES[self.mode].trains


def weight_dtype(dtype: str) -> torch.dtype:
    """Return the dtype of the weights: mixed precision keeps float32."""
    return torch.float32 if dtype.startswith("amp-") else getattr(torch, dtype)


def autocast(kind: str, dtype: str) -> Callable[[], AbstractContextManager]:
    """Return a function that returns the autocast context of the dtype, or one that does nothing."""
    if not dtype.startswith("amp-"):
        return nullcontext
    half = getattr(torch, dtype.removeprefix("amp-"))
    return lambda: torch.autocast(kind, dtype=half)


@contextmanager
def backends_of(work: Work) -> Iterator[None]:
    """Set PyTorch's backends to the work's settings within the context."""
    if not work.cudnn_benchmark:
        yield
        return
    before = torch._C._get_cudnn_benchmark()
    torch._C._set_cudnn_benchmark(True)
    try:
        yield
    finally:
        torch._C._set_cudnn_benchmark(before)


def place(example: Example, dtype: torch.dtype, move: Callable[[Tensor], Tensor]) -> Example:
    """Return the example with every tensor moved, and floating-point inputs in the weights' dtype.

    Targets keep their dtype, in `targets`, under "labels" or inside dicts (boxes of an image), as data loaders give them.
    """

    def walk(value: Any, cast: bool) -> Any:
        if isinstance(value, Tensor):
            return move(_as_dtype(value, dtype) if cast and value.dtype.is_floating_point else value)
        if isinstance(value, dict):
            return {key: walk(item, False) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(walk(item, cast) for item in value)
        return value

    kwargs = {name: walk(value, cast=name != "labels") for name, value in example.kwargs.items()}
    return Example(args=walk(example.args, cast=True), kwargs=kwargs, targets=walk(example.targets, cast=False))


def mover(device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return the function that moves a tensor of a batch to a device.

    On the CPU `.to` would not copy, so a clone represents the batch that a data loader just made.
    """
    if device.type == "cpu":
        return lambda tensor: tensor.clone(memory_format=torch.contiguous_format)
    return lambda tensor: tensor.contiguous().to(device)


def _as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in another dtype; an expanded number stays expanded."""
    if tensor.dim() and not any(tensor.stride()):
        return tensor[(0,) * tensor.dim()].to(dtype).expand(tensor.shape)
    return tensor.to(dtype)


def is_marked(number: int, phase: str) -> bool:
    """Return True if the end of a phase of a step is one of a report's phases."""
    return number == 1 or phase in ("step2", "evaluate")


class Steps:
    """Two training or inference steps, or three, of a module on `device`, with the inputs of one batch.

    The first training step shows when optimizer state appears; the peak is often in the second. On meta, `kind` is the traced
    device ("cuda"), for autocast, and `move` moves a tensor of the example there.

    Callbacks:

    - `on_phase` is called with the values that `run_all` yields, for phases that end while a schedule runs: those of a pipeline.
    - `on_output` is called with the model's output in a forward pass of training, `on_backward` before the loss is dropped; a
      schedule calls neither.
    - `on_gradient` is called with each gradient if the optimizer steps in the backward pass.
    - `on_token` is called with each token of completions that the model generates (sizer.architecture.greedy_generation).

    `loss` and `output` are the results of the last forward pass, None once they are dropped; `example` are the inputs on the
    device, `optimizers` the optimizers. `passes` is the number of passes per step that are run, by default all that a step
    accumulates. PyTorch chooses the optimizer's implementation if the work names none.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        module: nn.Module,
        example: Example,
        work: Work,
        *,
        device: torch.device,
        kind: str | None = None,
        move: Callable[[Tensor], Tensor] | None = None,
        passes: int | None = None,
    ) -> None:
        self._blueprint, self._work = blueprint, work
        self.passes = passes or work.accumulate
        self.module = module.train(work.trains)
        # inference has no optimizer
        optimizer = work.optimizer if work.trains else "none"
        sharded = work.plan is not None and work.plan.parallel == "zero1"
        self._in_backward: StepsInBackward | None = None
        self._hooks = ExitStack()
        if work.trains and work.step == IN_BACKWARD:
            self.optimizers = self._step_in_backward(optimizer)
        else:
            if offloaded := work.trains and work.optimizer_offload:
                self._refuse_scaler("optimizer_offload", "1", "which does not divide gradients on the host")
                self._hooks.enter_context(hooks_removed(module))
            self.optimizers = build_optimizers(
                optimizer, work.optimizer_impl, module, sharded=sharded, offloaded=offloaded
            )
        self._offloaded = OffloadedActivations(module) if work.trains and work.activations == OFFLOAD else None
        self._loss_of = loss_of(work.loss, blueprint) if work.trains else blueprint.loss
        scales = work.trains and work.computed_in == "amp-float16"
        self._scaler = torch.amp.GradScaler(device.type, init_scale=INIT_SCALE, enabled=scales)
        # FSDP2 casts by its own policy
        shards = work.plan is not None and work.plan.shards
        self._cast = nullcontext if shards else autocast(kind or device.type, work.computed_in)
        self.example = place(rank_example(example, work.plan), weight_dtype(work.dtype), move or mover(device))
        self._groups = self._group_steps() if work.objective == GRPO else None
        if work.trains and is_contrastive(work.objective):
            from sizer.recipes.contrastive import PairLoss

            self._loss_of = PairLoss(cached_texts(work.objective), self._cast_within())
        elif work.trains and work.objective not in (LM, GRPO):
            self._loss_of = loss_under(self._cast_within(), work.objective)
        self._pass = rank_pass(work.plan, self.example, kind or device.type)
        self.on_phase: Callable[[int, str, bool], None] = lambda number, phase, ends: None
        self.on_output: Callable[[object], None] = lambda output: None
        self.on_backward: Callable[[], None] = lambda: None
        self.on_gradient: Callable[[Tensor], None] = lambda gradient: None
        self.on_token: Callable[[int, object], bool] = lambda number, cache: number < work.new
        self._hooks.enter_context(linear_attention(module, by_package=work.fla))
        if work.liger:
            self._hooks.enter_context(liger_layers(policy_of(module)))
        self.loss: Tensor | None = None
        self.output: object = None
        self._sum: Tensor | None = None  # sum of the losses of the passes so far, if they are summed

    def run(self) -> Iterator[str]:
        """Run all steps; yield the name of each phase of the first step at its end ("forward" ...).

        "step2" and "evaluate" come at the end.
        """
        yield from (phase for number, phase, ends in self.run_all() if ends and is_marked(number, phase))

    def run_all(self) -> Generator[tuple[int, str, bool], None, None]:
        """Run all steps; yield (number of the step, phase, whether the step's phase ends) after each of its parts.

        (2, "step2", True) comes at the end. If a step accumulates, its forward phase ends with the first pass, its backward
        phase with the last.
        """
        for number in range(1, self._work.steps + 1):
            yield from self.run_passes(number)
            if self._work.trains:
                self.optimize()
                yield number, "optimizer", True
            self.clear()
        yield 2, "step2", True
        if self._work.evaluate != NONE and self._work.trains:
            run_evaluation(
                self._work.evaluate,
                self.module,
                self.example,
                cast=self._cast,
                predict=self._blueprint.predict,
                loss_of=None if self._work.loss == FULL else self._loss_of,
                scores_first=self._work.loss == TRL,
            )
            yield 2, "evaluate", True

    def run_passes(self, number: int) -> Iterator[tuple[int, str, bool]]:
        """Run the forward and backward passes of a step; yield as `run_all` does."""
        for done in range(1, self.passes + 1):
            if self._groups is not None:
                self.example = self._groups.prepare(done, lambda: self.on_phase(number, "rollout", True))
                if self._work.scores and done == 1:
                    yield number, "reference", True
            tell_whether_last(self.module, done == self.passes, sync=self._work.accumulates != NO_SYNC)
            with self._pass(), self._offloaded() if self._offloaded else nullcontext():
                self.forward()
                yield number, "forward", done == 1
                if self._work.trains and (self._work.accumulates != SUMMED or done == self.passes):
                    self.backward()
                    yield number, "backward", done == self.passes

    def step(self) -> None:
        """Run one whole step and drop its gradients and output."""
        for _ in self.run_passes(1):
            pass
        if self._work.trains:
            self.optimize()
        self.clear()

    def forward(self) -> None:
        """Run the forward pass: set `loss` in training, `output`, without gradients, in inference."""
        if self._work.trains:
            with self._cast(), self._output_seen():
                self.loss = self._loss_of(self.module, self.example)
            if self._work.accumulates == SUMMED:
                self.loss = self._sum = self.loss if self._sum is None else self._sum + self.loss
        else:
            with torch.no_grad(), self._cast():
                self.output = self._blueprint.predict(self.module, self.example)

    @contextmanager
    def _output_seen(self) -> Iterator[None]:
        """Report the module's outputs within the context, and keep them with the loss if the loop does."""
        returned: list[object] = []

        def see(module: nn.Module, args: Any, output: object) -> None:
            self.on_output(output)
            if self._work.keeps_outputs:
                returned.append(output)

        handle = self.module.register_forward_hook(see)
        try:
            yield
        finally:
            handle.remove()
        if self._work.keeps_outputs:
            self.output = (*returned, self.loss)

    def backward(self) -> None:
        """Run the backward pass of the loss, divided by the number of accumulated passes, and drop the loss."""
        assert self.loss is not None, "it follows a forward pass"
        if self._work.accumulate > 1:
            self.loss = self.loss / self._work.accumulate
        self._scaler.scale(self.loss).backward()
        self.on_backward()
        self.loss = self._sum = None

    def optimize(self) -> None:
        """Run the optimizer's step, through the gradient scaler."""
        if self._in_backward is not None:
            return
        for optimizer in self.optimizers.optimizers:
            self._scaler.step(optimizer)
        if self.optimizers.optimizers:
            self._scaler.update()

    def _step_in_backward(self, optimizer: str) -> Optimizers:
        """Return the optimizers of a module that step in its backward pass."""
        self._refuse_scaler("step", repr(IN_BACKWARD), "which checks all gradients before a step")
        make = partial(build_optimizers_of, optimizer, self._work.optimizer_impl)
        self._in_backward = StepsInBackward(self.module, lambda parameters: make(parameters).optimizers)
        self._in_backward.on_gradient = lambda gradient: self.on_gradient(gradient)
        return Optimizers(self._in_backward.optimizers)

    def _group_steps(self) -> GroupSteps:
        """Return the object that generates completions and computes the step's loss; Accelerate casts within the models."""
        from sizer.recipes.grpo import GroupSteps  # imports transformers' generation

        work = self._work
        groups = GroupSteps(
            policy_of(self.module),
            reference_in(self.module),
            self.example,
            work.group,
            work.new,
            passes=work.accumulate,
            by=work.rollout,
            compares=work.reference != NONE,
            cast=self._cast_within(),
            on_token=lambda number, cache: self.on_token(number, cache),
        )
        self._hooks.callback(groups.close)
        self._loss_of = groups.loss
        return groups

    def _cast_within(self) -> Callable[[], AbstractContextManager] | None:
        """Return the autocast context, which models enter themselves from now on, without their loss; None if there is none."""
        cast, self._cast = self._cast, nullcontext
        return None if cast is nullcontext else cast

    def _refuse_scaler(self, key: str, value: str, why: str) -> None:
        """Raise RequestError for the value of a key if the dtype needs a gradient scaler."""
        if self._work.computed_in == "amp-float16":
            given = f"{value} with dtype={self._work.dtype}"
            allowed = f"dtypes without a gradient scaler, {why}"
            raise RequestError(refusals=[Refusal(key=key, given=given, allowed=allowed, todo="ask for dtype=amp-bfloat16")])

    def close(self) -> None:
        """Remove the hooks that step in the backward pass, or offload, and a library's layers."""
        self._hooks.close()
        if self._offloaded is not None:
            self._offloaded.close()
        if self._in_backward is not None:
            self._in_backward.close()

    def clear(self) -> None:
        """Drop the output, if there is one, and the gradients."""
        self.output = None
        self.module.zero_grad(set_to_none=True)

    @property
    def skipped(self) -> bool:
        """Return whether the gradient scaler found an overflow and skipped an optimizer's step."""
        return self._scaler.is_enabled() and self._scaler.get_scale() < INIT_SCALE

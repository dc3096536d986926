"""Choice of the traced rank of a world, or of each kind of pipeline stage, and the rank with the largest need. Imports torch.

For a rank of a pipeline, a schedule of PyTorch replaces the passes of a step.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sizer.allocator.cuda import round_up
from sizer.allocator.timeline import peak_bytes
from sizer.architecture.blueprint import Blueprint, Example
from sizer.base.errors import TraceError
from sizer.catalogue.recipes import is_contrastive
from sizer.distributed.described_gpus import Accelerator
from sizer.distributed.parallel_plan import Plan
from sizer.distributed.sharding import replicate
from sizer.distributed.world import world_of
from sizer.recipes.contrastive import Embedder
from sizer.tape.tape import BlockNotes, Tape
from sizer.tracing.device import Device
from sizer.tracing.meta.accelerators import OnMeta
from sizer.tracing.meta.device_optimizers import build_optimizers
from sizer.tracing.steps import Steps, Work, weight_dtype

# torch.cuda's answers on the CPU: a GPU without kernels.
_NO_GPU = Accelerator(capability=(0, 0))


@contextmanager
def world_of_work(work: Work, module: nn.Module, device: Device) -> Iterator[None]:
    """Enter the world in which the work on a meta module is one rank; no world without a plan."""
    if work.plan is None:
        yield
        return
    accelerator = _NO_GPU if device.kind != "cuda" else Accelerator(capability=device.capability.plain)
    rank = _neediest(work, module, accelerator) if work.plan.rank is None else work.plan.rank
    with world_of(work.plan.world, rank, accelerator, groups=(work.plan, device.kind)), OnMeta():
        yield


def wrap_ddp(module: nn.Module, plan: Plan, objective: str, *, find_unused: bool = False) -> nn.Module:
    """Return a module on its device wrapped in DDP, as the trainer of an objective does.

    sentence-transformers' trainer wraps the model with pooling, and DDP searches for unused parameters, since the model is not
    a model of transformers (`create_accelerator_and_postprocess` of Trainer, 5.24).
    """
    if is_contrastive(objective):
        module, find_unused = Embedder(module), True
    return replicate(module, plan, find_unused=find_unused)


def _neediest(work: Work, module: nn.Module, accelerator: Accelerator) -> int:
    """Return the rank that needs the most memory.

    - FSDP2 and tensor parallel: the first, as they round up the first ranks' shards.
    - Context parallel: the first, as all ranks except the last concatenate halves of keys and values.
    - ZeRO-1, which distributes whole parameters: the rank with the most optimizer state.

    For a pipeline, the tapes of its stages are compared (`ranks_of_stages`).
    """
    if work.plan is None or work.plan.parallel != "zero1":
        return 0
    with world_of(work.plan.world, 0, accelerator):
        optimizers = build_optimizers(work.optimizer, work.optimizer_impl, module, sharded=True).optimizers
        parts = zip(*(optimizer._partition_parameters() for optimizer in optimizers), strict=True)
        sizes = [
            sum(parameter.numel() for groups in part for group in groups for parameter in group["params"])
            for part in parts
        ]
    return sizes.index(max(sizes)) if sizes else 0


def ranks_of_stages(module: nn.Module, plan: Plan) -> tuple[int, ...]:
    """Return a rank of each kind of stages in a model's pipeline: the first, the last, and some between.

    A stage between is left out if an earlier one has all of its layers, because by every schedule the earlier one holds at
    least as many microbatches.
    """
    from sizer.distributed.pipeline import layers_by_stage, layers_of

    kinds = [_kind_of(layer) for layer in layers_of(module)]
    held = [Counter(kinds[number] for number in numbers) for numbers in layers_by_stage(len(kinds), plan.stages)]
    between: list[int] = []
    for position in range(1, plan.pp - 1):
        own, earlier = held[position :: plan.pp], (held[other :: plan.pp] for other in between)
        if not any(all(map(operator.le, own, others)) for others in earlier):
            between.append(position)
    return tuple(position * plan.world // plan.pp for position in (0, *between, plan.pp - 1))


def _kind_of(layer: nn.Module) -> Hashable:
    """Return a key that is equal for layers of the same parts."""
    return tuple((type(part), *(one.shape for one in part.parameters(recurse=False))) for part in layer.modules())


def neediest(tapes: dict[int, Tape]) -> int:
    """Return the rank of the tape with the most bytes alive at a time; the first of equal ones."""
    return max(tapes, key=lambda rank: peak_bytes(tapes[rank].order, round_up(tapes[rank].sizes).tolist()))


# -------------------------------------------------------------------------------------------------------------- stages


class Traces(Protocol):
    """Traces the work of one rank, with notes of its blocks if requested."""

    def __call__(self, work: Work, *, block_notes: BlockNotes | None = None) -> Tape: ...


class StageTraces:
    """Ranks of a pipeline that need the most memory, by dtype and batch size, once they are traced."""

    def __init__(self) -> None:
        self._neediest: dict[tuple[str, int], int] = {}

    def trace(
        self, trace: Traces, work: Work, module: nn.Module, batch: int, block_notes: BlockNotes | None = None
    ) -> Tape:
        """Return the tape of the rank that needs the most memory, found by tracing all kinds of stages.

        Raises TraceError if one of them cannot be traced.
        """

        plan = work.plan
        assert plan is not None, "ranks have a plan"

        def at(rank: int, block_notes: BlockNotes | None = None) -> Tape:
            return trace(replace(work, plan=replace(plan, rank=rank)), block_notes=block_notes)

        cell = work.dtype, batch
        if cell not in self._neediest or block_notes is None:
            tapes = {rank: at(rank) for rank in ranks_of_stages(module, plan)}
            self._neediest[cell] = neediest(tapes)
            if block_notes is None:
                return tapes[self._neediest[cell]]
        return at(self._neediest[cell], block_notes=block_notes)

    def whose(self, dtype: str, batches: Collection[int]) -> str:
        """Return the rank that needs the most memory, by batch size, as the end of a sentence; empty if none was traced."""
        found = {batch: self._neediest[dtype, batch] for batch in batches if (dtype, batch) in self._neediest}
        texts = [
            f"rank {rank} at batch {', '.join(str(batch) for batch in found if found[batch] == rank)}"
            for rank in dict.fromkeys(found.values())
        ]
        return f"; the figures are those of the rank that needs most: {'; '.join(texts)}" if texts else ""


# ----------------------------------------------------------------------------------------------------------- pipelined


def make_steps(blueprint: Blueprint, module: torch.nn.Module, example: Example, work: Work, **others: Any) -> Steps:
    """Return the steps of some work, by a pipeline's schedule if it has one; `others` are arguments of Steps."""
    pipelined = work.plan is not None and work.plan.pp > 1
    return (PipelinedSteps if pipelined else Steps)(blueprint, module, example, work, **others)


class PipelinedSteps(Steps):
    """Steps of a rank's stages of a pipeline, `module`, which is Stages of sizer.distributed.pipeline.

    The forward phase ends when the first backward pass begins, the backward phase with the schedule. In between there are more
    passes of both kinds, for which `on_phase` is called.
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
        """Run the schedule of a step; yield its end as `run_all` does."""
        self._number = number
        self._begun.discard(number)
        self.forward()
        yield number, "backward", True

    def forward(self) -> None:
        """Run all passes of a step: with the tokens on the first stage, with the labels on the last."""
        given = (self._tokens,) if self._first else ()
        wanted = {"target": self._labels, "losses": []} if self._last else {}
        self._schedule.step(*given, **wanted, return_outputs=False, **self._others)

    def _tell(self, phase: str) -> None:
        first = phase == "forward" and self._number not in self._begun
        if first:
            self._begun.add(self._number)
        self.on_phase(self._number, phase, first)

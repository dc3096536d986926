"""Choice of the traced rank of a world, or of each kind of pipeline stage, and the rank that needs most. Imports torch.

The steps of a rank that is one of a pipeline: a schedule of PyTorch's takes the place of the passes.
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

from sizer.allocator.cuda import rounded
from sizer.allocator.timeline import peak_bytes
from sizer.architecture.blueprint import Blueprint, Example
from sizer.base.errors import TraceError
from sizer.catalogue.recipes import is_contrastive
from sizer.distributed.described_gpus import Accelerator
from sizer.distributed.parallel_plan import Plan
from sizer.distributed.sharding import replicate
from sizer.distributed.world import world_of
from sizer.recipes.contrastive import Embedder
from sizer.tape.block_notes import BlockNotes
from sizer.tape.tape import Tape
from sizer.tracing.device import Device
from sizer.tracing.meta.accelerators import OnMeta
from sizer.tracing.meta.device_optimizers import build_optimizers
from sizer.tracing.steps import Steps, Work, weight_dtype

# What torch.cuda answers on the CPU: a GPU for which there is no kernel.
_NO_GPU = Accelerator(capability=(0, 0))


@contextmanager
def world_of_work(work: Work, module: nn.Module, device: Device) -> Iterator[None]:
    """The world of which the work on a module that is on meta is one rank; none where it has no plan."""
    if work.plan is None:
        yield
        return
    accelerator = _NO_GPU if device.kind != "cuda" else Accelerator(capability=device.capability.plain)
    rank = _neediest(work, module, accelerator) if work.plan.rank is None else work.plan.rank
    with world_of(work.plan.world, rank, accelerator, groups=(work.plan, device.kind)), OnMeta():
        yield


def replicated(module: nn.Module, plan: Plan, objective: str, *, find_unused: bool = False) -> nn.Module:
    """Return a module on its device with DDP around it, as the trainer of an objective has it.

    sentence-transformers' trainer has DDP around the model with pooling, and DDP look for unused parameters, since the model is
    none of transformers' own (`create_accelerator_and_postprocess` of Trainer, 5.24).
    """
    if is_contrastive(objective):
        module, find_unused = Embedder(module), True
    return replicate(module, plan, find_unused=find_unused)


def _neediest(work: Work, module: nn.Module, accelerator: Accelerator) -> int:
    """The rank that needs most: the first, since FSDP2 and tensor parallel round up what the first ranks have, and all but the last
    of context parallel put together halves of what they attend to; of ZeRO-1, which spreads whole parameters, the one for whose
    parameters the optimizer has most state. Of a pipeline that is for whoever compares the tapes of its stages
    (`ranks_of_stages`) to say."""
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
    """A rank of each kind of stages that a model's pipeline has: the first, the last, and those between but for such as have no
    layers that an earlier one lacks, which by every schedule holds as many microbatches or more."""
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
    """Return what is equal for layers of the same parts."""
    return tuple((type(part), *(one.shape for one in part.parameters(recurse=False))) for part in layer.modules())


def neediest(tapes: dict[int, Tape]) -> int:
    """The rank whose tape has the most bytes alive at a time, the first of those that have as many."""
    return max(tapes, key=lambda rank: peak_bytes(tapes[rank].order, rounded(tapes[rank].sizes).tolist()))


# -------------------------------------------------------------------------------------------------------------- stages


class Traces(Protocol):
    """Traces a piece of work, which is one rank's, with notes of its blocks where they are asked for."""

    def __call__(self, work: Work, *, block_notes: BlockNotes | None = None) -> Tape: ...


class StageTraces:
    """The ranks of a pipeline that need most, by dtype and batch size, once they are traced."""

    def __init__(self) -> None:
        self._neediest: dict[tuple[str, int], int] = {}

    def trace(
        self, trace: Traces, work: Work, module: nn.Module, batch: int, block_notes: BlockNotes | None = None
    ) -> Tape:
        """The tape of the rank that needs most, which is known once those of all kinds of stages are traced.

        Raises TraceError where one of them cannot be traced.
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
        """Return which rank needs most, by batch size, as the end of a sentence; empty where none was traced."""
        found = {batch: self._neediest[dtype, batch] for batch in batches if (dtype, batch) in self._neediest}
        texts = [
            f"rank {rank} at batch {', '.join(str(batch) for batch in found if found[batch] == rank)}"
            for rank in dict.fromkeys(found.values())
        ]
        return f"; the figures are those of the rank that needs most: {'; '.join(texts)}" if texts else ""


# ----------------------------------------------------------------------------------------------------------- pipelined


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

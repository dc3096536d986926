"""A model as the stages of a pipeline, by torch.distributed.pipelining: the layers of each rank, and the order of its passes.

Read in PyTorch 2.11 and 2.15. Its recipes split a model like this (torchtitan's pipeline_parallel.py): each stage is the whole
model without the layers of the others; the first keeps the embedding, the last the norm and the head.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh

from sizer.base.errors import RequestError, TraceError
from sizer.catalogue.parallel import SCHEDULES
from sizer.distributed.parallel_plan import Plan


class Stage(nn.Module):
    """One stage of a language model of transformers.

    The first stage takes tokens (batch, length), other stages hidden states (batch, length, width). The last stage returns
    logits (batch, length, words), other stages hidden states.

    *Known limitation*: a model's operations on embeddings outside of its modules (Granite scales them) are done in each stage.
    """

    def __init__(self, model: nn.Module, number: int, stages: int) -> None:
        super().__init__()
        self.model, self.number = model, number
        self.first, self.last = number == 0, number == stages - 1

    def forward(self, inputs: Tensor, **others: Tensor) -> Tensor:
        """Run the stage's layers on a microbatch."""
        given = {"input_ids" if self.first else "inputs_embeds": inputs, "use_cache": False, **others}
        if self.last:
            return self.model(**given).logits
        return self.model.base_model(**given).last_hidden_state

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the model's own loss, a scalar."""
        words = self.model.config.get_text_config().vocab_size
        return self.model.loss_function(logits=logits, labels=labels, vocab_size=words)


class Stages(nn.ModuleList):
    """The stages of one rank of a pipeline over the dimension "pp" of a mesh; DDP may wrap each."""

    def __init__(self, stages: list[Stage], mesh: DeviceMesh) -> None:
        super().__init__(stages)
        self.mesh = mesh


def check_pipeline(module: nn.Module, plan: Plan) -> None:
    """Raise RequestError unless a module is a language model of transformers with a pipeline plan for this number of stages."""
    name, given = type(module).__name__, f"{plan.pp} for {type(module).__name__}"
    if not getattr(type(module), "_pp_plan", None) or not _base_plan(module):
        raise RequestError(
            "pp",
            given=given,
            allowed=f"1: transformers has no pipeline parallel plan for {name}",
            todo="leave pp out, or choose a language model with a plan (Llama, Qwen, Mistral, …)",
        )
    if module.get_output_embeddings().weight is module.get_input_embeddings().weight:
        raise RequestError(
            "pp",
            given=given,
            allowed="1: its embedding and its head are one parameter, which two stages cannot share",
            todo="leave pp out, or choose a model without tied embeddings",
        )
    most = (len(layers_of(module)) + 2) // SCHEDULES[plan.schedule].stages
    if plan.pp > most:
        raise RequestError(
            "pp", given=given, allowed=f"at most {most}, else a stage is empty", todo=f"ask for pp={most}"
        )


def layers_by_stage(layers: int, stages: int) -> list[range]:
    """Return the numbers of the layers of each stage.

    The embedding and the head count as one layer each, and the first stages get the remaining layers: torchtitan's
    `generate_llm_fqn_per_model_part`.
    """
    each, more = divmod(layers + 2, stages)
    ends = [each * number + min(number, more) - 1 for number in range(stages + 1)]
    ends[0], ends[-1] = 0, layers
    return [range(begin, end) for begin, end in pairwise(ends)]


def cut(module: nn.Module, number: int, stages: int) -> Stage:
    """Return the stage of a number: the model without the parts of other stages, by its plan.

    Layers keep their numbers, which some models read: transformers' own identity layer replaces the removed ones.
    """
    from transformers.distributed.pipeline_parallel import PipelineIdentityLayer

    layers, (first, _, last) = layers_of(module), parts_at_ends(module)
    own = layers_by_stage(len(layers), stages)[number]
    others = [*(first if number > 0 else ()), *(last if number < stages - 1 else ())]
    for path in others:
        module.set_submodule(path, PipelineIdentityLayer())
    for index in range(len(layers)):
        if index not in own:
            layers[index] = PipelineIdentityLayer()
    return Stage(module, number, stages)


def parts_at_ends(module: nn.Module) -> tuple[list[str], str, list[str]]:
    """Return the dotted paths of the parts of the first stage only, of the layers, and of the parts of the last stage only."""
    layers, prefix = layers_of(module), module.base_model_prefix
    names = list(_base_plan(module))
    position = next(at for at, name in enumerate(names) if getattr(module.base_model, name) is layers)
    paths = [f"{prefix}.{name}" for name in names]
    return paths[:position], paths[position], [*paths[position + 1 :], *type(module)._pp_plan]


def _base_plan(module: nn.Module) -> dict[str, object]:
    """Return the parts of a model's base in order of execution, by the plan in its config; empty without a plan.

    Source: `base_model_pp_plan` of transformers/configuration_utils.py, read in 5.17 and 5.23.
    """
    plan = getattr(module.config, "base_model_pp_plan", None) or {}
    return plan if all(hasattr(module.base_model, name) for name in plan) else {}


def layers_of(module: nn.Module) -> nn.ModuleList:
    """Return the layer stack of a model with a plan."""
    parts = (getattr(module.base_model, name) for name in _base_plan(module))
    return next(part for part in parts if isinstance(part, nn.ModuleList))


class Passes:
    """The running passes of a schedule.

    `on_phase_end("forward")` is called when forward passes end and a backward pass begins, `on_phase_end("backward")` when that
    ends. `context` wraps each forward pass, for example autocast.
    """

    def __init__(self, on_phase_end: Callable[[str], None], context: Callable[[], AbstractContextManager]) -> None:
        self.on_phase_end, self.context, self.ahead = on_phase_end, context, False

    def turn(self) -> None:
        """Report that forward passes end, if there were any since the last backward pass."""
        if self.ahead:
            self.ahead = False
            self.on_phase_end("forward")


class _ShapedStage(pipelining.PipelineStage):
    """PyTorch's stage, which reports its passes."""

    def __init__(self, *args: Any, passes: Passes, output_args: Tensor, **others: Any) -> None:
        super().__init__(*args, output_args=output_args, **others)
        self._passes, self._output = passes, output_args

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._passes.context():
            output = super().forward_one_chunk(*args, **kwargs)
        if (output.shape, output.dtype) != (self._output.shape, self._output.dtype):
            raise TraceError(
                f"stage {self.stage_index} returns {tuple(output.shape)} of {output.dtype} where "
                f"{tuple(self._output.shape)} of {self._output.dtype} are waited for"
            )
        self._passes.ahead = True
        return output

    def get_bwd_recv_ops(self, *args: Any, **kwargs: Any) -> Any:
        self._passes.turn()
        return super().get_bwd_recv_ops(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self._passes.turn()
        super().backward_one_chunk(*args, **kwargs)
        self._passes.on_phase_end("backward")


def make_schedule(
    stages: Stages, plan: Plan, tokens: Tensor, dtype: torch.dtype, logits_dtype: torch.dtype, passes: Passes
) -> Any:
    """Return PyTorch's schedule of a rank's stages for a batch of `tokens`, (batch, length), on their device.

    Hidden states have `dtype`, logits `logits_dtype`. The shapes that stages send each other are given in advance, so that no
    stage queries another.
    """
    length, row = tokens.shape[1], SCHEDULES[plan.schedule]

    def boundary_tensor(stage: Stage, *, ends: bool) -> Tensor:
        config = stage.model.config.get_text_config()
        if not ends and stage.first:
            return torch.empty(plan.microbatch, length, dtype=tokens.dtype, device="meta")
        logits = ends and stage.last
        width = config.vocab_size if logits else config.hidden_size
        kind = logits_dtype if logits else dtype
        return torch.empty(plan.microbatch, length, width, dtype=kind, device="meta", requires_grad=True)

    made = [
        _ShapedStage(
            part,
            stage_of(part).number,
            plan.stages,
            tokens.device,
            input_args=boundary_tensor(stage_of(part), ends=False),
            output_args=boundary_tensor(stage_of(part), ends=True),
            group=stages.mesh["pp"].get_group(),
            passes=passes,
        )
        for part in stages
    ]

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        with passes.context():
            return stage_of(stages[-1]).loss(logits, labels)

    make = getattr(pipelining, row.class_name)
    return make(made if row.stages > 1 else made[0], n_microbatches=len(tokens) // plan.microbatch, loss_fn=loss)


def stage_of(part: nn.Module) -> Stage:
    """Return the stage inside DDP; any other module unchanged."""
    return part.module if isinstance(part, nn.parallel.DistributedDataParallel) else part

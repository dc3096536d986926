"""A model as the stages of a pipeline, by torch.distributed.pipelining: which layers each rank has, and in which order it works.

Read in PyTorch 2.11 and 2.15. Its recipes cut a model so (torchtitan's pipeline_parallel.py): each stage is the whole model
without the layers of the others; the first keeps the embedding, the last the norm and the head.
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
from sizer.catalogue.schedules import SCHEDULES
from sizer.distributed.parallel_plan import Plan


class Stage(nn.Module):
    """One stage of a language model of transformers.

    It takes tokens, (batch, length), where it is the first, else hidden states, (batch, length, width), and returns hidden states,
    or logits, (batch, length, words), where it is the last.

    *Known limitation*: what a model does to embeddings outside of its modules (Granite multiplies them) is done in each stage.
    """

    def __init__(self, model: nn.Module, number: int, stages: int) -> None:
        super().__init__()
        self.model, self.number = model, number
        self.first, self.last = number == 0, number == stages - 1

    def forward(self, inputs: Tensor, **others: Tensor) -> Tensor:
        """Run the layers that are there on a microbatch."""
        given = {"input_ids" if self.first else "inputs_embeds": inputs, "use_cache": False, **others}
        if self.last:
            return self.model(**given).logits
        return self.model.base_model(**given).last_hidden_state

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The model's own loss, a scalar."""
        words = self.model.config.get_text_config().vocab_size
        return self.model.loss_function(logits=logits, labels=labels, vocab_size=words)


class Stages(nn.ModuleList):
    """The stages that one rank has of a pipeline over the dimension "pp" of a mesh; DDP may be around each."""

    def __init__(self, stages: list[Stage], mesh: DeviceMesh) -> None:
        super().__init__(stages)
        self.mesh = mesh


def check_pipeline(module: nn.Module, plan: Plan) -> None:
    """Raise RequestError where a module is no language model of transformers with a plan for a pipeline of so many stages."""
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
            "pp", given=given, allowed=f"at most {most}, so that no stage is empty", todo=f"ask for pp={most}"
        )


def layers_by_stage(layers: int, stages: int) -> list[range]:
    """The numbers of the layers that each stage has. The embedding and the head count as one layer each, and of what is left over
    the first stages have one more: torchtitan's `generate_llm_fqn_per_model_part`."""
    each, more = divmod(layers + 2, stages)
    ends = [each * number + min(number, more) - 1 for number in range(stages + 1)]
    ends[0], ends[-1] = 0, layers
    return [range(begin, end) for begin, end in pairwise(ends)]


def cut(module: nn.Module, number: int, stages: int) -> Stage:
    """The stage of a number that is left of a model without what others have, by its plan.

    Layers keep their numbers, which some models ask for: transformers' own stand-in is in the place of those that are gone.
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
    """The dotted paths of what the first stage of a model alone has, of its layers, and of what the last stage alone has."""
    layers, prefix = layers_of(module), module.base_model_prefix
    names = list(_base_plan(module))
    position = next(at for at, name in enumerate(names) if getattr(module.base_model, name) is layers)
    paths = [f"{prefix}.{name}" for name in names]
    return paths[:position], paths[position], [*paths[position + 1 :], *type(module)._pp_plan]


def _base_plan(module: nn.Module) -> dict[str, object]:
    """The parts of a model's base in the order in which they work, by the plan in its config; empty where it has none.

    Source: `base_model_pp_plan` of transformers/configuration_utils.py, read in 5.17 and 5.23.
    """
    plan = getattr(module.config, "base_model_pp_plan", None) or {}
    return plan if all(hasattr(module.base_model, name) for name in plan) else {}


def layers_of(module: nn.Module) -> nn.ModuleList:
    """The layers that a model with a plan is a stack of."""
    parts = (getattr(module.base_model, name) for name in _base_plan(module))
    return next(part for part in parts if isinstance(part, nn.ModuleList))


class Passes:
    """The passes of a schedule as they go: `told("forward")` is called where forward passes end and a backward one begins,
    `told("backward")` where that ends; `context` is what each forward pass is within, autocast for example."""

    def __init__(self, told: Callable[[str], None], context: Callable[[], AbstractContextManager]) -> None:
        self.told, self.context, self.ahead = told, context, False

    def turn(self) -> None:
        """Say that forward passes end, where there were any since the last backward one."""
        if self.ahead:
            self.ahead = False
            self.told("forward")


class _ToldStage(pipelining.PipelineStage):
    """PyTorch's stage, whose passes are told."""

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
        self._passes.told("backward")


def make_schedule(
    stages: Stages, plan: Plan, tokens: Tensor, dtype: torch.dtype, logits_dtype: torch.dtype, passes: Passes
) -> Any:
    """PyTorch's schedule of the stages that a rank has for a batch of `tokens`, (batch, length), on their device.

    Hidden states are of `dtype`, logits of `logits_dtype`: what stages send each other is told beforehand, so that nobody asks.
    """
    length, row = tokens.shape[1], SCHEDULES[plan.schedule]

    def told(stage: Stage, *, ends: bool) -> Tensor:
        config = stage.model.config.get_text_config()
        if not ends and stage.first:
            return torch.empty(plan.microbatch, length, dtype=tokens.dtype, device="meta")
        logits = ends and stage.last
        width = config.vocab_size if logits else config.hidden_size
        kind = logits_dtype if logits else dtype
        return torch.empty(plan.microbatch, length, width, dtype=kind, device="meta", requires_grad=True)

    made = [
        _ToldStage(
            part,
            stage_of(part).number,
            plan.stages,
            tokens.device,
            input_args=told(stage_of(part), ends=False),
            output_args=told(stage_of(part), ends=True),
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
    """The stage that DDP is around; any other is itself."""
    return part.module if isinstance(part, nn.parallel.DistributedDataParallel) else part

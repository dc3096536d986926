"""Script of ranks that are the stages of a pipeline, cut as the trace cuts them (sizer/distributed/pipeline.py)."""

from __future__ import annotations

from torch import nn

from sizer.architecture.blueprint import Example
from sizer.architecture.checkpointing import repeated_blocks
from sizer.catalogue.parallel import SCHEDULES
from sizer.distributed.pipeline import layers_by_stage, layers_of, parts_at_ends
from sizer.estimating.work import plan_of
from sizer.query.request import Request

WORK = """\
LAYERS = {layers}  # of each stage
FIRST, LAST = {first}, {last}  # modules of only the first and only the last stage


class Stage(nn.Module):
    def __init__(self, model, number):
        super().__init__()
        self.model, self.first, self.last = model, number == 0, number == len(LAYERS) - 1
        for path in (() if self.first else FIRST) + (() if self.last else LAST):
            model.set_submodule(path, PipelineIdentityLayer())
        layers = model.get_submodule({stack!r})
        for index in range(len(layers)):  # which keep their numbers
            if index not in LAYERS[number]:
                layers[index] = PipelineIdentityLayer()

    def forward(self, inputs, **others):
        given = {{"input_ids" if self.first else "inputs_embeds": inputs, "use_cache": False, **others}}
{forward}


def work():
    mesh = init_device_mesh(device.partition(":")[0], {sizes}, mesh_dim_names={names})
    numbers = range(mesh["pp"].get_local_rank(), len(LAYERS), {pp})
    model = nn.ModuleList()
    for number in numbers:
        with torch.device("meta"):  # no rank ever has the whole model
            stage = Stage(build_model().to(dtype), number)
{sharded}        model.append(stage)
    model.train().to_empty(device=device)
    with torch.no_grad():  # any values will do
        for buffer in model.buffers():
            buffer.zero_()
        for parameter in model.parameters():
            {local}.normal_(0, 0.02)
    last = model[-1].model
{replicated}{optimizers}    with torch.device(device):
        _, kwargs, _ = make_batch()
    tokens, labels = kwargs.pop("input_ids"), kwargs.pop("labels")
    others = {{name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)}}

    def loss_of(logits, labels):
{loss}

    ids = torch.empty({microbatch}, {length}, dtype=tokens.dtype, device="meta")
    hidden = torch.empty({microbatch}, {length}, {width}, dtype=torch.{hidden}, device="meta", requires_grad=True)
    logits = torch.empty({microbatch}, {length}, {words}, dtype=torch.{logits}, device="meta", requires_grad=True)
    stages = [
        PipelineStage(
            part,
            number,
            len(LAYERS),
            torch.device(device),
            input_args=hidden if number else ids,
            output_args=logits if number == len(LAYERS) - 1 else hidden,
            group=mesh["pp"].get_group(),
        )
        for part, number in zip(model, numbers)
    ]
    schedule = {schedule}({stages}, n_microbatches={microbatches}, loss_fn=loss_of)
    given = (tokens,) if 0 in numbers else ()
    wanted = {{"target": labels, "losses": []}} if len(LAYERS) - 1 in numbers else {{}}
    start()
    for _ in range(2):
        schedule.step(*given, **wanted, return_outputs=False, **others)
{step}


"""
FORWARD = "return self.model(**given).logits if self.last else self.model.base_model(**given).last_hidden_state"
LOSS = "return last.loss_function(logits=logits, labels=labels, vocab_size={words})"
SHARDED = """\
        options = {{"mesh": mesh["shard"], "reshard_after_forward": {reshard}}}
{policy}        for name in {blocks}:
            if not isinstance(block := stage.model.get_submodule(name), PipelineIdentityLayer):
                fully_shard(block, **options)
        fully_shard(stage, **options)
"""
POLICY = """\
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.{half}, reduce_dtype=torch.float32)
"""
REPLICATED = """\
    for number, stage in enumerate(model):
        model[number] = DistributedDataParallel(stage, process_group=mesh["replicate"].get_group())
"""


def pipeline_imports(request: Request) -> tuple[str, ...]:
    """Return the script's imports for its stages and its schedule."""
    return (
        "from torch import nn",
        f"from torch.distributed.pipelining import PipelineStage, {SCHEDULES[request.schedule].class_name}",
        "from transformers.distributed.pipeline_parallel import PipelineIdentityLayer",
    )


def pipeline_lines(
    request: Request, module: nn.Module, example: Example, *, context: str, optimizers: str, step: str
) -> str:
    """Return the work of the script for a model on meta.

    `context` is autocast's, `step` the lines at a step's end.
    """
    plan = plan_of(request)
    assert plan is not None, "pipelines have a plan"
    config, row = module.config.get_text_config(), SCHEDULES[request.schedule]
    (dtype,), (batch,) = request.dtypes, request.batches
    half, mixed = dtype.removeprefix("amp-"), dtype.startswith("amp-")
    replicates = request.parallel == "ddp"
    sizes = {"pp": plan.pp} | (
        {"replicate": plan.ranks} if replicates else {"shard": plan.ranks} if plan.shards else {}
    )
    first, stack, last = parts_at_ends(module)

    def within(line: str) -> str:
        """Return a line of a function, in autocast if FSDP2 does not cast."""
        return f"        with {context}:\n            {line}" if mixed and not plan.shards else f"        {line}"

    return WORK.format(
        layers=layers_by_stage(len(layers_of(module)), plan.stages),
        first=tuple(first),
        last=tuple(last),
        stack=stack,
        forward=within(FORWARD),
        loss=within(LOSS.format(words=config.vocab_size)),
        sizes=tuple(sizes.values()),
        names=tuple(sizes),
        pp=plan.pp,
        sharded=_sharded(request, module, half if mixed else None) if plan.shards else "",
        replicated=REPLICATED if replicates else "",
        local="parameter.to_local()" if plan.shards else "parameter",
        optimizers=optimizers,
        words=config.vocab_size,
        width=config.hidden_size,
        length=example.kwargs["input_ids"].shape[1],
        hidden=half if plan.shards or not mixed else "float32",
        logits=half,
        microbatch=request.microbatch,
        microbatches=batch // request.microbatch,
        schedule=row.class_name,
        stages="stages" if row.stages > 1 else "stages[0]",
        step=step,
    )


def _sharded(request: Request, module: nn.Module, half: str | None) -> str:
    blocks = {id(block) for block in repeated_blocks(module)}
    return SHARDED.format(
        reshard=bool(request.reshard) if request.reshard < 2 else request.reshard,
        policy=POLICY.format(half=half) if half else "",
        blocks=[name for name, part in module.named_modules() if id(part) in blocks],
    )

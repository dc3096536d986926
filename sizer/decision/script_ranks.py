"""Lines of a script that `torchrun` starts on every rank: process group, the rank's part of the model, and its memory.

Tensor parallelism is transformers' plan in PyTorch's own parallel styles, which hold the same memory
(tests/distributed/test_sequence_parallel.py).
"""

from __future__ import annotations

from torch import nn

from sizer.architecture.checkpointing import repeated_blocks
from sizer.base.errors import BuildError, RequestError
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.modes import MODES
from sizer.catalogue.parallel import PARALLELS, PER_HOST
from sizer.decision.script_pipeline import pipeline_imports
from sizer.distributed.tensor_parallel import Style, styles
from sizer.query.request import Request
from sizer.report.estimate import Estimate

DEVICE = """\
device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"\
"""
REPLICATED = """\
    model = DistributedDataParallel(build_model(){cast}.to(device).train())
"""
SPLIT = """\
    with torch.device("meta"):  # no rank ever has the whole model
        model = build_model(){cast}
    mesh = init_device_mesh(device.partition(":")[0], {sizes}, mesh_dim_names={names})
{lines}    model.train().to_empty(device=device)
    with torch.no_grad():  # any values will do
        for buffer in model.buffers():
            buffer.zero_()
        for parameter in model.parameters():
            {local}.normal_(0, 0.02)
"""
SHARDED = """\
    options = {{"mesh": {mesh}, "reshard_after_forward": {reshard}}}
{policy}    for name in {blocks}:
        fully_shard(model.get_submodule(name), **options)
    fully_shard(model, **options)
"""
POLICY = """\
    options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.{half}, reduce_dtype=torch.float32)
"""
MAIN = """\
if __name__ == "__main__":
    if device != "cpu":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, measure())
    if dist.get_rank() == 0:
        for rank, sizes in enumerate(found):
            for name, size in sizes.items():
                print(f"rank {{rank}}: {{name}} at the peak: {{size:,}} bytes ({{size / 2**30:.2f}} GiB)")
        print("Sizer's estimate for {gpu}, {whose}: {figures}")
        if device == "cpu":
            print("On this CPU gloo frees in a thread that the profiler does not see: figures may come out too high.")
    dist.destroy_process_group()
    if device == "cpu":  # gloo's thread may still free a tensor, for which it would ask Python, which has ended by then
        sys.stdout.flush()
        os._exit(0)
"""


def check_scripted(request: Request) -> None:
    """Raise BuildError for a way of working together that no plain program is written for."""
    if request.parallel == "none":
        return
    if request.offload or not MODES[request.mode].trains:
        raise BuildError(
            "scripts of several ranks train, and keep everything on their devices",
            given="offload=1" if request.offload else f"mode={request.mode}&parallel={request.parallel}",
        )
    if request.pp > 1 and request.tp > 1:
        raise BuildError(
            "no script can be written for a pipeline with tensor parallel",
            given=f"pp={request.pp}&tp={request.tp}",
        )
    if request.cp > 1:
        raise BuildError(
            "scripts of several ranks also run on the CPU, and PyTorch's context parallel has no rule for its attention kernel",
            given=f"cp={request.cp}",
        )


def command(request: Request) -> str:
    """Return the command that starts the script, on one machine or on each of several."""
    if request.world <= PER_HOST:
        return f"torchrun --nproc-per-node {request.world} this_file.py"
    nodes = -(-request.world // PER_HOST)
    meeting = "--rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return f"torchrun --nnodes {nodes} --nproc-per-node {PER_HOST} {meeting} this_file.py"


def rank_imports(request: Request, module: nn.Module) -> tuple[str, ...]:
    """Return the script's imports for the model, which `module` is on meta."""
    imports = ["import torch.distributed as dist", *tensor_imports(request, module)]
    if splits(request):
        imports += ["from torch.distributed.device_mesh import init_device_mesh"]
    if request.pp > 1:
        imports += pipeline_imports(request)
    if request.parallel in ("ddp", "zero1"):
        imports += ["from torch.nn.parallel import DistributedDataParallel"]
    if PARALLELS[request.parallel].shards:
        policy = "MixedPrecisionPolicy, " if request.dtypes[0].startswith("amp-") else ""
        imports += [f"from torch.distributed.fsdp import {policy}fully_shard"]
    if request.parallel == "zero1":
        imports += ["from torch.distributed.optim import ZeroRedundancyOptimizer"]
    return tuple(imports)


def splits(request: Request) -> bool:
    """Return whether no rank ever has the whole model."""
    return PARALLELS[request.parallel].shards or request.tp > 1 or request.pp > 1


def model_lines(request: Request, module: nn.Module, cast: str) -> str:
    """Return the lines that make a rank's part of the model, which `module` is on meta.

    `cast` is the call that sets its dtype.
    """
    if not splits(request):
        return REPLICATED.format(cast=cast)
    shards = PARALLELS[request.parallel].shards
    sizes = {
        **({"replicate": request.replicate} if request.parallel == "hsdp" else {}),
        **({"shard": request.ranks} if shards else {}),
    }
    sharding = tuple(sizes)
    if request.tp > 1:
        sizes["tp"] = request.tp
    mesh = "mesh" if request.tp == 1 else f"mesh[{', '.join(map(repr, sharding))}]"
    whole = "(parameter.to_local() if isinstance(parameter, DTensor) else parameter)"
    return SPLIT.format(
        cast=cast,
        sizes=tuple(sizes.values()),
        names=tuple(sizes),
        lines=tensor_lines(request, module) + (_sharded(request, module, mesh) if shards else ""),
        local="parameter.to_local()" if shards else whole,
    )


def _sharded(request: Request, module: nn.Module, mesh: str) -> str:
    blocks = {id(block) for block in repeated_blocks(module)}
    mixed = request.dtypes[0].startswith("amp-")
    return SHARDED.format(
        mesh=mesh,
        reshard=bool(request.reshard) if request.reshard < 2 else request.reshard,
        policy=POLICY.format(half=request.dtypes[0].removeprefix("amp-")) if mixed else "",
        blocks=[name for name, part in module.named_modules() if id(part) in blocks],
    )


def main_lines(request: Request, estimate: Estimate) -> str:
    """Return the end of the script, which prints each rank's memory next to the estimate."""
    sizes = {"allocated": estimate.peak_allocated_bytes, "reserved": estimate.peak_reserved_bytes}
    return MAIN.format(
        gpu=find_gpu(request.gpu).name,
        whose="the rank that needs most" if request.rank is None else f"rank {request.rank}",
        figures=", ".join(f"{name} {size:,} bytes" for name, size in sizes.items()),
    )


PLAN = """\
    plan = {{
{rules}    }}
    parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
{tied}"""
TIED = """\
    model.tie_weights()
"""


def tensor_imports(request: Request, module: nn.Module) -> tuple[str, ...]:
    """Return the imports of a script that splits matrices of a model."""
    if request.tp == 1:
        return ()
    plan = _plan(request, module)
    classes = {style.name for style in plan.values()} | {"parallelize_module"}
    if request.lp:
        classes.add("loss_parallel")
    kinds = [kind for kind in ("Replicate", "Shard") if any(kind in str(style) for style in plan.values())]
    if not PARALLELS[request.parallel].shards:
        kinds.insert(0, "DTensor")  # some parameters are whole
    listed = "".join(f"    {name},\n" for name in sorted(classes, key=str.lower))
    return (
        f"from torch.distributed.tensor import {', '.join(kinds)}",
        f"from torch.distributed.tensor.parallel import (\n{listed})",
    )


def tensor_lines(request: Request, module: nn.Module) -> str:
    """Return the lines that split the matrices of a model on meta; empty without tensor parallel."""
    if request.tp == 1:
        return ""
    rules = "".join(f"        {name!r}: {style},\n" for name, style in _plan(request, module).items())
    return PLAN.format(rules=rules, tied=TIED if module.config.get_text_config().tie_word_embeddings else "")


def _plan(request: Request, module: nn.Module) -> dict[str, Style]:
    try:
        return styles(module, sequence=request.sp, loss=request.lp)
    except RequestError:
        raise BuildError(
            "no script can be written for tensor parallel by styles that are transformers' own",
            given=type(module).__name__,
        ) from None

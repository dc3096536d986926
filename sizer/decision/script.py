"""A PyTorch program that runs a question's work on a real device, and prints its memory. It needs no Sizer."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from sizer.architecture.blueprint import Example
from sizer.architecture.calls import CALLS
from sizer.architecture.examples.example_spec import takes
from sizer.architecture.greedy_generation import generation_options, prompt_of
from sizer.architecture.peft_adapters import base_of
from sizer.base.errors import BuildError
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.modes import KEPT, MODES
from sizer.catalogue.optimizers import OPTIMIZERS
from sizer.catalogue.parallel import PARALLELS
from sizer.catalogue.recipes import RECIPE_KEYS
from sizer.decision.script_models import Parts, is_quantized, parts_of, training_imports, training_lines
from sizer.decision.script_pipeline import pipeline_lines
from sizer.decision.script_ranks import DEVICE, command, main_lines, model_lines, rank_imports
from sizer.decision.script_text import GENERATION, HEAD, INFERENCE, MAIN, MAIN_BESIDE, TAIL, TRAINING, value_code
from sizer.distributed.passes import rank_example
from sizer.estimating.tracer import Tracer
from sizer.estimating.work import plan_of
from sizer.query.keys import KEYS
from sizer.query.request import Request
from sizer.query.text import format_query
from sizer.report.estimate import Estimate
from sizer.tracing.steps import INIT_SCALE

MAX_LETTERS = 60_000


def write_script(request: Request, tracer: Tracer, *, estimate: Estimate | None = None) -> str:
    """Return the program for the one dtype and batch size of a request; `tracer` has built its model.

    It prints the `estimate` next to the measured memory. Raises BuildError if a plain program cannot make the model or its
    inputs.
    """
    if request.compile is not None:
        raise BuildError(
            "no script is written for compiled code", given=f"compile={request.compile}", todo="leave compile out"
        )
    if asked := [key for key in RECIPE_KEYS if not KEYS[key].is_default(request)]:
        given = ", ".join(f"{key}={KEYS[key].write(request)}" for key in asked)
        raise BuildError("no script is written for training recipes", given=given, todo=f"leave {asked[0]} out")
    if request.is_of_pipeline:
        todo = "take the script of diffusers' examples"
        raise BuildError("no script is written for a denoiser's training", given=f"diffusers:{request.name}", todo=todo)
    blueprint, module = tracer.built()
    trains = MODES[request.mode].trains
    example = rank_example(blueprint.example(request.batches[0], trains), plan_of(request))
    base = base_of(module)
    if any(takes(type(base), name) for name in CALLS):
        raise BuildError(
            "no script can be written for a model that takes objects of transformers' own", given=blueprint.name
        )
    parts = parts_of(request, blueprint, base, example)
    quantized = is_quantized(blueprint)
    limited = training_lines(request, module, quantized=quantized)
    imports = training_imports(request, quantized=quantized)
    imports = (*parts.imports, *imports, *(rank_imports(request, module) if _spread(request) else ()))
    if request.fla:
        imports = (*imports, "import fla  # transformers' models use flash-linear-attention where it is installed")
    parts = replace(parts, imports=imports, build=f"{parts.build}{limited}")
    placed = "" if quantized else ".to(dtype).to(device)"
    if MODES[request.mode].generates:
        example = Example(kwargs=prompt_of(example))
        parts = replace(parts, imports=(*parts.imports, "from transformers import GenerationConfig"))
        options = _options(request, module)
        body = GENERATION.format(placed=placed, options=options, context=_without_gradients(request))
    elif trains:
        placed = ".to(device)" if request.train == "adapter" and placed else placed
        alone = request.pp == 1
        body = _training(request, parts, module, placed=placed) if alone else _pipeline(request, module, example)
    else:
        body = INFERENCE.format(placed=placed, step=_inference_step(request))
    main = MAIN if estimate is None else _beside(request, estimate)
    script = f"{_head(request, parts, example, blueprint.class_name)}{body}{TAIL}{main}"
    if len(script) > MAX_LETTERS:
        raise BuildError("a script would be too long: it would contain the complete config", given=f"{len(script):,} letters")
    return script


def _beside(request: Request, estimate: Estimate) -> str:
    """Return the end of the script, which prints the measured and the estimated memory."""
    if request.parallel != "none":
        return main_lines(request, estimate)
    gpu = find_gpu(request.gpu)
    allocated, reserved = estimate.peak_allocated_bytes, estimate.peak_reserved_bytes
    of_kind = {"cuda": {"allocated": allocated, "reserved": reserved}, "mps": {"driver": reserved}}
    return MAIN_BESIDE.format(figures=of_kind.get(gpu.backend, {"allocated": allocated}), gpu=gpu.name)


def _head(request: Request, parts: Parts, example: Example, class_name: str) -> str:
    (dtype,), (batch,) = request.dtypes, request.batches
    optimizer, trains = OPTIMIZERS[request.optimizer], MODES[request.mode].trains
    imports = [
        "import torch",
        *parts.imports,
        *(["from torch.nn import functional"] if "functional." in parts.loss else []),
        *([f"import {optimizer.module}"] if trains and optimizer.package != "torch" else []),
    ]
    alone = f'device = sys.argv[1] if len(sys.argv) > 1 else "{find_gpu(request.gpu).backend}"'
    return HEAD.format(
        title=f"{MODES[request.mode].headline} {class_name} in {dtype} at batch {batch}.",
        query=_short(format_query(request)),
        imports="\n".join(sorted(imports, key=lambda line: line.split()[1])),
        command=command(request) if _spread(request) else "python this_file.py [cuda | cpu | mps]",
        arguments="os\nimport sys" if _spread(request) else "sys",  # needed to select the device
        device=(DEVICE if _spread(request) else alone) + ("\n" + BENCHMARK if request.cudnn_benchmark else ""),
        weights="float32" if dtype.startswith("amp-") else dtype,
        build=parts.build,
        args=value_code(example.args, cast=True),
        kwargs=_kwargs(example),
        targets=value_code(example.targets),
    )


BENCHMARK = "torch.backends.cudnn.benchmark = True"


def _kwargs(example: Example) -> str:
    items = (f"{name!r}: {value_code(value, cast=name != 'labels')}" for name, value in example.kwargs.items())
    return "{" + ", ".join(items) + "}"


def _short(query: str) -> str:
    """Return a query in one line without a config's text, so that it ends no quotes."""
    return query if len(query) <= 400 else f"{query[:400]}..."


def _autocast(request: Request) -> str:
    half = request.dtypes[0].removeprefix("amp-")
    return f"torch.autocast(device.partition(':')[0], dtype=torch.{half})"


def _spread(request: Request) -> bool:
    """Return whether several ranks run the script."""
    return request.parallel != "none"


def _training(request: Request, parts: Parts, module: nn.Module, *, placed: str) -> str:
    (dtype,) = request.dtypes
    shards = PARALLELS[request.parallel].shards  # FSDP2 casts by its own policy
    scales, mixed = dtype == "amp-float16", dtype.startswith("amp-") and not shards
    lines = _optimizers(request)
    forward = "loss = loss_of(model, *batch)"
    step = [f"with {_autocast(request)}:", f"    {forward}"] if mixed else [forward]
    if request.accumulate > 1:
        step += [f"loss = loss / {request.accumulate}"]
    step += ["scaler.scale(loss).backward()" if scales else "loss.backward()", "del loss"]
    if request.lp:
        step = ["with loss_parallel():", *(f"    {line}" for line in step)]
    if request.accumulate > 1:
        if _spread(request) and not shards:
            step.insert(
                0, f"model.require_backward_grad_sync = number == {request.accumulate - 1}  # as no_sync() does"
            )
        step = [f"for number in range({request.accumulate}):", *(f"    {line}" for line in step)]
    if lines:
        each = "scaler.step(optimizer)" if scales else "optimizer.step()"
        step += ["for optimizer in optimizers:", f"    {each}", *(["scaler.update()"] if scales else [])]
    step += ["model.zero_grad()"]
    if request.outputs == KEPT:
        step.insert(-1, "held.clear()")
        lines += ["held = {}", "model.register_forward_hook(lambda module, inputs, output: held.update(output=output))"]
    if scales:
        lines += [f"scaler = torch.amp.GradScaler(device.partition(':')[0], init_scale={INIT_SCALE})"]
    cast = "" if request.train == "adapter" else ".to(dtype)"
    alone = f"    model = build_model(){placed}.train()\n"
    return TRAINING.format(
        loss=parts.loss,
        model=model_lines(request, module, cast) if _spread(request) else alone,
        optimizers=_indent(lines, 4) + ("\n" if lines else ""),
        step=_indent(step, 8),
    )


def _pipeline(request: Request, module: nn.Module, example: Example) -> str:
    lines = _optimizers(request)
    step = ["for optimizer in optimizers:", "    optimizer.step()"] if lines else []
    return pipeline_lines(
        request,
        module,
        example,
        context=_autocast(request),
        optimizers=_indent(lines, 4) + ("\n" if lines else ""),
        step=_indent([*step, "model.zero_grad()"], 8),
    )


def _without_gradients(request: Request) -> str:
    mixed = request.dtypes[0].startswith("amp-")
    return f"torch.no_grad(), {_autocast(request)}" if mixed else "torch.no_grad()"


def _options(request: Request, module: nn.Module) -> str:
    options = generation_options(module, new=request.new, cache=request.cache)
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _inference_step(request: Request) -> str:
    return _indent([f"with {_without_gradients(request)}:", "    output = model(*args, **kwargs)", "del output"], 8)


def _optimizers(request: Request) -> list[str]:
    """Return the lines that make the optimizers; empty without an optimizer."""
    if OPTIMIZERS[request.optimizer].class_name is None:
        return []
    how = {None: "", "loop": ", foreach=False", "foreach": ", foreach=True", "fused": ", fused=True"}[
        request.optimizer_impl
    ]
    lines = ["parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]"]
    sharded = request.parallel == "zero1"
    if request.optimizer != "muon":
        return [*lines, f"optimizers = [{_optimizer(request.optimizer, 'parameters', how, sharded)}]"]
    muon, adamw = _optimizer("muon", "matrices", "", sharded), _optimizer("adamw", "others", how, sharded)
    return [
        *lines,
        "matrices = [parameter for parameter in parameters if parameter.ndim == 2]",
        "others = [parameter for parameter in parameters if parameter.ndim != 2]",
        f"optimizers = [{muon}, {adamw}]",
    ]


def _optimizer(key: str, parameters: str, how: str, sharded: bool) -> str:
    row = OPTIMIZERS[key]
    options = "".join(f", {name}={value!r}" for name, value in row.options.items())
    made = f"{row.module}.{row.class_name}"
    if sharded:
        return f"ZeroRedundancyOptimizer({parameters}, {made}{options}{how})"
    return f"{made}({parameters}{options}{how})"


def _indent(lines: list[str], width: int) -> str:
    return "\n".join(f"{' ' * width}{line}" for line in lines)

"""Parts of a script that depend on the source of a model: its construction, its weights, its trained part and its task."""

from __future__ import annotations

import pprint
from dataclasses import dataclass, replace
from keyword import iskeyword

import transformers
from torch import nn

from sizer.architecture.blueprint import Blueprint, Example
from sizer.architecture.checkpointing import repeated_blocks
from sizer.architecture.peft_adapters import arguments_of, base_of, task_of
from sizer.architecture.torchvision_models import auxiliary_weight_of, build_options, class_name_of, task_name_of
from sizer.architecture.trained_part import head_of, towers_of
from sizer.architecture.vision_inputs import FLOW_GAMMA, FLOW_LIMIT, SEGMENTATION_AUXILIARY
from sizer.base.errors import BuildError
from sizer.catalogue.adapters import ADAPTERS, ATTENTION, WITHOUT_TOWER
from sizer.catalogue.optimizers import BITSANDBYTES
from sizer.catalogue.sources import SOURCES
from sizer.catalogue.weights import WEIGHTS
from sizer.query.request import Request
from sizer.tracing import trace

CHECKPOINTED = """\
    def checkpointed(forward):
        def run(*args, **kwargs):
            kept = [list(value) if isinstance(value, list) else value for value in args]
            return checkpoint(forward, *kept, use_reentrant=False, **kwargs)

        return run

    for name in {names}:
        block = model.get_submodule(name)
        block.forward = checkpointed(block.forward)
"""
CROSS_ENTROPY = "    return functional.cross_entropy(model(*args), targets)\n"
WITH_AUXILIARY = """\
    logits, *others = model(*args)
    return functional.cross_entropy(logits, targets) + sum(
        {weight} * functional.cross_entropy(other, targets) for other in others
    )
"""
SEGMENTATION = """\
    output = model(*args)
    loss = functional.cross_entropy(output["out"], targets, ignore_index=255)
    if "aux" in output:
        loss = loss + {weight} * functional.cross_entropy(output["aux"], targets, ignore_index=255)
    return loss
"""
DETECTION = "    return sum(model(*args, targets).values())\n"
FLOW = """\
    predictions = torch.stack(model(*args))
    flow, valid = targets
    counted = (valid & (flow.square().sum(dim=1).sqrt() < {limit}))[:, None]
    errors = ((predictions - flow).abs() * counted).mean(dim=(1, 2, 3, 4))
    ages = torch.arange(len(predictions) - 1, -1, -1, device=errors.device)
    return (errors * {gamma}**ages).sum()
"""
OWN_LOSS = """\
    return model(**kwargs).loss
"""
STAND_IN = """\
    def tensors(value):
        if isinstance(value, torch.Tensor):
            return [value]
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        return [tensor for item in items for tensor in tensors(item)]

    # The model has no loss: the means of its outputs replace it.
    return torch.stack([tensor.float().mean() for tensor in tensors(model({arguments})) if tensor.requires_grad]).sum()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Lines of Python: imports, and the bodies of `build_model` (up to `return model`) and of `loss_of`."""

    imports: tuple[str, ...]
    build: str
    loss: str


def parts_of(request: Request, blueprint: Blueprint, module: nn.Module, example: Example) -> Parts:
    """Return the parts for a request's model, which `module` is on meta. Raises BuildError if it has no script."""
    package = SOURCES[request.source].package
    if package == "torchvision":
        return _torchvision(request, blueprint)
    if package == "timm":
        return _timm(request, blueprint)
    return _transformers(request, blueprint, module, example)


def _torchvision(request: Request, blueprint: Blueprint) -> Parts:
    task = task_name_of(request.name)
    assert blueprint.image_size is not None, "torchvision's models read images"
    options = "".join(
        f", {name}={value!r}" for name, value in build_options(
            request.name,
            blueprint.image_size,
            classes=request.classes,
            trainable_layers=request.trainable_layers,
        ).items()
    )
    build = f"    model = torchvision.models.get_model({request.name!r}, weights=None{options})\n"
    imports: tuple[str, ...] = ("import torchvision",)
    if task == "detection":
        build += "    model.transform.torch_choice = max  # always resize images to the largest size\n"
    if request.checkpointing:
        imports += ("from torch.utils.checkpoint import checkpoint",)
        plain = trace.build(replace(blueprint, limit=None))  # in a checkpointed model every block has a separate class
        blocks = {id(block) for block in repeated_blocks(plain)}
        build += CHECKPOINTED.format(names=[name for name, child in plain.named_modules() if id(child) in blocks])
    weight = auxiliary_weight_of(class_name_of(request.name))
    loss = {
        "detection": DETECTION,
        "segmentation": SEGMENTATION.format(weight=SEGMENTATION_AUXILIARY),
        "optical_flow": FLOW.format(limit=FLOW_LIMIT, gamma=FLOW_GAMMA),
    }.get(task, WITH_AUXILIARY.format(weight=weight) if weight else CROSS_ENTROPY)
    return Parts(imports=imports, build=build, loss=loss)


def _timm(request: Request, blueprint: Blueprint) -> Parts:
    from timm.models import get_pretrained_cfg  # Sizer runs without timm, too

    from sizer.architecture.timm_models import build_options as timm_options

    assert blueprint.image_size is not None, "timm's models read images"
    options = timm_options(request.name, blueprint.image_size, classes=request.classes)
    written = "".join(f", {name}={value!r}" for name, value in options.items())
    build = f"    model = timm.create_model({request.name!r}, pretrained=False{written})\n"
    if request.checkpointing:
        build += "    model.set_grad_checkpointing(True)\n"
    classes = request.classes or get_pretrained_cfg(request.name).num_classes
    return Parts(
        imports=("import timm",), build=build, loss=CROSS_ENTROPY if classes else STAND_IN.format(arguments="*args")
    )


def _transformers(request: Request, blueprint: Blueprint, module: nn.Module, example: Example) -> Parts:
    config, model = type(module.config), type(module)
    for one in (config, model):
        if getattr(transformers, one.__name__, None) is not one:
            raise BuildError(
                "no script can be written for a class that transformers keeps to itself", given=one.__name__
            )
    build = f"    config = {config.__name__}(\n{_fields(module.config)}    )\n"
    if request.attention == "eager":
        build += '    config._attn_implementation = "eager"\n'
    names = [config.__name__, model.__name__]
    if is_quantized(blueprint):
        build += quantized_lines(request, model.__name__)
        names.append("BitsAndBytesConfig")
    else:
        build += f"    model = {model.__name__}(config)\n"
    if request.checkpointing:
        build += "    model.gradient_checkpointing_enable()\n"
    return Parts(
        imports=(f"from transformers import {', '.join(names)}",),
        build=build,
        loss=OWN_LOSS if "labels" in example.kwargs else STAND_IN.format(arguments="**kwargs"),
    )


def _fields(config: transformers.PreTrainedConfig) -> str:
    """Return the keyword arguments of a config, one a line, without those that do not describe the architecture."""
    fields = config.to_diff_dict()
    if fields.pop("id2label", None) is not None:  # names of classes: only their number counts
        fields["num_labels"] = config.num_labels
    unused = ("label2id", "transformers_version", "architectures", "model_type", "dtype", "quantization_config")
    lines = []
    for name, value in fields.items():
        if name not in unused:
            text = pprint.pformat(value, width=100, sort_dicts=False).replace("\n", "\n        ")
            lines.append(f"        {name}={text},\n" if _is_argument(name) else f"        **{{{name!r}: {text}}},\n")
    return "".join(lines)


def _is_argument(name: str) -> bool:
    return name.isidentifier() and not iskeyword(name)


QUANTIZED = """\
    with torch.device("meta"):
        whole = {model}(config)
    # Random values instead of a checkpoint's: each weight is quantized when it arrives on the device.
    weights = {{name: 0.02 * torch.randn(tensor.shape, dtype=dtype) for name, tensor in whole.named_parameters()}}
    model = {model}.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=dtype,
        device_map={{"": device}},
        quantization_config=BitsAndBytesConfig({options}),
    )
"""


def is_quantized(blueprint: Blueprint) -> bool:
    """Return whether a blueprint's weights are quantized on its device."""
    return blueprint.replace_layers is not None


def quantized_lines(request: Request, model: str) -> str:
    """Return the lines that make `model`, by the name of its class, from its config.

    Raises BuildError if its weights are quantized by other means than bitsandbytes: by their checkpoint, or by kernels of the
    hub.
    """
    row = WEIGHTS[request.weights]
    if row.package != BITSANDBYTES:
        allowed = ", ".join(key for key, one in WEIGHTS.items() if one.package == BITSANDBYTES)
        given = f"weights={request.weights}"
        raise BuildError("no script can be written for weights that are quantized so", given=given, allowed=allowed)
    options = [f"{name}={value!r}" for name, value in row.config.items() if name != "quant_method"]
    if row.has_4_bits:
        options.append(f"bnb_4bit_compute_dtype=torch.{request.compute or request.dtypes[0].removeprefix('amp-')}")
    return QUANTIZED.format(model=model, options=", ".join(options))


HEAD = """\
    model.requires_grad_(False)
    for name in {names}:
        model.get_submodule(name).requires_grad_(True)
"""
WITHOUT_TOWERS = """\
    for name in {names}:
        model.get_submodule(name).requires_grad_(False)
"""
ATTENTION_LAYERS = """\
    attention = [
        f"{path}.{name}"
        for path, part in model.named_modules()
        if "Attention" in type(part).__name__
        for name, layer in part.named_modules()
        if type(layer).__name__ in ("Linear", "Conv1D", "Linear4bit", "Linear8bitLt")
    ]
"""
PREPARED = """\
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False){checkpointed}
"""
INPUT_GRADIENTS = "\n    model.enable_input_require_grads()"  # as that does with checkpointing, which is on already
ADAPTER = """\
    config = {config}({arguments})
    model = get_peft_model({model}, config)  # which keeps its own weights in float32
"""


def training_imports(request: Request, *, quantized: bool) -> tuple[str, ...]:
    """Return the imports of a script to limit the trained part, for weights that may be quantized."""
    if request.train != "adapter":
        return ()
    prepares = ", prepare_model_for_kbit_training" if quantized and request.prepare else ""
    return (f"from peft import {ADAPTERS[request.adapter].config_class}, get_peft_model{prepares}",)


def training_lines(request: Request, module: nn.Module, *, quantized: bool) -> str:
    """Return the end of `build_model` for the model that `module` is on meta, with weights that may be quantized."""
    if request.train == "all":
        return ""
    if request.train == "head":
        heads = {id(part) for part in head_of(module)}
        return HEAD.format(names=[name for name, part in module.named_modules() if id(part) in heads])
    if request.train == WITHOUT_TOWER:
        return WITHOUT_TOWERS.format(names=list(towers_of(module)))
    base, row = base_of(module), ADAPTERS[request.adapter]
    arguments = {"task_type": task_of(base), **arguments_of(request, base)}
    named = request.adapter_targets == (ATTENTION,) and "targets" in row.arguments
    written = (
        f"{name}={ATTENTION if named and name == row.arguments['targets'] else repr(value)}"
        for name, value in arguments.items()
        if value is not None
    )
    whole = "model" if quantized else "model.to(dtype)"
    lines = ADAPTER.format(config=row.config_class, arguments=", ".join(written), model=whole)
    checkpointed = INPUT_GRADIENTS if request.checkpointing else ""
    prepared = PREPARED.format(checkpointed=checkpointed) if quantized and request.prepare else ""
    return f"{prepared}{ATTENTION_LAYERS if named else ''}{lines}"

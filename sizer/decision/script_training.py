"""Lines of a script that select the trained part of a model: its head, all but its towers, or an adapter of PEFT."""

from __future__ import annotations

from torch import nn

from sizer.architecture.peft_adapters import arguments_of, base_of, task_of
from sizer.architecture.trained_part import head_of, towers_of
from sizer.catalogue.adapters import ADAPTERS, ATTENTION, WITHOUT_TOWER
from sizer.query.request import Request

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
CHECKPOINTED = "\n    model.enable_input_require_grads()"  # as that does with checkpointing, which is on already
ADAPTER = """\
    config = {config}({arguments})
    model = get_peft_model({model}, config)  # which keeps its own weights in float32
"""


def training_imports(request: Request, *, quantized: bool) -> tuple[str, ...]:
    """Return the imports of a script to limit the trained part, for weights that may be quantised."""
    if request.train != "adapter":
        return ()
    prepares = ", prepare_model_for_kbit_training" if quantized and request.prepare else ""
    return (f"from peft import {ADAPTERS[request.adapter].config_class}, get_peft_model{prepares}",)


def training_lines(request: Request, module: nn.Module, *, quantized: bool) -> str:
    """Return the end of `build_model` for the model that `module` is on meta, with weights that may be quantised."""
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
    prepared = PREPARED.format(checkpointed=CHECKPOINTED if request.checkpointing else "") if quantized and request.prepare else ""
    return f"{prepared}{ATTENTION_LAYERS if named else ''}{lines}"

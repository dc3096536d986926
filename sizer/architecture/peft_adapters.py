"""PEFT's adapters on a built module: the result of `peft.get_peft_model`, and its dtypes.

Gradient checkpointing is switched on before, so that PEFT prepares the module as usual: it makes the embeddings' output require
a gradient (`enable_input_require_grads`, peft/peft_model.py 0.21). Only reentrant checkpointing needs this.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn

from sizer.architecture.compile_later import compiled_when_called
from sizer.architecture.frozen_parts import WithFrozenParts, inner
from sizer.base.errors import BuildError, quote, suggest
from sizer.catalogue.adapters import ADAPTERS, ALL_LINEAR, ATTENTION, PACKAGE, SCRIPT, Adapter, targets_of_script
from sizer.catalogue.recipes import ORPO, is_made_by_trl
from sizer.catalogue.weights import BITSANDBYTES, WEIGHTS
from sizer.query.request import Request

ALPHA_PER_RANK = 2  # if alpha is not given
REASON_LIMIT = 300
# Tasks that PEFT has a class for (peft/mapping.py), by the end of the name of transformers' class.
TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}
ADAPTER_NAME = "default"  # of `peft.get_peft_model`, a part of the path of all tensors of an adapter
_LINEAR = (
    "Linear",
    "Conv1D",
    "Linear4bit",
    "Linear8bitLt",
    "FP8Linear",
)  # linear layers of torch, transformers and the quantizers
# Classes of sizer.architecture.packed_layers by their names: that module imports transformers.
_DEQUANTIZED = "DequantizedLinear"
_PACKED = (_DEQUANTIZED, "PackedLinear")
_EXPERTS = "PackedExperts"


def import_peft() -> ModuleType:
    """Return PEFT; Sizer runs without it, too. Raises BuildError if it is not installed."""
    try:
        with compiled_when_called():
            return importlib.import_module(PACKAGE)
    except ModuleNotFoundError as error:
        if error.name != PACKAGE:
            raise
        raise BuildError("peft is not installed", given="train=adapter", todo="pip install peft") from error


def prepare() -> None:
    """Import PEFT, and have transformers make its table of conversions, which it keeps.

    PEFT reads that table for each adapter: some thousand regular expressions (transformers/conversion_mapping.py, 5.24).
    """
    import_peft()
    with suppress(ImportError):
        importlib.import_module("peft.utils.transformers_weight_conversion").get_checkpoint_conversion_mapping("")


def add_adapter(module: nn.Module, request: Request) -> nn.Module:
    """Return the module wrapped by PEFT, with the requested adapter: only its weights are trained.

    Raises BuildError if PEFT is not installed, or refuses the adapter for this module, with PEFT's reason.
    """
    if isinstance(module, WithFrozenParts):
        module.replace_trained(add_adapter(module.trained, request))
        return module
    row, peft = ADAPTERS[request.adapter], import_peft()
    task = task_of(module)
    if row.learns_prompt and task is None:
        raise BuildError(
            f"{row.title} needs a model of a task that PEFT knows",
            given=type(module).__name__,
            allowed=", ".join(TASKS),
        )
    if getattr(module, "hf_quantizer", None) is not None and not row.on_quantized:
        raise BuildError(
            f"{row.title} cannot be traced on quantized weights",
            given=f"adapter={row.key} with weights={request.weights}",
            allowed=", ".join(other.key for other in ADAPTERS.values() if other.on_quantized),
            todo="choose one of these, or weights=full",
        )
    if not getattr(getattr(module, "hf_quantizer", None), "is_trainable", True):
        raise BuildError(
            "the installed transformers does not train adapters on such weights",
            given=f"weights={request.weights}&train=adapter",
            todo="choose other weights, or mode=inference",
        )
    if any(type(part).__name__ == _EXPERTS for part in module.modules()):
        raise BuildError(
            "training with a checkpoint's quantized experts is not traced",
            given=quote(f"train=adapter with {type(module).__name__}"),
            todo="ask for weights=full",
        )
    _check_saved(module, request.modules_to_save)
    of_bitsandbytes = getattr(module, "quantization_method", None) == BITSANDBYTES
    by_trl = of_bitsandbytes and is_made_by_trl(request.objective, request.loss)
    if request.prepare and of_bitsandbytes and not by_trl:
        module = peft.prepare_model_for_kbit_training(module, use_gradient_checkpointing=False)  # it is on already
        torch.cuda.empty_cache()  # PEFT only does so if CUDA is available
        if request.checkpointing and not _is_of_diffusers(module):
            module.enable_input_require_grads()  # PEFT does so with checkpointing
    try:
        config = getattr(peft, row.config_class)(task_type=task, **arguments_of(request, module))
        if dequantized := {type(part) for part in module.modules() if type(part).__name__ == _DEQUANTIZED}:
            from peft.tuners.lora.gptq import GPTQLoraLinear

            config._register_custom_module(dict.fromkeys(dequantized, GPTQLoraLinear))  # PEFT knows gptqmodel's classes
        # The values are not read: known zeros would be stored for every meta tensor, which takes as long as everything else.
        made = nullcontext() if row.learns_prompt else _made_as_moved(module)
        with warnings.catch_warnings(), made, mock.patch.object(nn.init, "zeros_", lambda tensor: tensor):
            warnings.simplefilter("ignore")
            if _is_of_diffusers(module) and hasattr(module, "add_adapter"):
                module.add_adapter(config)
                _upcast_float16(module)
                return module
            adapted = peft.get_peft_model(module, config)
            if by_trl:
                _cast_as_trl(adapted)
            if of_bitsandbytes and request.objective == ORPO and request.autocast and WEIGHTS[request.weights].has_4_bits:
                from trl.experimental.utils import peft_module_casting_to_bf16

                peft_module_casting_to_bf16(adapted)  # trl/experimental/orpo/orpo_trainer.py, 1.16, with bf16=True
                torch.cuda.empty_cache()  # Trainer frees the cache before its first step (free_memory of accelerate)
    except Exception as error:  # each tuner raises various errors for a layer that it does not know
        raise BuildError(
            f"PEFT refuses {row.title} for {type(module).__name__}", given=_given(request, row), todo=_reason(error)
        ) from error
    _check_outputs(adapted, request)
    for name, tokens in getattr(adapted, "prompt_tokens", {}).items():
        # PEFT keeps their numbers on the CPU, and copies them to the device in every pass.
        adapted.prompt_tokens[name] = torch.arange(len(tokens), device="cpu")
    return adapted


def _check_outputs(adapted: nn.Module, request: Request) -> None:
    """Raise BuildError if an adapter is around a linear layer with an unusual output.

    The layer returns more than a tensor, such as Llama 4's router, or multiplies groups of features, such as DeepSeek V4's
    first output projection. PEFT's layers read the dtype of the layer's output, and add to it the adapter's row of all
    features.
    """
    for name, part in base_of(adapted).named_modules():
        layer = getattr(part, "base_layer", None)
        if not isinstance(layer, nn.Linear) or type(layer).forward is nn.Linear.forward:
            continue
        if not type(layer).__module__.startswith("transformers.models."):
            continue
        with torch.no_grad():
            try:
                found = layer(layer.weight.new_empty(1, layer.in_features))
            except RuntimeError:  # it does not accept a row of features
                found = None
        if not isinstance(found, torch.Tensor) or found.shape != (1, layer.out_features):
            what = "groups of features" if found is None else "more than a tensor"
            raise BuildError(
                f"PEFT adapts no layer that {'takes' if found is None else 'returns'} {what}",
                given=f"targets={','.join(request.adapter_targets)} with {name}, a {type(layer).__name__}",
                todo=f"ask for targets={ATTENTION}, or name layers",
            )


@contextmanager
def _made_as_moved(module: nn.Module) -> Iterator[None]:
    """Give adapters on meta the compute dtype of their layers within the context, if these name one (`Linear4bit`).

    PEFT makes adapters on the host, moves them to their layer's device and that dtype (_move_adapter_to_device_of_base_layer),
    and finally makes them float32; on meta it moves nothing.
    """
    on_meta = any(parameter.is_meta for parameter in module.parameters())
    layers = (layer for layer in module.modules() if getattr(layer, "compute_dtype", None) is not None)
    before, layer = torch.get_default_dtype(), next(layers, None) if on_meta else None
    if layer is not None:
        torch.set_default_dtype(layer.compute_dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _cast_as_trl(adapted: nn.Module) -> None:
    """Cast trained weights to bfloat16 if others are quantized, as TRL's trainers do.

    Source: trl/trainer/dpo_trainer.py and others, 1.16.
    """
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad and "lora_magnitude_vector" not in name:
            parameter.data = parameter.data.to(torch.bfloat16)


def task_of(module: nn.Module) -> str | None:
    """Return PEFT's task type of a module, None if it has none for it.

    PEFT's model of sequences passes input_ids on: an encoder of sound or pictures is adapted without a task, as in PEFT's
    examples.
    """
    name = type(module).__name__
    if name.endswith("ForConditionalGeneration") and module.config.is_encoder_decoder:
        return "SEQ_2_SEQ_LM" if module.main_input_name == "input_ids" else None
    return next((task for end, task in TASKS.items() if name.endswith(end)), None)


def arguments_of(request: Request, module: nn.Module) -> dict[str, Any]:
    """Return the arguments of an adapter's config, except the task."""
    row = ADAPTERS[request.adapter]
    values = {
        "r": request.adapter_rank,
        "alpha": request.adapter_alpha or ALPHA_PER_RANK * request.adapter_rank,
        "targets": _targets(request, module),
        "adapter_dropout": request.adapter_dropout,
    }
    saved = {"modules_to_save": list(request.modules_to_save)} if request.modules_to_save else {}
    return {name: values[key] for key, name in row.arguments.items()} | dict(row.options) | saved


def _check_saved(module: nn.Module, names: tuple[str, ...]) -> None:
    """Raise BuildError for a name of `modules_to_save` that matches no module; PEFT only raises if none of them matches."""
    paths = [path for path, _ in module.named_modules()]
    for name in names:
        # same comparison as PEFT's (_set_trainable in peft/utils/other.py, 0.21)
        if not any(path.endswith(name) for path in paths):
            raise BuildError(
                f"modules_to_save: {type(module).__name__} has no module of this name",
                given=quote(name),
                allowed="names of its modules, such as the embeddings and the head",
                todo=suggest(name, {path.rpartition(".")[2] for path in paths if path}) or "remove it",
            )


def _targets(request: Request, module: nn.Module) -> str | list[str]:
    """Return the value of PEFT's `target_modules`: its own word, or names: as given, of attention, or of a script."""
    (first, *others) = request.adapter_targets
    if first == ATTENTION:
        return attention_layers(module)
    if first == ALL_LINEAR and (packed := packed_layers(module)):
        return packed
    if first == SCRIPT:
        return list(targets_of_script(type(module).__name__, quantized=WEIGHTS[request.weights].quantizes))
    return [first, *others] if others or "-" not in first else first


def packed_layers(module: nn.Module) -> list[str]:
    """Return the paths of the linear layers of a model with a packed checkpoint, without its head; none for another model.

    PEFT's `all-linear` only finds PyTorch's layers, so users of GPTQ name these.
    """
    layers = {path: part for path, part in module.named_modules() if type(part).__name__ in (*_LINEAR, *_PACKED)}
    if not any(type(part).__name__ in _PACKED for part in layers.values()):
        return []
    head = module.get_output_embeddings()
    return [path for path, part in layers.items() if part is not head]


def attention_layers(module: nn.Module) -> list[str]:
    """Return the paths of the linear layers inside a module's attention. Raises BuildError if there are none."""
    found = {
        f"{path}.{name}": None
        for path, part in module.named_modules()
        if "Attention" in type(part).__name__
        for name, layer in part.named_modules()
        if type(layer).__name__ in (*_LINEAR, *_PACKED)
    }
    if not found:
        raise BuildError(
            "no linear layer stands in an attention of this model",
            given=f"targets={ATTENTION} with {type(module).__name__}",
            todo="name modules, or leave targets out for all linear layers",
        )
    return list(found)


def is_adapted(module: nn.Module) -> bool:
    """Return whether `add_adapter` has made this module; FSDP2 may have derived another class from its class."""
    return any(kind.__module__.partition(".")[0] == "peft" for kind in type(module).__mro__)


def base_of(module: nn.Module) -> nn.Module:
    """Return the module that `add_adapter` was given, with the adapter in it, also inside DDP; any other module unchanged."""
    module = inner(module)
    return module.get_base_model() if is_adapted(module) else module


def cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the module itself to a dtype, as `module.to(dtype)` does, except for tensors that PEFT has added.

    PEFT keeps an adapter's weights in float32 if the model is in half precision (`autocast_adapter_dtype`). In a model of
    diffusers an adapter is float32 only with float16, whose gradients are scaled (cast_training_params in diffusers' example
    scripts).
    """
    if isinstance(module, WithFrozenParts):
        cast(module.trained, dtype)
        for name, part in module.frozen().items():
            nn.Module.to(part, torch.float32 if name in module.in_float32 else dtype)
        return module
    nn.Module.to(module, dtype)  # diffusers' own warns of parts that it reads in float32
    if _is_of_diffusers(module) and adapted_layers(module):
        _upcast_float16(module)
    if is_adapted(module):
        from peft.tuners.tuners_utils import cast_adapter_dtype

        cast_adapter_dtype(module, ADAPTER_NAME)
        for prompts in _prompt_encoders(module):
            prompts.float()
    return module


def _upcast_float16(module: nn.Module) -> None:
    """Make trained weights in float16 float32, as diffusers' `cast_training_params` does (training_utils.py, 0.42)."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            parameter.data = parameter.data.float()


def _is_of_diffusers(module: nn.Module) -> bool:
    """Return True for a model of diffusers, into which adapters are injected by its own `add_adapter`."""
    return type(module).__module__.partition(".")[0] == "diffusers"


def adapted_layers(module: nn.Module) -> list[str]:
    """Return the names of the layers with an adapter of PEFT, without PEFT's wrapper around the model."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [name for name, layer in base_of(module).named_modules() if isinstance(layer, BaseTunerLayer)]


def _prompt_encoders(module: nn.Module) -> Iterator[nn.Module]:
    encoders = getattr(module, "prompt_encoder", None)
    if encoders is not None:
        yield encoders


def _given(request: Request, row: Adapter) -> str:
    targets = f"&targets={','.join(request.adapter_targets)}" if "targets" in row.arguments else ""
    return quote(f"adapter={row.key}{targets}")


def _reason(error: Exception) -> str:
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= REASON_LIMIT else f"{line[:REASON_LIMIT]}..."

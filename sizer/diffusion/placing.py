"""Placement of a pipeline: moved, offloaded, cast to 8 bits or quantized, by the libraries' own functions.

Called within a trace, where tensors on meta behave as tensors of the host and of a CUDA device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from sizer.architecture.frozen_parts import trained_part
from sizer.base.errors import RequestError
from sizer.catalogue.pipelines import CAST, DENOISERS, SECOND_DENOISER
from sizer.diffusion.building import is_of_transformers

NF4, NF4_TWICE, INT8 = "nf4", "nf4-dq", "int8"
BITSANDBYTES: dict[str, dict[str, Any]] = {
    NF4: {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    NF4_TWICE: {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    INT8: {"load_in_8bit": True},
}
NONE, MODEL, SEQUENTIAL, LEAVES, BLOCKS = "none", "model", "sequential", "group-leaf", "group-block"
# Defined here, because a device that this module's code names within a trace becomes meta.
_CUDA, _HOST = torch.device("cuda", 0), torch.device("cpu")


def place(
    pipe: Any,
    *,
    dtype: torch.dtype,
    offload: str = NONE,
    stream: bool = False,
    vae: tuple[str, ...] = (),
    weights: dict[str, str],
) -> None:
    """Move a pipeline to the device; `weights` are the formats of single parts' weights, by name.

    Raises:
        RequestError: The pipeline has no such part, or its VAE or offloading does not support the request.
        BuildError: A package is missing.
    """
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    for name, how in weights.items():
        if name not in parts:
            raise RequestError(
                "weights", given=f"{name}:{how}", allowed=f"parts {', '.join(parts)}", todo="name one of these"
            )
        if how == CAST:
            _cast(parts[name], dtype)
        else:
            setattr(pipe, name, _quantized(parts[name], how, dtype))
    _offload(pipe, offload, stream)
    for name in vae:
        enable = getattr(getattr(pipe, "vae", None), f"enable_{name}", None)
        if enable is None:
            kind = type(getattr(pipe, "vae", None)).__name__
            raise RequestError("vae", given=name, allowed=f"what {kind} has", todo=f"remove {name}")
        enable()
    pipe.set_progress_bar_config(disable=True)


def _offload(pipe: Any, offload: str, stream: bool) -> None:
    kind, _, blocks = offload.partition(":")
    if kind == NONE:
        pipe.to(_CUDA)
    elif kind == MODEL:
        pipe.enable_model_cpu_offload()
    elif kind == SEQUENTIAL:
        pipe.enable_sequential_cpu_offload()
    else:
        from diffusers.hooks import apply_group_offloading

        group_options = {"offload_type": "leaf_level", "use_stream": stream}
        if kind == BLOCKS:
            group_options |= {"offload_type": "block_level", "num_blocks_per_group": int(blocks or 1)}
        for name, part in pipe.components.items():
            if not isinstance(part, nn.Module):
                continue
            if name.startswith("vae"):  # decoded outside of `forward`, where group offloading has no hooks
                part.to(_CUDA)
            else:
                apply_group_offloading(part, onload_device=_CUDA, offload_device=_HOST, **group_options)


def _cast(part: nn.Module, dtype: torch.dtype) -> None:
    if hasattr(part, "enable_layerwise_casting"):
        part.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=dtype)
        return
    from diffusers.hooks import apply_layerwise_casting

    apply_layerwise_casting(part, storage_dtype=torch.float8_e4m3fn, compute_dtype=dtype)


def _quantized(part: nn.Module, how: str, dtype: torch.dtype) -> nn.Module:
    """Return a part as `from_pretrained(quantization_config=BitsAndBytesConfig(...))` loads it: on the device, weight by weight."""
    from sizer.architecture import quantizers  # imports transformers' quantizers

    quantizers.import_bitsandbytes(f"weights={how}")
    if not is_of_transformers(part):
        return _by_diffusers(part, how, dtype)
    config = {"quant_method": "bitsandbytes", **BITSANDBYTES[how]}
    in_float32 = [path for path, value in part.named_parameters() if value.dtype == torch.float32 != dtype]
    made = quantizers.replace_layers(part, config, str(dtype).removeprefix("torch."), given=f"weights={how}")
    _keep_in_float32(made, in_float32)
    return quantizers.load_quantized(made, "cuda").requires_grad_(False)


def _keep_in_float32(part: nn.Module, paths: list[str]) -> None:
    """Cast the parameters back that a checkpoint is read into in float32, as T5's `wo` in float16, unless they are quantized."""
    for path in paths:
        parent, _, name = path.rpartition(".")
        module = part.get_submodule(parent)
        value = module._parameters.get(name)
        if value is not None and type(value) is nn.Parameter and value.is_floating_point():
            module._parameters[name] = nn.Parameter(value.detach().to(torch.float32), requires_grad=False)


def _by_diffusers(part: nn.Module, how: str, dtype: torch.dtype) -> nn.Module:
    weights, buffers = dict(part.named_parameters()), dict(part.named_buffers())
    replace_layers(part, BITSANDBYTES[how], dtype)
    quantizer = part.hf_quantizer
    _warm_up(part, _CUDA)
    if "bnb_4bit_use_double_quant" in BITSANDBYTES[how]:
        _fill_table("cuda")
    for path, value in weights.items():
        if quantizer.check_if_quantized_param(part, value, path, {}):
            quantizer.create_quantized_param(part, value, path, _CUDA, {}, [])
        else:
            parent, _, name = path.rpartition(".")
            moved = nn.Parameter(value.to(_CUDA), requires_grad=False)
            part.get_submodule(parent)._parameters[name] = moved
    for path, value in buffers.items():
        parent, _, name = path.rpartition(".")
        part.get_submodule(parent)._buffers[name] = value.to(_CUDA)
    quantizer.postprocess_model(part)
    return part


def replace_layers(
    part: nn.Module, options: Mapping[str, Any], dtype: torch.dtype, *, compute: torch.dtype | None = None
) -> nn.Module:
    """Put bitsandbytes' layers into a part of diffusers, as `from_pretrained(quantization_config=...)` does before it loads.

    Args:
        part: A model of diffusers in `dtype`.
        options: Arguments of diffusers' BitsAndBytesConfig.
        dtype: The dtype of unquantized parameters.
        compute: The compute dtype of 4-bit layers; `dtype` by default.
    """
    from diffusers import BitsAndBytesConfig
    from diffusers.quantizers.auto import DiffusersAutoQuantizer

    dtypes = {"bnb_4bit_compute_dtype": compute or dtype} if "load_in_4bit" in options else {}
    quantizer = DiffusersAutoQuantizer.from_config(BitsAndBytesConfig(**options, **dtypes), pre_quantized=False)
    in_float32 = list(getattr(part, "_keep_in_fp32_modules", None) or [])
    kept = in_float32 if getattr(quantizer, "use_keep_in_fp32_modules", False) else []
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # dtype of the weights that will be loaded into the layers made here
    try:
        quantizer.preprocess_model(model=part, device_map={"": _CUDA}, keep_in_fp32_modules=kept)
    finally:
        torch.set_default_dtype(before)
    part.hf_quantizer, part.is_quantized, part.quantization_method = quantizer, True, "bitsandbytes"
    return part


def load_replaced(module: nn.Module, device: str = "meta") -> nn.Module:
    """Return a module with the part of `replace_layers` on a device: each weight arrives, and is quantized there."""
    from sizer.architecture.quantizers import load_weight, move_buffers

    part = trained_part(module)
    _warm_up(part, torch.device(device))
    if part.hf_quantizer.quantization_config.to_dict().get("bnb_4bit_use_double_quant"):
        _fill_table(device)
    for layer in module.modules():
        for name, old in list(layer._parameters.items()):
            if old is not None:
                load_weight([(layer, name)], old, device, quantize=True)
    move_buffers(module, device)
    part.hf_quantizer.postprocess_model(part)
    return module


def _warm_up(part: nn.Module, device: torch.device) -> None:
    """Allocate and free a part's future memory, as diffusers does before it loads weights to a device (ModelMixin, 0.42)."""
    from diffusers.models.model_loading_utils import _caching_allocator_warmup

    names = [name for name, _ in part.named_parameters()]
    _caching_allocator_warmup(part, dict.fromkeys(names, device), part.dtype, part.hf_quantizer)


def _fill_table(device: str) -> None:
    """Have bitsandbytes' table of quantized scales on the device; it is made of values, on the host."""
    from bitsandbytes import functional

    with torch.device("cpu"):
        table = functional.create_dynamic_map()
    functional.name2qmap["dynamic"] = table.to(device)


def denoiser_of(parts: Any) -> str:
    """Return the name of the part that denoises.

    Raises:
        RequestError: There is none, so a value for it must name its part.
    """
    found = next((name for name in DENOISERS if name in parts), None)
    if found is None:
        raise RequestError(
            "weights", given="no part", allowed=f"part:value, parts {', '.join(parts)}", todo="name the part"
        )
    return found


def denoisers_of(parts: Any) -> tuple[str, ...]:
    """Return the names of the parts that denoise: one, or two that share the steps.

    Raises:
        RequestError: There is none, so a value for it must name its part.
    """
    return (denoiser_of(parts), *([SECOND_DENOISER] if SECOND_DENOISER in parts else []))

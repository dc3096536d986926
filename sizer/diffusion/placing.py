"""How a pipeline comes to the device: moved, offloaded, cast to 8 bits or quantised, by the libraries' own functions.

Called within a trace, whose tensors on meta answer as tensors of the host and of a CUDA device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sizer.catalogue.pipelines import CAST, DENOISERS
from sizer.errors import BuildError, RequestError

NF4, NF4_TWICE, INT8 = "nf4", "nf4-dq", "int8"
BITSANDBYTES = {
    NF4: {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    NF4_TWICE: {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    INT8: {"load_in_8bit": True},
}
NONE, MODEL, SEQUENTIAL, LEAVES, BLOCKS = "none", "model", "sequential", "group-leaf", "group-block"
# Named here: in a trace, where this module's code names a device, that is meta.
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
    """Bring a pipeline to the device; `weights` are how single parts are held, by name.

    Raises:
        RequestError: The pipeline has no such part, or its VAE or offloading does not take what is asked for.
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
            setattr(pipe, name, _quantised(parts[name], how, dtype))
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

        told = {"offload_type": "leaf_level", "use_stream": stream}
        if kind == BLOCKS:
            told |= {"offload_type": "block_level", "num_blocks_per_group": int(blocks or 1)}
        for name, part in pipe.components.items():
            if not isinstance(part, nn.Module):
                continue
            if name.startswith("vae"):  # decoded outside of `forward`, where group offloading has no hooks
                part.to(_CUDA)
            else:
                apply_group_offloading(part, onload_device=_CUDA, offload_device=_HOST, **told)


def _cast(part: nn.Module, dtype: torch.dtype) -> None:
    if hasattr(part, "enable_layerwise_casting"):
        part.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=dtype)
        return
    from diffusers.hooks import apply_layerwise_casting

    apply_layerwise_casting(part, storage_dtype=torch.float8_e4m3fn, compute_dtype=dtype)


def _quantised(part: nn.Module, how: str, dtype: torch.dtype) -> nn.Module:
    """Return a part as `from_pretrained(quantization_config=BitsAndBytesConfig(...))` loads it: on the device, weight by weight."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        todo = "pip install bitsandbytes"
        raise BuildError("bitsandbytes is not installed", given=f"weights={how}", todo=todo) from error
    if type(part).__module__.startswith("diffusers"):
        return _by_diffusers(part, how, dtype)
    from sizer.architecture.quantizers import load_quantized, replace_layers

    config = {"quant_method": "bitsandbytes", **BITSANDBYTES[how]}
    made = replace_layers(part, config, str(dtype).removeprefix("torch."), given=f"weights={how}")
    return load_quantized(made, "cuda").requires_grad_(False)


def _by_diffusers(part: nn.Module, how: str, dtype: torch.dtype) -> nn.Module:
    from diffusers import BitsAndBytesConfig
    from diffusers.quantizers.auto import DiffusersAutoQuantizer

    options: dict[str, Any] = dict(BITSANDBYTES[how])
    if "load_in_4bit" in options:
        options["bnb_4bit_compute_dtype"] = dtype
    if "bnb_4bit_use_double_quant" in options:
        _fill_table()
    quantizer = DiffusersAutoQuantizer.from_config(BitsAndBytesConfig(**options), pre_quantized=False)
    weights, buffers = dict(part.named_parameters()), dict(part.named_buffers())
    in_float32 = list(getattr(part, "_keep_in_fp32_modules", None) or [])
    kept = in_float32 if getattr(quantizer, "use_keep_in_fp32_modules", False) else []
    quantizer.preprocess_model(model=part, device_map={"": _CUDA}, keep_in_fp32_modules=kept)
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
    part.hf_quantizer, part.is_quantized, part.quantization_method = quantizer, True, "bitsandbytes"
    quantizer.postprocess_model(part)
    return part


def _fill_table() -> None:
    """Have bitsandbytes' table of quantised scales on the device; it is made of values, on the host."""
    from bitsandbytes import functional

    with torch.device("cpu"):
        table = functional.create_dynamic_map()
    functional.name2qmap["dynamic"] = table.to("cuda")


def denoiser_of(parts: Any) -> str:
    """Return the name of the part that denoises.

    Raises:
        RequestError: There is none, so that a value for it must name its part.
    """
    found = next((name for name in DENOISERS if name in parts), None)
    if found is None:
        raise RequestError(
            "weights", given="no part", allowed=f"part:value, parts {', '.join(parts)}", todo="name the part"
        )
    return found

"""Modules with weights quantized as by `from_pretrained`, or loaded quantized, by transformers' own quantizers.

bitsandbytes' own code quantizes each weight: scales and codes are those of the library. Parts that a quantizer does not change
(embeddings, the head, experts that are not `nn.Linear`) stay.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import dot_natural_key
from transformers.quantizers.auto import AutoHfQuantizer

from sizer.architecture.compile_later import compiled_when_called
from sizer.architecture.layouts import BLOCK, SCALE_BLOCK, layout_of
from sizer.architecture.quantization import FP8_LAYERS, is_replaced
from sizer.architecture.quantized_layers import many_patterns
from sizer.base.errors import BuildError, ConfigError, quote
from sizer.catalogue.optimizers import BITSANDBYTES

STANDARD_DEVIATION = 0.02  # of the random weights, on devices that hold values
_CHATTY = "bitsandbytes.autograd._functions"  # logs at each layer of each pass that LLM.int8() casts its input


def replace_layers(
    module: nn.Module,
    config: Mapping[str, Any],
    dtype: str,
    *,
    given: str,
    quantized: bool = False,
    compute: str | None = None,
) -> nn.Module:
    """Put the layers of a quantizer into a transformers model on meta, and return it.

    Unquantized parts are in the dtype of the contract (float32 under autocast). 4-bit products are computed in `compute`, by
    default the config's own dtype; else in the dtype of the contract (its half under autocast), or, if weights arrive
    quantized, in float32, which is transformers' default.

    Args:
        module: The model.
        config: The value of `quantization_config` in a config.json.
        dtype: A dtype of the contract.
        given: The beginning of an error.
        quantized: True if weights arrive quantized.
        compute: Compute dtype of 4-bit layers.

    Raises:
        BuildError: A package is missing, or no layer can be quantized.
        ConfigError: transformers refuses the config.
    """
    half = dtype.removeprefix("amp-")
    loaded = torch.float32 if dtype != half else getattr(torch, half)
    module.to(loaded)
    module.config.dtype = loaded
    named = compute or config.get("bnb_4bit_compute_dtype") or ("float32" if quantized else half)
    module.hf_quantizer = _quantizer({**config, **_computed(config, named)}, given=given, quantized=quantized)
    from transformers.modeling_utils import local_torch_dtype

    with local_torch_dtype(loaded), many_patterns():
        module.hf_quantizer.preprocess_model(module, device_map={"": 0})
    if not any(map(is_replaced, module.modules())):
        raise BuildError(
            "this model has no layer that can be quantized",
            given=quote(f"{given} with {type(module).__name__}"),
            todo="leave weights out, or ask for weights=full",
        )
    return module


def load_quantized(module: nn.Module, device: str = "meta") -> nn.Module:
    """Load the model of `replace_layers` as `from_pretrained` does, and return it.

    One weight after the other is moved to the device, in the order of names, and is quantized or arrives quantized; buffers
    come last.

    *Known limitations*: transformers loads up to four weights at a time; their order differs from run to run.
    """
    quantizer = module.hf_quantizer
    warm_up(module, device)
    if getattr(quantizer.quantization_config, "bnb_4bit_use_double_quant", False) and not quantizer.pre_quantized:
        _make_table(device)
    for _, load in sorted(_loads(module, device), key=lambda item: dot_natural_key(item[0])):
        load()
    move_buffers(module, device)
    quantizer.postprocess_model(module)
    for scales in _scales_of_fp8(module):
        scales.elements = 0
    for packed in _packed_experts(module):
        packed.elements = 2 * packed.numel()
    return module


def _loads(module: nn.Module, device: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield by name a function that loads each weight to a device, or a layer with weights in parts."""
    quantizer = module.hf_quantizer
    holders: dict[int, list[tuple[nn.Module, str]]] = {}  # tied weights have several
    for layer in module.modules():
        for name, old in layer._parameters.items():
            if old is not None:
                holders.setdefault(id(old), []).append((layer, name))
    for path, layer in module.named_modules():
        if quantizer.pre_quantized and hasattr(getattr(layer, "weight", None), "_quantize"):
            yield path, partial(_load_packed, layer, quantizer.quantization_config, module.config.dtype, device)
        elif not quantizer.pre_quantized and type(layer).__module__.startswith(FP8_LAYERS):
            yield path, partial(_load_fp8, layer, quantizer, module.config.dtype, device)
        else:
            for name, old in layer._parameters.items():
                if old is not None and (held := holders.pop(id(old), None)):
                    yield f"{path}.{name}", partial(load_weight, held, old, device, quantize=not quantizer.pre_quantized)


def _scales_of_fp8(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield parameters with the scales of FP8 weights (transformers/integrations/finegrained_fp8.py, 5.23)."""
    for layer in module.modules():
        if type(layer).__module__.startswith(FP8_LAYERS):
            yield from (one for name, one in layer._parameters.items() if one is not None and "_scale" in name)


def _packed_experts(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the weights that hold two FP4 numbers in a byte (transformers/integrations/finegrained_fp8.py, FP8Experts, 5.24)."""
    for layer in module.modules():
        if type(layer).__module__.startswith(FP8_LAYERS):
            yield from (one for one in layer._parameters.values() if one is not None and one.dtype == torch.int8)


def _computed(config: Mapping[str, Any], dtype: object) -> dict[str, Any]:
    """Return the entry of a `quantization_config` for the dtype of 4-bit products."""
    return {"bnb_4bit_compute_dtype": dtype} if config.get("load_in_4bit") else {}


def _quantizer(config: Mapping[str, Any], *, given: str, quantized: bool):
    """Return transformers' quantizer of a `quantization_config`. Raises BuildError and ConfigError as `replace_layers` does."""
    if config["quant_method"] == BITSANDBYTES:
        import_bitsandbytes(given)
    try:
        return AutoHfQuantizer.from_config(dict(config), pre_quantized=quantized)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError("transformers refuses this quantization_config", given=quote(str(error))) from error


def import_bitsandbytes(given: str) -> None:
    """Import bitsandbytes without its warnings at each layer. Raises BuildError with `given` if it is not installed."""
    if find_spec(BITSANDBYTES) is None:
        raise BuildError(f"{BITSANDBYTES} is not installed", given=given, todo=f"pip install {BITSANDBYTES}")
    with compiled_when_called():
        importlib.import_module(BITSANDBYTES)
    logging.getLogger(_CHATTY).setLevel(logging.ERROR)


def _make_table(device: str) -> None:
    """Make bitsandbytes' map for scales from real values, before it is requested among tensors without values."""
    from bitsandbytes import functional

    with torch.device("cpu"):
        table = functional.create_dynamic_map()
    functional.name2qmap["dynamic"] = table.to(device)


def warm_up(module: nn.Module, device: str) -> None:
    """Allocate and free a model's future memory, as transformers does (caching_allocator_warmup in modeling_utils.py)."""
    from transformers.modeling_utils import get_total_byte_count

    names = [name for name, _ in module.named_parameters()]
    (needed,) = get_total_byte_count(module, dict.fromkeys(names, device), module.hf_quantizer).values()
    torch.empty(int(needed // 2), dtype=torch.float16, device=device)


def load_weight(held: list[tuple[nn.Module, str]], old: nn.Parameter, device: str, *, quantize: bool) -> None:
    """Load a weight to a device for the modules that share it, by name, and quantize it if needed."""
    made = arrive(old, device)
    for layer, name in held:
        layer._parameters[name] = made
        if quantize and name == "weight" and hasattr(made, "_quantize"):
            made._quantize(device)  # `.to("meta")` would not


def arrive(old: nn.Parameter, device: str) -> nn.Parameter:
    """Return a copy of a parameter on a device, with random values if it is a float tensor of more than 8 bits."""
    value = torch.empty(old.shape, dtype=old.dtype, device=device)
    if old.is_floating_point() and old.itemsize > 1:
        value.normal_(std=STANDARD_DEVIATION)
    return type(old)(value, requires_grad=old.requires_grad, **vars(old))


def move_buffers(module: nn.Module, device: str) -> None:
    """Bring the buffers of all modules to a device."""
    for layer in module.modules():
        for name, buffer in layer._buffers.items():
            layer._buffers[name] = None if buffer is None else buffer.to(device)


def _load_packed(layer: nn.Module, config: Any, dtype: torch.dtype, device: str) -> None:
    """Load a layer of bitsandbytes to a device, with its weight and states in the checkpoint's format."""
    from bitsandbytes.nn import Int8Params, Params4bit

    if layer.bias is not None:
        bias = torch.empty(layer.bias.shape, dtype=dtype, device=device).normal_(std=STANDARD_DEVIATION)
        layer.bias = nn.Parameter(bias, requires_grad=False)
    shape = outputs, inputs = tuple(layer.weight.shape)
    layout = layout_of(BITSANDBYTES, config.to_dict(), outputs, inputs, dtype)
    tensors = {name: torch.empty(size, dtype=held, device=device) for name, (size, held) in layout.items()}
    weight = tensors.pop("weight")
    if config.load_in_8bit:
        made = Int8Params(
            weight, requires_grad=False, has_fp16_weights=layer.state.has_fp16_weights, SCB=tensors["SCB"]
        )
        made.CB = made.data
        layer.weight = made
        return
    numbers = {"quant_type": config.bnb_4bit_quant_type, "blocksize": BLOCK, "dtype": _name(dtype), "shape": shape}
    if "nested_absmax" in tensors:
        numbers |= {"nested_blocksize": SCALE_BLOCK, "nested_dtype": "float32", "nested_offset": 0.0}
    stored = weight.view(config.bnb_4bit_quant_storage)
    layer.weight = Params4bit.from_prequantized(stored, tensors | numbers, device=torch.device(device), module=layer)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _load_fp8(layer: nn.Module, quantizer: Any, loaded: torch.dtype, device: str) -> None:
    """Quantize the weights of a layer with FP8 weights in blocks: each loaded tensor becomes a weight and its scales."""
    operation = quantizer.get_quantize_ops()
    for name, old in list(layer._parameters.items()):
        if old is None or old.dtype != torch.float8_e4m3fn:
            continue
        value = torch.empty(old.shape, dtype=loaded, device=device).normal_(std=STANDARD_DEVIATION)
        made = operation.convert({f".{name}": value})
        for key, tensor in made.items():
            layer._parameters[key.removeprefix(".")] = nn.Parameter(tensor, requires_grad=False)

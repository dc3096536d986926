"""Layers of a transformers model that its checkpoint has quantized, with the settings of each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from sizer.architecture.compressed_layouts import group_of, is_target
from sizer.architecture.layouts import layout_of
from sizer.architecture.modelopt_layouts import is_of_modelopt, settings_of_modelopt
from sizer.architecture.quantization_settings import Quantization, checked_pattern
from sizer.architecture.quark_settings import check_known, layer_config
from sizer.architecture.torchao_layouts import config_of, is_divisible, is_named
from sizer.base.errors import ConfigError, quote

_BLOCK = re.compile(r"\.\d+\.")  # a layer within a stack: GPTQ quantizes these (optimum/gptq/quantizer.py, 2.3)
_SKIPPED = {
    "awq": "modules_to_not_convert",
    "aqlm": "linear_weights_not_to_quantize",
    "bitsandbytes": "llm_int8_skip_modules",
}
_BLOCK_NAMES = (
    "quant_block_list",
    "block_name_to_quantize",
    "to_quant_block_names",
)  # of AutoRound, the first one counts
_MOST_BITS = 8  # largest number of bits that AutoRound calls quantized


def quantized_layers(module: nn.Module, quantization: Quantization) -> list[tuple[str, nn.Module]]:
    """Return paths and layers of a transformers model that its checkpoint has quantized.

    Raises ConfigError if a name is not a pattern, or if quark's layout, or that of Gemma's embeddings, is not known.
    """
    with many_patterns():
        layers = list(_quantized_layers(module, quantization))
    if not layers and quantization.settings.get("quantized_layers"):
        raise ConfigError(
            "quantization_config names no layer of this model",
            given=f"quantized_layers = {quote(next(iter(quantization.settings['quantized_layers'])))}, ...",
            allowed="names such as model.layers.0.mlp.down_proj",
        )
    return layers


def _quantized_layers(module: nn.Module, quantization: Quantization) -> Iterator[tuple[str, nn.Module]]:
    method, settings = quantization.method, quantization.settings
    names = _names_left_out(module, quantization)
    if method == "quark":
        check_known(settings)
    if method == "gemma" and settings.get("quantize_embeddings"):
        given = "quantize_embeddings = true"
        raise ConfigError("no layout of these weights is known", given=given, allowed="false")
    for path, child in module.named_modules():
        linear, experts = isinstance(child, (nn.Linear, Conv1D)), sides_of(child) is not None
        if not (experts if method == "mxfp4" else linear or experts):
            continue
        if method == "auto-round":
            if is_of_auto_round(settings, path, names):
                yield path, child
        elif method == "compressed-tensors":
            if is_target(settings, path, type(child).__name__):
                yield path, child
        elif method == "gptq":
            within = _BLOCK.search(path) or settings.get("lm_head") is True
            if within and _dynamic_of_gptq(settings, path) is not None:
                yield path, child
        elif method == "torchao":
            if is_of_torchao(settings, path, child, names):
                yield path, child
        elif method == "quark":
            if is_of_quark(settings, path, child):
                yield path, child
        elif method == "gemma":
            if linear and should_convert_module(path, names):
                yield path, child
        elif method == "modelopt":
            if is_of_modelopt(settings, path):
                yield path, child
        elif method == "hqq":
            if path.rpartition(".")[2] not in names:
                yield path, child
        elif should_convert_module(path, names):
            yield path, child


def _names_left_out(module: nn.Module, quantization: Quantization) -> list[str]:
    """Return the names of unquantized modules: the settings' names, and transformers' own choice if it makes one."""
    method, settings = quantization.method, quantization.settings
    if method == "hqq":
        return _strings(settings, "skip_modules") or ["lm_head"]
    names = _strings(settings, _SKIPPED.get(method, "modules_to_not_convert"))
    if method == "aqlm":
        return [name.removesuffix(".weight") for name in names or ()]
    return HfQuantizer.get_modules_to_not_convert(
        module, names, module._keep_in_fp32_modules, add_default_skips=method in ("auto-round", "awq")
    )


def is_of_auto_round(settings: Mapping[str, Any], path: str, names: list[str]) -> bool:
    """Return whether AutoRound has quantized a layer: one within its blocks, or named by itself, of at most 8 bits.

    auto_round/inference/convert_model.py, get_layer_config, of intel/auto-round at 0048664.
    """
    own = _own_settings(settings, "extra_config").get(path)
    blocks = next((settings[key] for key in _BLOCK_NAMES if settings.get(key)), None)
    within = _BLOCK.search(path) if blocks is None else path.startswith(tuple(_block_names(blocks)))
    if own is None and (not within or any(re.search(name, path) for name in names)):
        return False
    bits = (own or {}).get("bits", settings.get("bits"))
    return isinstance(bits, int) and bits <= _MOST_BITS


def is_of_torchao(settings: Mapping[str, Any], path: str, layer: nn.Module, names: list[str]) -> bool:
    """Return whether torchao has quantized a layer's weight: the weight of an `nn.Linear` that is not excluded.

    transformers/quantizers/quantizer_torchao.py, param_needs_quantization, 5.23. Raises ConfigError if embeddings, or experts
    by their names, are quantized, too: no layout of these is known.
    """
    if settings.get("include_input_output_embeddings"):
        given = "include_input_output_embeddings = true"
        raise ConfigError("no layout of these weights is known", given=given, allowed="false")
    if not isinstance(layer, nn.Linear):
        if any(is_named(settings, path, parameter) for parameter in layer._parameters):
            raise ConfigError(
                "no layout of these weights is known", given=f"a config for {path}", allowed="linear layers"
            )
        return False
    if not should_convert_module(f"{path}.weight", names):
        return False
    config = config_of(settings, path)
    return config is not None and is_divisible(config, *layer.weight.shape)


def is_of_quark(settings: Mapping[str, Any], path: str, layer: nn.Module) -> bool:
    """Return whether quark has quantized a layer, or stores scales of its activations.

    The layer is an `nn.Linear`, or experts, which are separate linear layers in quark. Raises ConfigError.
    """
    if isinstance(layer, Conv1D):
        return False
    return layer_config(settings, path if isinstance(layer, nn.Linear) else _expert(path)) is not None


def _expert(path: str) -> str:
    """Return the first linear layer of the first of a layer's experts; the other experts are packed in the same way."""
    return f"{path}.0.gate_proj"


def _block_names(names: object) -> Iterator[str]:
    """Yield the names of blocks, separated by commas or in lists of lists."""
    for name in names.split(",") if isinstance(names, str) else names if isinstance(names, list) else ():
        if isinstance(name, str):
            yield name
        else:
            yield from _block_names(name)


def settings_of(quantization: Quantization, path: str, layer: nn.Module) -> Mapping[str, Any]:
    """Return the settings of one layer, for methods with settings by layer.

    Raises ConfigError if there are none for this layer.
    """
    method, settings = quantization.method, quantization.settings
    if method == "compressed-tensors":
        return group_of(settings, path, type(layer).__name__)
    if method == "auto-round":
        return {**settings, **_own_settings(settings, "extra_config").get(path, {})}
    if method == "modelopt":
        return settings_of_modelopt(settings, path)
    if method == "gptq":
        return {**settings, **(_dynamic_of_gptq(settings, path) or {})}
    if method == "gemma":
        return {**settings, **_first_named(_own_settings(settings, "module_quant_configs"), path)}
    if method == "fp8" and sides_of(layer) is None:
        return {key: value for key, value in settings.items() if key != "expert_dtype"}
    if method == "quark":
        return layer_config(settings, path if isinstance(layer, nn.Linear) else _expert(path)) or {}
    if method == "torchao":
        return {**settings, "quant_type": {"default": config_of(settings, path)}}
    if method == "spqr":
        shapes = settings.get("shapes")
        shapes = shapes if isinstance(shapes, dict) else {}
        return {**settings, "shapes": {name.removeprefix(f"{path}."): value for name, value in shapes.items()}}
    if method != "vptq":
        return settings
    own = _own_settings(settings, "config_for_layers").get(path)
    shared = _own_settings(settings, "shared_layer_config").get(path.rpartition(".")[2])
    if (found := own or shared) is None:
        raise ConfigError(
            "quantization_config is malformed", given=f"nothing of {quote(path)}", allowed="config_for_layers"
        )
    return found


def _dynamic_of_gptq(settings: Mapping[str, Any], path: str) -> dict | None:
    """Return a layer's own settings by the first pattern of `dynamic` that matches its path; None if the layer is excluded.

    gptqmodel/quantization/config.py, dynamic_get, 2.2: "-:" before a pattern excludes layers, "+:" is the default. Raises
    ConfigError for an invalid pattern.
    """
    for named, own in _own_settings(settings, "dynamic").items():
        sign, pattern = (named[:2], named[2:]) if named.startswith(("+:", "-:")) else ("+:", named)
        if re.match(checked_pattern(pattern, "dynamic"), path):
            return None if sign == "-:" else own
    return {}


def _first_named(patterns: Mapping[str, dict], path: str) -> dict:
    """Return the settings of the first pattern that is found in a path (transformers/integrations/gemma_quant.py, 5.23).

    Raises ConfigError for an invalid pattern.
    """
    return next((own for pattern, own in patterns.items() if re.search(checked_pattern(pattern, "module_quant_configs"), path)), {})


def _own_settings(settings: Mapping[str, Any], key: str) -> dict[str, dict]:
    """Return settings by layer. Raises ConfigError if they are malformed."""
    found = settings.get(key) or {}
    if not isinstance(found, dict) or not all(isinstance(one, dict) for one in found.values()):
        raise ConfigError(
            "quantization_config is malformed", given=f"{key} = {quote(found)}", allowed="settings by layer"
        )
    return found


def check_names(quantization: Quantization) -> None:
    """Raise ConfigError if names of unquantized modules, or the sides of a block, are invalid."""
    _strings(quantization.settings, _SKIPPED.get(quantization.method, "modules_to_not_convert"))
    layout_of(quantization.method, quantization.settings, 1, 1, torch.float32)


def _strings(settings: Mapping[str, Any], key: str) -> list[str] | None:
    """Return a list of name patterns of the settings, None if there is none. Raises ConfigError."""
    names = settings.get(key)
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        given = f"{key} = {quote(names)}"
        raise ConfigError("quantization_config is malformed", given=given, allowed="a list of names")
    for name in names:
        checked_pattern(name, key)
    return names


def sides_of(layer: nn.Module) -> tuple[int, int, int] | None:
    """Return the number of experts, the model's width and the inner width of a layer with gated experts; None for other layers."""
    both, down = (layer._parameters.get(name) for name in ("gate_up_proj", "down_proj"))
    if both is None or down is None or both.dim() != 3 or down.dim() != 3:
        return None
    (count, *first), (_, *second) = both.shape, down.shape
    if first[0] == 2 * second[1] and first[1] == second[0]:
        return count, first[1], second[1]
    if first[1] == 2 * second[0] and first[0] == second[1]:  # as [experts, inputs, outputs]
        return count, first[0], second[0]
    return None


# ------------------------------------------------------------------------------------------------------------ patterns


MOST_PATTERNS = 20_000  # the maximum number of values in a config (sizer.base.config_json)


@contextmanager
def many_patterns() -> Iterator[None]:
    """Keep all compiled patterns of a config in the cache of `re` within the context.

    transformers matches every layer with every excluded name. GLM-5-FP8 excludes 712 names, and `re` caches 512 patterns:
    without a larger cache it would compile each pattern again for each layer.
    """
    with mock.patch.object(re, "_MAXCACHE", MOST_PATTERNS):
        yield

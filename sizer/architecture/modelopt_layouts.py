"""The tensors of one linear layer in a checkpoint of NVIDIA's ModelOpt, by its `quant_algo`: see sizer.architecture.layouts.

Source: modelopt/torch/export/quant_utils.py (process_layer_quant_config, to_quantized_weight) and unified_export_hf.py
(_export_quantized_weight) of NVIDIA/Model-Optimizer, 0.47. Scales are float32 if nothing else is named. AWQ's `pre_quant_scale` is
counted for each layer; ModelOpt fuses some of them into norms, which is up to two bytes an input less.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch

from sizer.architecture.compressed_layouts import NVFP4_BLOCK, Tensors
from sizer.architecture.quantization_settings import ceil, whole
from sizer.base.errors import ConfigError, quote

_MIXED = "MIXED_PRECISION"
_BLOCK_SIDE = 128  # FP8_PB_WO: blocks of 128 × 128 weights
_MX_BLOCK = 32
_FP8, _BYTES = torch.float8_e4m3fn, torch.uint8
_SCALE: tuple[tuple[int, ...], torch.dtype] = (), torch.float32


def modelopt(settings: Mapping[str, Any], outputs: int, inputs: int, dtype: torch.dtype) -> Tensors:
    """Return the tensors of one layer. Raises ConfigError for an algorithm without a known layout."""
    algorithm = str(settings.get("quant_algo") or "FP8").upper()
    byte, half = (outputs, inputs), (outputs, ceil(inputs, 2))
    column = (outputs,), torch.float32
    if algorithm == "FP8":
        return {"weight": (byte, _FP8), "weight_scale": _SCALE, "input_scale": _SCALE}
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        return {"weight": (byte, _FP8), "weight_scale": column}
    if algorithm == "FP8_PB_WO":
        scales = ceil(outputs, _BLOCK_SIDE), ceil(inputs, _BLOCK_SIDE)
        return {"weight": (byte, _FP8), "weight_scale": (scales, torch.float32)}
    if algorithm == "MXFP8":
        return {"weight": (byte, _FP8), "weight_scale": ((outputs, ceil(inputs, _MX_BLOCK)), _BYTES)}
    if algorithm == "W8A16":
        return {"weight": (byte, torch.int8), "weight_scale": column}
    if algorithm == "W8A8_SQ_PER_CHANNEL":
        return {"weight": (byte, torch.int8), "weight_scale": column, "input_scale": _SCALE}
    if algorithm == "W4A8_MXFP4_FP8":
        return {"weight": (half, _BYTES), "weight_scale": ((outputs, ceil(inputs, _MX_BLOCK)), _BYTES), "input_scale": _SCALE}
    if algorithm in ("W4A16_AWQ", "W4A8_AWQ"):
        return _awq(settings, algorithm, outputs, inputs, dtype)
    if algorithm in ("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "W4A8_NVFP4_FP8"):
        block = whole(settings, "group_size", NVFP4_BLOCK, (NVFP4_BLOCK,))
        tensors: Tensors = {
            "weight": (half, _BYTES),
            "weight_scale": ((outputs, ceil(inputs, block)), _FP8),
            "weight_scale_2": _SCALE,
        }
        tensors |= {} if algorithm == "W4A16_NVFP4" else {"input_scale": _SCALE}
        return tensors | ({"pre_quant_scale": ((inputs,), dtype)} if algorithm == "NVFP4_AWQ" else {})
    raise ConfigError(
        "no layout of these weights is known",
        given=f"quant_algo = {quote(algorithm)}",
        allowed="FP8, FP8_PB_WO, FP8_PER_CHANNEL_PER_TOKEN, MXFP8, NVFP4, NVFP4_AWQ, W4A16_AWQ, W4A16_NVFP4, W4A8_AWQ, "
        "W4A8_MXFP4_FP8, W4A8_NVFP4_FP8, W8A16, W8A8_SQ_PER_CHANNEL, or MIXED_PRECISION with quantized_layers",
    )


def _awq(settings: Mapping[str, Any], algorithm: str, outputs: int, inputs: int, dtype: torch.dtype) -> Tensors:
    """Return 4-bit integers, two outputs a byte, a scale for each group of inputs, and AWQ's factor for each input."""
    groups = ceil(inputs, whole(settings, "group_size", 128))
    tensors: Tensors = {
        "weight": ((ceil(outputs, 2), inputs), _BYTES),
        "weight_scale": ((outputs, groups), torch.float32),
        "pre_quant_scale": ((inputs,), dtype),
    }
    return tensors | ({"weight_scale_2": _SCALE, "input_scale": _SCALE} if algorithm == "W4A8_AWQ" else {})


def is_of_modelopt(settings: Mapping[str, Any], path: str) -> bool:
    """Return True if ModelOpt has quantized a layer, or a layer inside it.

    vllm/model_executor/layers/quantization/modelopt.py, is_layer_excluded, 0.11: a name also excludes the layers inside it, and
    `*` in a name is a shell pattern. With MIXED_PRECISION the named layers are the quantized ones.
    """
    if _algorithm(settings) == _MIXED:
        return _named(settings, path) is not None
    names = _strings(settings, "ignore") + _strings(settings, "exclude_modules")
    return not any(path == name or path.startswith(f"{name}.") or fnmatchcase(path, name) for name in names)


def settings_of_modelopt(settings: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Return the settings of one layer: with MIXED_PRECISION its own, or those of the first expert inside it."""
    return _named(settings, path) or {} if _algorithm(settings) == _MIXED else settings


def _algorithm(settings: Mapping[str, Any]) -> str:
    return str(settings.get("quant_algo") or "").upper()


def _named(settings: Mapping[str, Any], path: str) -> Mapping[str, Any] | None:
    layers = settings.get("quantized_layers")
    if not isinstance(layers, dict) or not all(isinstance(one, dict) for one in layers.values()):
        raise ConfigError(
            "quantization_config is malformed", given=f"quantized_layers = {quote(layers)}", allowed="settings by layer"
        )
    inside = f"{path}."
    return layers.get(path) or next((own for name, own in layers.items() if name.startswith(inside)), None)


def _strings(settings: Mapping[str, Any], key: str) -> list[str]:
    """Return a list of names of the settings. Raises ConfigError if it is none."""
    names = settings.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError("quantization_config is malformed", given=f"{key} = {quote(names)}", allowed="a list of names")
    return names

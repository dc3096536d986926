"""The tensors of one linear layer in a checkpoint of compressed-tensors: see sizer.architecture.layouts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from sizer.architecture.quantization_settings import WORD, ceil, checked_pattern, groups_of, whole
from sizer.base.errors import ConfigError, quote

Tensors = dict[str, tuple[tuple[int, ...], torch.dtype]]

_MX_FORMATS, _MX_BLOCK = ("mxfp4-pack-quantized", "mxfp8-quantized"), 32  # compressors/mxfp4/ and mxfp8/, 0.20
NVFP4_BLOCK = 16  # weights that share a scale: compressed_tensors/compressors/nvfp4/base.py, 0.20


def compressed_tensors(settings: Mapping[str, Any], outputs: int, inputs: int, dtype: torch.dtype) -> Tensors:
    """Return the tensors of compressed_tensors/compressors/, 0.20.

    Integers are packed in 32-bit words, FP4 in bytes; other types take one element per weight.
    """
    groups = settings.get("config_groups")
    group = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(group, dict) or not isinstance(weights, dict):
        given = f"config_groups = {quote(groups)}"
        raise ConfigError(
            "quantization_config is malformed", given=given, allowed="groups of layers with their weights"
        )
    kind = group.get("format") or settings.get("format")
    bits = whole(weights, "num_bits", 8, (2, 3, 4, 5, 6, 7, 8))
    scale = _scale_shape(weights, outputs, inputs)
    rows, columns = (1, 1) if len(scale) == 1 else scale
    tensors = _compressed_weight(kind, bits, outputs, inputs, weights)
    if kind == "nvfp4-pack-quantized":
        tensors["weight_scale"] = (outputs, inputs // NVFP4_BLOCK), torch.float8_e4m3fn
        tensors["weight_global_scale"] = (1,), torch.float32
    elif kind in _MX_FORMATS:
        tensors["weight_scale"] = (outputs, ceil(inputs, _MX_BLOCK)), torch.uint8
    else:
        tensors["weight_scale"] = scale, dtype
    if not weights.get("symmetric", True):
        packed = kind == "pack-quantized"
        shape = (ceil(rows * bits, WORD), columns) if packed else scale
        tensors["weight_zero_point"] = shape, torch.int32 if packed else torch.int8
    if weights.get("actorder") == "group":
        tensors["weight_g_idx"] = (inputs,), torch.int32
    activations = group.get("input_activations")
    if isinstance(activations, dict) and kind == "nvfp4-pack-quantized":
        tensors["input_global_scale"] = (1,), torch.float32
    elif isinstance(activations, dict) and not activations.get("dynamic"):
        tensors["input_scale"] = (1,), dtype
    return tensors


def _compressed_weight(kind: object, bits: int, outputs: int, inputs: int, weights: Mapping[str, Any]) -> Tensors:
    if kind == "pack-quantized":
        packed = (outputs, ceil(inputs * bits, WORD)), torch.int32
        return {"weight_packed": packed, "weight_shape": ((2,), torch.int64)}
    if kind in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        return {"weight_packed": ((outputs, inputs // 2), torch.uint8)}
    if kind in ("int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized"):
        held = torch.float8_e4m3fn if weights.get("type") == "float" else torch.int8
        return {"weight": ((outputs, inputs), held)}
    allowed = (
        "pack-quantized, nvfp4-pack-quantized, mxfp4-pack-quantized, mxfp8-quantized, int-quantized, float-quantized, "
        "naive-quantized"
    )
    raise ConfigError("no layout of these weights is known", given=f"format = {quote(kind)}", allowed=allowed)


def _scale_shape(weights: Mapping[str, Any], outputs: int, inputs: int) -> tuple[int, ...]:
    """Return the shape of a layer's scales by the strategy of its weights: a single scale, or rows and columns of scales."""
    strategy = weights.get("strategy")
    if strategy == "tensor":
        return (1,)
    if strategy != "block":
        return outputs, groups_of(weights, inputs) if strategy == "group" else 1
    block = weights.get("block_structure")
    if not isinstance(block, list) or len(block) != 2 or not all(type(side) is int and side > 0 for side in block):
        given = f"block_structure = {quote(block)}"
        raise ConfigError("quantization_config is malformed", given=given, allowed="two sides of a block")
    return ceil(outputs, block[0]), ceil(inputs, block[1])


def group_of(settings: Mapping[str, Any], path: str, class_name: str) -> Mapping[str, Any]:
    """Return the settings with only the group of a layer: named by its path, else by a pattern, else by its class.

    compressed_tensors/utils/match.py, 0.20: names come before patterns, and patterns before classes.
    """
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or len(groups) < 2:
        return settings
    kinds = {class_name, "Linear"}
    found = [
        ((target != path) + (target in kinds), name)
        for name, group in groups.items()
        if isinstance(group, dict)
        for target in group.get("targets") or ()
        if _names(target, path, kinds)
    ]
    _, name = min(found, key=lambda one: one[0])
    return {**settings, "config_groups": {name: groups[name]}}


def is_target(settings: Mapping[str, Any], path: str, class_name: str) -> bool:
    """Return whether a layer is quantized: a group's `targets` name its path, class or a pattern, and `ignore` does not.

    compressed_tensors/utils/match.py, 0.20. Experts are separate linear layers there.
    """
    groups = settings.get("config_groups")
    groups = groups.values() if isinstance(groups, dict) else ()
    targets = [name for group in groups if isinstance(group, dict) for name in group.get("targets") or ()]
    kinds = {class_name, "Linear"}
    ignored = settings.get("ignore") or ()
    return any(_names(one, path, kinds) for one in targets) and not any(
        _names(one, path, {class_name}) for one in ignored
    )


def _names(target: object, path: str, kinds: set[str]) -> bool:
    if not isinstance(target, str):
        raise ConfigError(
            "quantization_config is malformed", given=quote(target), allowed="names, or patterns as re:..."
        )
    if not target.startswith("re:"):
        return target == path or target in kinds
    return re.match(checked_pattern(target.removeprefix("re:")), path) is not None

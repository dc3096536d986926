"""The tensors of one linear layer that torchao has quantized: see sizer.architecture.layouts.

A config.json has torchao's own config, as JSON (torchao/core/config.py, config_to_dict), as `quant_type`. Which tensors a weight
comes to was read in torchao/quantization/quant_api.py and torchao/quantization/quantize_/workflows/ (0.18), which transformers'
TorchAoQuantize calls (transformers/integrations/torchao.py, 5.23).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from sizer.architecture.compressed_layouts import Tensors
from sizer.architecture.quantization_settings import ceil, checked_pattern, whole
from sizer.base.errors import ConfigError, quote

_INT8 = "Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"
_FLOAT8_BOTH = "Float8DynamicActivationFloat8WeightConfig"
_FLOAT8 = "Float8WeightOnlyConfig", _FLOAT8_BOTH
_INTX = "IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig"
_INT4 = "Int4WeightOnlyConfig"
_BY_NAME = "FqnToConfig", "ModuleFqnToConfig"
_VERSION = 2  # version of the weights' configs; torchao no longer loads the first one
_FLOAT8_SIDES = 16  # both sides of a weight are multiples of it if activations are FP8, too (_fp8_mm_compat)
_TILE_INPUTS = 1024  # inputs are padded to a multiple of this (Int4TilePackedTo4dTensor.from_hp)


def torchao(settings: Mapping[str, Any], outputs: int, inputs: int, dtype: torch.dtype) -> Tensors:
    """Return the tensors of a weight.

    Source: Int8Tensor, Float8Tensor, IntxUnpackedToInt8Tensor, Int4Tensor, Int4TilePackedTo4dTensor.

    Raises ConfigError if the config's layout is not known.
    """
    config = _whole_config(settings)
    kind, data = _read(config)
    if config.get("_version", 1) != _VERSION:
        raise _malformed(f"{kind} of version {quote(config.get('_version', 1))}", f"version {_VERSION}")
    if kind in _INT8:
        scales = _scales(data.get("granularity"), outputs, inputs)
        return {
            "qdata": ((outputs, inputs), torch.int8),
            "scale": (scales, torch.float32),
            "zero_point": (scales, torch.int8),
        }
    if kind in _FLOAT8 and _name_of(data.get("packing_format"), "PLAIN") == "PLAIN":
        scales = _scales(_of_weights(data.get("granularity")), outputs, inputs)
        held = _dtype_of(data.get("weight_dtype"), torch.float8_e4m3fn)
        return {"qdata": ((outputs, inputs), held), "scale": (scales, torch.float32)}
    if kind in _INTX and _name_of(data.get("intx_packing_format"), "UNPACKED_TO_INT8") == "UNPACKED_TO_INT8":
        scales = _scales(data.get("granularity", data.get("weight_granularity")), outputs, inputs)
        scale_dtype = _dtype_of(data.get("scale_dtype", data.get("weight_scale_dtype")), dtype)
        return {
            "qdata": ((outputs, inputs), torch.int8),
            "scale": (scales, scale_dtype),
            "zero_point": (scales, torch.int8),
        }
    if kind == _INT4:
        return _int4(data, outputs, inputs, dtype)
    raise _unknown(kind, data)


def config_of(settings: Mapping[str, Any], path: str) -> dict | None:
    """Return torchao's config for the weight of a linear layer at a dotted path; None if it is not quantized.

    Raises ConfigError.
    """
    config = _whole_config(settings)
    if _read(config)[0] not in _BY_NAME:
        return config
    named = _configs_by_name(settings)
    return next(_naming(named, path, "weight"), named.get("_default"))


def is_named(settings: Mapping[str, Any], path: str, parameter: str) -> bool:
    """Return whether torchao's config names this parameter, or its module, and has a separate config for it.

    Raises ConfigError.
    """
    return next(_naming(_configs_by_name(settings), path, parameter), None) is not None


def _configs_by_name(settings: Mapping[str, Any]) -> dict[str, dict | None]:
    kind, data = _read(_whole_config(settings))
    if kind not in _BY_NAME:
        return {}
    named = data.get("fqn_to_config") or data.get("module_fqn_to_config")
    if not isinstance(named, dict):
        raise _malformed(f"{kind} of {quote(named)}", "configs by name")
    return named


def _naming(named: Mapping[str, dict | None], path: str, parameter: str) -> Iterator[dict | None]:
    """Yield the configs that name a parameter or its module, by descending priority (TorchAoQuantize.convert)."""
    names = f"{path}.{parameter}", path
    yield from (named[name] for name in names if name in named)
    for pattern, own in named.items():
        try:
            if pattern.startswith("re:") and any(re.fullmatch(checked_pattern(pattern[3:]), name) for name in names):
                yield own
        except re.error as error:
            raise _malformed(quote(pattern), "names, or patterns") from error


def is_divisible(config: dict | None, outputs: int, inputs: int) -> bool:
    """Return whether torchao quantizes a weight with these sides, and does not leave it as it was."""
    kind, data = _read(config)
    if kind == _INT4:
        return inputs % _group(data.get("group_size", 128)) == 0
    return kind != _FLOAT8_BOTH or (outputs % _FLOAT8_SIDES == 0 and inputs % _FLOAT8_SIDES == 0)


def _int4(data: Mapping[str, Any], outputs: int, inputs: int, dtype: torch.dtype) -> Tensors:
    """Return the tensors of Int4Tensor or Int4TilePackedTo4dTensor, read in their source only: torchao packs them on a GPU."""
    size = _group(data.get("group_size", 128))
    packing = _name_of(data.get("int4_packing_format"), "PLAIN")
    if packing == "PLAIN":
        groups = (inputs // size, outputs)
        return {"qdata": ((outputs, inputs // 2), torch.int8), "scale": (groups, dtype), "zero_point": (groups, dtype)}
    if packing != "TILE_PACKED_TO_4D":
        raise _unknown(_INT4, data)
    tile = whole(data, "int4_tile_packed_ntile", 8, (8, 16))
    high, wide = ceil(outputs, tile) * tile, ceil(inputs, _TILE_INPUTS) * _TILE_INPUTS
    # [n / 8, k / (inner_k_tiles × 16), 32, inner_k_tiles / 2] with 8 inner tiles (aten::_convert_weight_to_int4pack, 2.15)
    return {
        "qdata": ((high // 8, wide // 128, 32, 4), torch.int32),
        "scale_and_zero": ((wide // size, high, 2), dtype),
    }


def _scales(granularity: object, outputs: int, inputs: int) -> tuple[int, int]:
    """Return the shape of the scales of a weight (torchao/quantization/granularity.py)."""
    kind, data = ("PerRow", {}) if granularity is None else _read(granularity)
    if kind == "PerTensor":
        return 1, 1
    if kind in ("PerRow", "PerAxis") and data.get("dim", -1) in (-1, 1) and data.get("axis", 0) == 0:
        return outputs, 1
    if kind != "PerGroup":
        raise _unknown(kind, data)
    size = _group(data.get("group_size"))
    if inputs % size:
        raise _malformed(f"group_size = {size} for {inputs} inputs", "a divisor of the inputs")
    return outputs, inputs // size


def _of_weights(granularity: object) -> object:
    """Return the granularity of weights, the second of a pair; the first one is for activations."""
    return granularity[1] if isinstance(granularity, list) and len(granularity) == 2 else granularity


def _whole_config(settings: Mapping[str, Any]) -> Any:
    chosen = settings.get("quant_type")
    if not isinstance(chosen, dict) or list(chosen) != [
        "default"
    ]:  # transformers no longer loads names ("int4_weight_only")
        raise _malformed(f"quant_type = {quote(chosen)}", "{default: a config of torchao's}")
    return chosen["default"]


def _read(config: object) -> tuple[str, dict]:
    """Return the class and the arguments in an output of config_to_dict."""
    if (
        not isinstance(config, dict)
        or not isinstance(config.get("_type"), str)
        or not isinstance(config.get("_data"), dict)
    ):
        raise _malformed(quote(config), "_type and _data, as torchao writes them")
    return config["_type"], config["_data"]


def _name_of(value: object, otherwise: str) -> str:
    """Return the name of a member of an enumeration."""
    chosen = value.get("_data") if isinstance(value, dict) else value
    return otherwise if chosen is None else str(chosen).upper()


def _dtype_of(value: object, otherwise: torch.dtype) -> torch.dtype:
    name = value.get("_data") if isinstance(value, dict) else value
    if name is None:
        return otherwise
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise _malformed(f"dtype {quote(name)}", "a dtype of PyTorch's")
    return found


def _group(size: object) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise _malformed(f"group_size = {quote(size)}", "1 and more")
    return size


def _malformed(given: str, allowed: str) -> ConfigError:
    return ConfigError("quantization_config is malformed", given=given, allowed=allowed)


def _unknown(kind: str, data: object) -> ConfigError:
    known = ", ".join((*_INT8, *_FLOAT8, *_INTX, _INT4))
    return ConfigError("no layout of these weights is known", given=f"{kind} {quote(data)}", allowed=known)

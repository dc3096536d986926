"""AMD Quark's `quantization_config` as plain values: the quantized parts of each layer, and parts without a known layout.

No torch.

It holds a config for all layers (`global_quant_config`), others by class and by pattern, and the patterns of unquantized
layers. Read in quark/torch/quantization/config/config.py and quark/torch/export/main_export/quant_config_parser.py of amd-quark
0.13.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from typing import Any

from sizer.base.errors import ConfigError, quote

_TENSOR, _CHANNEL, _GROUP = "per_tensor", "per_channel", "per_group"
# Allowed groupings of weights that share a scale, by dtype: those that quark itself quantizes, saves and loads.
SCHEMES = {
    **dict.fromkeys(("fp8_e4m3", "fp8_e5m2"), (_TENSOR, _CHANNEL)),
    **dict.fromkeys(("int8", "uint8", "int4", "uint4"), (_TENSOR, _CHANNEL, _GROUP)),
    **dict.fromkeys(("fp4", "fp6_e2m3", "fp6_e3m2"), (_GROUP,)),
}
_ACTIVATIONS = ("input_tensors", "output_tensors")
_SCALES = (None, "float32", "e8m0")  # `scale_format`
_FORMAT = "real_quantized"  # the `weight_format` of files with quantized weights


def layer_config(settings: Mapping[str, Any], path: str) -> Mapping[str, Any] | None:
    """Return quark's config by tensor of the linear layer at a dotted path (`weight`, `input_tensors`, `output_tensors`).

    None if the layer is not quantized. Raises ConfigError if the settings are not quark's.
    """
    patterns = _parts(settings, "layer_quant_config")
    named = next((own for pattern, own in patterns.items() if fnmatch(path, pattern)), None)
    found = named or _parts(settings, "layer_type_quant_config").get("Linear") or _global(settings)
    if not any(fnmatch(path, pattern) for pattern in _excluded(settings)):
        return found
    caches = _parts(settings, "kv_cache_quant_config")
    cache = next((own for pattern, own in caches.items() if fnmatch(path, pattern)), None)
    return None if cache is None else {"output_tensors": cache.get("output_tensors")}


def unknown_of(settings: Mapping[str, Any]) -> str | None:
    """Return the part of a config without a known layout, as text; None if there is none.

    Raises ConfigError as `layer_config` does.
    """
    export = settings.get("export")
    kind = export.get("weight_format", _FORMAT) if isinstance(export, dict) else _FORMAT
    if kind != _FORMAT:
        return f"weight_format {quote(kind)}"
    algorithms = settings.get("algo_config")
    for algorithm in algorithms if isinstance(algorithms, list) else [algorithms]:
        if isinstance(algorithm, dict) and _rotates(algorithm):
            return "layers that rotate their inputs"
    configs = [_global(settings), *_parts(settings, "layer_quant_config").values()]
    configs += _parts(settings, "layer_type_quant_config").values()
    for config in configs:
        if (unknown := next(_unknown_tensors(config), None)) is not None:
            return unknown
    caches = _parts(settings, "kv_cache_quant_config").values()
    return next((one for cache in caches for one in _unknown_activations(cache, "output_tensors")), None)


def check_known(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError if a part has no known layout."""
    if (unknown := unknown_of(settings)) is not None:
        raise ConfigError(
            "no layout of these weights is known", given=unknown, allowed="FP8, and 4 to 8 bits in one stage"
        )


def is_dynamic(spec: Mapping[str, Any]) -> bool:
    """Return whether the scales of a tensor are computed at run time."""
    return bool(spec.get("is_dynamic", spec.get("dynamic")))  # "dynamic" is quark's name before 1.0


def _unknown_tensors(config: Mapping[str, Any]) -> Iterator[str]:
    weight = config.get("weight")
    if isinstance(weight, list):
        yield "weights that are quantized in stages"
    elif weight is not None:
        spec = _spec(weight)
        dtype, scheme = spec.get("dtype"), spec.get("qscheme")
        if scheme not in SCHEMES.get(dtype if isinstance(dtype, str) else "", ()):
            yield f"{quote(dtype)} weights {quote(scheme)}"
        if is_dynamic(spec) or spec.get("is_scale_quant"):
            yield "weights that are quantized on use, or have quantized scales"
        if spec.get("zero_point_type") not in (None, "int32"):
            yield f"zero points of {quote(spec['zero_point_type'])}"
        if spec.get("scale_format") not in _SCALES:
            yield f"scales in {quote(spec['scale_format'])}"
    if config.get("bias") is not None:
        yield "biases that are quantized"
    for name in _ACTIVATIONS:
        yield from _unknown_activations(config, name)


def _unknown_activations(config: Mapping[str, Any], name: str) -> Iterator[str]:
    given = config.get(name)
    for spec in map(_spec, given if isinstance(given, list) else [] if given is None else [given]):
        if not is_dynamic(spec) and (isinstance(given, list) or spec.get("qscheme") != _TENSOR):
            yield f"{name} with separate scales {quote(spec.get('qscheme'))}"


def _rotates(algorithm: Mapping[str, Any]) -> bool:
    """Return whether layers hold a rotation of their inputs (RotationProcessor.get_online_rotation_layers)."""
    if algorithm.get("name") != "rotation":
        return False
    online = algorithm.get("online_config")
    named = isinstance(online, dict) and online.get("online_rotation_layers")
    return bool(named or algorithm.get("r3") or algorithm.get("r4") or algorithm.get("online_r1_rotation"))


def _global(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    found = settings.get("global_quant_config")
    if not isinstance(found, dict):
        raise malformed(f"global_quant_config = {quote(found)}", "a config of quark's")
    return found


def _parts(settings: Mapping[str, Any], key: str) -> dict[str, dict]:
    """Return configs by pattern, or by class."""
    found = settings.get(key) or {}
    if not isinstance(found, dict) or not all(isinstance(one, dict) for one in found.values()):
        raise malformed(f"{key} = {quote(found)}", "configs by name")
    return found


def _excluded(settings: Mapping[str, Any]) -> list[str]:
    names = settings.get("exclude") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise malformed(f"exclude = {quote(names)}", "a list of names")
    return names


def _spec(value: object) -> dict:
    if not isinstance(value, dict):
        raise malformed(quote(value), "how a tensor is quantized")
    return value


def malformed(given: str, allowed: str) -> ConfigError:
    """Return the error of a malformed `quantization_config`."""
    return ConfigError("quantization_config is malformed", given=given, allowed=allowed)

"""The tensors of one linear layer that AMD Quark has quantized: see sizer.architecture.layouts.

They are those of quark's QParamsLinear (quark/torch/export/nn/modules/ and quark/torch/utils/pack.py, amd-quark 0.13) after
transformers has loaded them: scales are then float32, for any dtype in the file (transformers/quantizers/base.py,
get_new_dtype, 5.23; 5.17 keeps the file's dtype).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from sizer.architecture.compressed_layouts import Tensors
from sizer.architecture.quantization_settings import WORD, whole
from sizer.architecture.quark_settings import is_dynamic, malformed
from sizer.base.errors import quote

# The storage dtype of an element, and the number of elements in it.
_INTEGERS = {
    "int8": (torch.int8, 1),
    "uint8": (torch.uint8, 1),
    "int4": (torch.int32, WORD // 4),
    "uint4": (torch.int32, WORD // 4),
}
_FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_BITS = {"fp4": 4, "fp6_e2m3": 6, "fp6_e3m2": 6}  # in bytes


def quark(settings: Mapping[str, Any], outputs: int, inputs: int, dtype: torch.dtype) -> Tensors:
    """Return the tensors of a layer by its `layer_config`. Raises ConfigError if its groups do not divide the inputs."""
    weight = settings.get("weight")
    # without its own config a weight is float32, in addition to scales of activations
    tensors: Tensors = {"weight": ((outputs, inputs), torch.float32)}
    if weight is not None:
        tensors = _weight(weight, outputs, inputs)
    for name in ("input", "output"):
        if isinstance(spec := settings.get(f"{name}_tensors"), dict) and not is_dynamic(spec):
            tensors |= {f"{name}_{key}": ((), held) for key, held in _scale(spec)}
    return tensors


def _weight(spec: Mapping[str, Any], outputs: int, inputs: int) -> Tensors:
    kind, scheme = spec["dtype"], spec["qscheme"]
    held, each = _INTEGERS.get(kind, (_FP8.get(kind, torch.uint8), 1))
    scales = _scales(spec, outputs, inputs)
    if kind in _BITS:
        packed = outputs, inputs * _BITS[kind] // 8
        return {"weight": (packed, held), "weight_scale": (scales, _scale_dtype(spec))}
    if kind in _FP8:
        return {"weight": ((outputs, inputs), held), "weight_scale": (scales, torch.float32)}
    if scheme == "per_group":  # integers in groups lie transposed
        packed, scales = (inputs, outputs // each), scales[::-1]
    else:
        packed = outputs, inputs // each
    zeros = (*scales[:-1], scales[-1] // each) if scales else ()
    return {"weight": (packed, held), "weight_scale": (scales, torch.float32), "weight_zero_point": (zeros, held)}


def _scales(spec: Mapping[str, Any], outputs: int, inputs: int) -> tuple[int, ...]:
    """Return the shape of the scales of a weight."""
    if spec["qscheme"] == "per_tensor":
        return ()
    if spec["qscheme"] == "per_channel":
        return ((outputs, inputs)[_axis(spec)],)
    size = whole(spec, "group_size", None)
    if size < 1 or inputs % size:
        raise malformed(f"group_size = {size} for {inputs} inputs", "a divisor of the inputs")
    return outputs, inputs // size


def _scale(spec: Mapping[str, Any]) -> Iterator[tuple[str, torch.dtype]]:
    """Yield the tensors that quantize another tensor with a single scale."""
    yield "scale", torch.float32
    if spec.get("dtype") in _INTEGERS:
        yield "zero_point", _INTEGERS[spec["dtype"]][0]


def _scale_dtype(spec: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of a weight's scales: E8M0 scales are bytes, which transformers does not convert."""
    return torch.uint8 if spec.get("scale_format") == "e8m0" else torch.float32


def _axis(spec: Mapping[str, Any]) -> int:
    axis = spec.get("ch_axis", spec.get("axis"))  # "axis" is quark's name before 1.0
    if axis not in (0, 1, -1) or isinstance(axis, bool):
        raise malformed(f"ch_axis = {quote(axis)}", "0, 1, -1")
    return axis

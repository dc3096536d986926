"""The tensors of one linear layer whose weights are looked up in codebooks: see sizer.architecture.layouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sizer.architecture.compressed_layouts import Tensors
from sizer.architecture.quantization_settings import WORD, ceil, whole
from sizer.base.errors import ConfigError, quote


def aqlm(settings: Mapping[str, Any], outputs: int, inputs: int, dtype: torch.dtype) -> Tensors:
    """aqlm/inference.py, QuantizedLinear, 1.1."""
    bits, books = whole(settings, "nbits_per_codebook", 16, tuple(range(1, 17))), whole(settings, "num_codebooks", 1)
    wide, high = whole(settings, "in_group_size", 8), whole(settings, "out_group_size", 1)
    if min(books, wide, high) < 1:
        raise ConfigError("quantization_config is malformed", given="a group or codebook of 0", allowed="1 and more")
    return {
        "codes": ((outputs // high, inputs // wide, books), torch.int8 if bits <= 8 else torch.int16),
        "codebooks": ((books, 2**bits, high, wide), dtype),
        "scales": ((outputs // high, 1, 1, 1), dtype),
    }


def vptq(settings: Mapping[str, Any], outputs: int, inputs: int, dtype: torch.dtype) -> Tensors:
    """vptq/layers/vqlinear.py, VQuantLinear with packed indices, of microsoft/VPTQ at 12b03f5: of two numbers the first is that of
    the outliers."""
    (outlier_long, long), (outlier_count, count) = _pair(settings, "vector_lens"), _pair(settings, "num_centroids")
    _, residual = _pair(settings, "num_res_centroids")
    books, size = whole(settings, "group_num", 1), whole(settings, "group_size", -1)
    if min(long, count, books, size) < 1:
        given = f"vector_lens, num_centroids, group_num, group_size = {long}, {count}, {books}, {size}"
        raise ConfigError("quantization_config is malformed", given=given, allowed="1 and more")
    bits = _bits(count) + (_bits(residual) if residual > 0 else 0)
    tensors: Tensors = {
        "indices": ((books, ceil(outputs, long), ceil(size * bits, WORD)), torch.int32),
        "centroids": ((books, count * long), dtype),
    }
    if residual > 0:
        tensors["res_centroids"] = (books, residual * long), dtype
    if outlier_long > 1 and outlier_count > 0:
        outliers = whole(settings, "outlier_size", 0)
        tensors["outlier_centroids"] = (1, outlier_count * outlier_long), dtype
        tensors["outlier_indices"] = (1, ceil(outputs, outlier_long), outliers), torch.int16
    if settings.get("enable_norm", True):
        tensors |= {"weight_scale": ((inputs,), dtype), "weight_bias": ((inputs,), dtype)}
    if settings.get("enable_perm", True):
        tensors["perm"] = (inputs,), torch.int16
    return tensors


def _pair(settings: Mapping[str, Any], key: str) -> tuple[int, int]:
    value = settings.get(key, (-1, -1))
    if not isinstance(value, (list, tuple)) or len(value) != 2 or not all(type(one) is int for one in value):
        raise ConfigError("quantization_config is malformed", given=f"{key} = {quote(value)}", allowed="two numbers")
    return value[0], value[1]


def _bits(count: int) -> int:
    """The bits that tell so many centroids apart, as the layer counts them: log2, rounded down."""
    return count.bit_length() - 1

"""The tensors of one quantized linear layer in a checkpoint, by its method, without the method's package.

A layout takes the settings of a `quantization_config`, the layer's outputs and inputs, and the dtype of unquantized tensors.
The first tensor represents the weight. Sources are the layers that load such tensors, at the versions named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from sizer.architecture.compressed_layouts import Tensors, compressed_tensors
from sizer.architecture.modelopt_layouts import modelopt
from sizer.architecture.quantization_settings import WORD, ceil, groups_of, whole
from sizer.architecture.quark_layouts import quark
from sizer.architecture.torchao_layouts import torchao
from sizer.base.errors import ConfigError, quote


def aqlm(settings: Mapping[str, Any], outputs: int, inputs: int, dtype: torch.dtype) -> Tensors:
    """Return the tensors of aqlm/inference.py, QuantizedLinear, 1.1."""
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
    """Return the tensors of vptq/layers/vqlinear.py, VQuantLinear with packed indices, of microsoft/VPTQ at 12b03f5.

    The first number of a pair belongs to the outliers.
    """
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
    """Return the bits for this number of centroids, as the layer computes them: log2, rounded down."""
    return count.bit_length() - 1


# ------------------------------------------------------------------------------------------------------------- layouts


Layout = Callable[[Mapping[str, Any], int, int, torch.dtype], Tensors]

BLOCK = 64  # weights that share a scale: bitsandbytes/functional.py, quantize_4bit, 0.50
SCALE_BLOCK = 256  # scales that share a second-level scale, if scales are quantized too
_MAP, _SCALE_MAP = 16, 256
_MX_BLOCK = 32  # weights that share a scale in the OCP microscaling formats


def layout_of(method: str, settings: Mapping[str, Any], outputs: int, inputs: int, dtype: torch.dtype) -> Tensors:
    """Return the tensors of a layer of `outputs` × `inputs` weights. Raises ConfigError if the settings do not fit the method."""
    return LAYOUTS[method](settings, outputs, inputs, dtype)


def _bitsandbytes(settings: Mapping[str, Any], outputs: int, inputs: int, dtype: torch.dtype) -> Tensors:
    """Return the tensors of bitsandbytes/nn/modules.py, Linear8bitLt, and bitsandbytes/functional.py, QuantState.as_dict, 0.50.

    The numbers that the latter packs into a tensor of bytes are read on the host.
    """
    if settings.get("load_in_8bit"):
        return {"weight": ((outputs, inputs), torch.int8), "SCB": ((outputs,), torch.float32)}
    blocks = ceil(outputs * inputs, BLOCK)
    tensors: Tensors = {"weight": ((ceil(outputs * inputs, 2), 1), torch.uint8)}
    if not settings.get("bnb_4bit_use_double_quant"):
        return tensors | {"absmax": ((blocks,), torch.float32), "quant_map": ((_MAP,), torch.float32)}
    return tensors | {
        "absmax": ((blocks,), torch.uint8),
        "quant_map": ((_MAP,), torch.float32),
        "nested_absmax": ((ceil(blocks, SCALE_BLOCK),), torch.float32),
        "nested_quant_map": ((_SCALE_MAP,), torch.float32),
    }


def _fp8(settings: Mapping[str, Any], outputs: int, inputs: int, dtype: torch.dtype) -> Tensors:
    """Return the tensors of transformers/integrations/finegrained_fp8.py, FP8Linear, 5.23.

    With expert_dtype = "fp4" they are those of FP8Experts, 5.24.

    FP8Experts with expert_dtype = "fp4", 5.24.
    """
    if settings.get("expert_dtype") == "fp4":
        held = torch.float8_e8m0fnu if settings.get("scale_fmt") == "ue8m0" else torch.float32
        return {
            "weight": ((outputs, ceil(inputs, 2)), torch.int8),
            "weight_scale_inv": ((outputs, ceil(inputs, _MX_BLOCK)), held),
        }
    block = settings.get("weight_block_size", (128, 128))
    if block is None:
        scales: tuple[int, ...] = ()
    else:
        if (
            not isinstance(block, (list, tuple))
            or len(block) != 2
            or not all(type(side) is int and side > 0 for side in block)
        ):
            given = f"weight_block_size = {quote(block)}"
            raise ConfigError("quantization_config is malformed", given=given, allowed="two sides of a block")
        scales = ceil(outputs, block[0]), ceil(inputs, block[1])
    exponents = block is not None and settings.get("scale_fmt") == "ue8m0"
    scale_dtype = torch.float8_e8m0fnu if exponents else torch.float32
    tensors: Tensors = {"weight": ((outputs, inputs), torch.float8_e4m3fn), "weight_scale_inv": (scales, scale_dtype)}
    return tensors | (
        {"activation_scale": ((), torch.float32)} if settings.get("activation_scheme") == "static" else {}
    )


def _mxfp4(settings: Mapping[str, Any], outputs: int, inputs: int, dtype: torch.dtype) -> Tensors:
    """Return the tensors of transformers/integrations/mxfp4.py, Mxfp4Deserialize, 5.23.

    Two weights share a byte, and each block has a scale (E8M0).
    """
    blocks = ceil(inputs, _MX_BLOCK)
    return {
        "blocks": ((outputs, blocks, _MX_BLOCK // 2), torch.uint8),
        "scales": ((outputs, blocks), torch.uint8),
    }


def _awq(settings: Mapping[str, Any], outputs: int, inputs: int, dtype: torch.dtype) -> Tensors:
    """Return the tensors of awq/modules/linear/gemm.py and gemv.py, 0.2.9: packed along the outputs, or along the inputs."""
    bits, groups = whole(settings, "bits", 4, (4,)), groups_of(settings, inputs)
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if version == "gemm":
        return {
            "qweight": ((inputs, outputs * bits // WORD), torch.int32),
            "qzeros": ((groups, outputs * bits // WORD), torch.int32),
            "scales": ((groups, outputs), torch.float16),
        }
    if version != "gemv":
        raise ConfigError("quantization_config is malformed", given=f"version = {quote(version)}", allowed="gemm, gemv")
    size = whole(settings, "group_size", 128)
    multiple = {128: 1, 64: 2, 32: 4}.get(size)  # calculate_zeros_width
    if multiple is None:
        raise ConfigError("quantization_config is malformed", given=f"group_size = {size}", allowed="32, 64, 128")
    width = ceil(ceil(inputs // size, WORD // bits), multiple) * multiple
    return {
        "qweight": ((outputs, inputs * bits // WORD), torch.int32),
        "qzeros": ((outputs, width), torch.int32),
        "scales": ((outputs, width * WORD // bits), torch.float16),
    }


def _gptq(settings: Mapping[str, Any], outputs: int, inputs: int, dtype: torch.dtype) -> Tensors:
    """Return the tensors of auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py, 0.7.

    The same are in gptqmodel/nn_modules/qlinear/__init__.py, 5. Weights are packed along the inputs, zeros along the outputs.
    Each input has the number of its group.
    """
    bits, groups = whole(settings, "bits", None, (2, 3, 4, 8)), groups_of(settings, inputs)
    return {
        "qweight": ((inputs * bits // WORD, outputs), torch.int32),
        "qzeros": ((groups, outputs * bits // WORD), torch.int32),
        "scales": ((groups, outputs), torch.float16),
        "g_idx": ((inputs,), torch.int32),
    }


def _auto_round(settings: Mapping[str, Any], outputs: int, inputs: int, dtype: torch.dtype) -> Tensors:
    """Return the tensors of auto_round_extension/torch/qlinear_torch.py of intel/auto-round at 07dfed0.

    They are packed as in GPTQ, without the group of each input, or as in AWQ.
    """
    packing = str(settings.get("packing_format", settings.get("backend", "auto_round:gptq")))  # the latter before 0.5
    if "awq" in packing:
        return _awq({**settings, "version": "gemm"}, outputs, inputs, dtype)
    if "gptq" not in packing or settings.get("data_type", "int") != "int":
        given = f"packing_format = {quote(packing)}, data_type = {quote(settings.get('data_type', 'int'))}"
        raise ConfigError("no layout of these weights is known", given=given, allowed="gptq or awq, of integers")
    tensors = _gptq(settings, outputs, inputs, dtype)
    return {name: held for name, held in tensors.items() if name != "g_idx"}


def _spqr(settings: Mapping[str, Any], outputs: int, inputs: int, dtype: torch.dtype) -> Tensors:
    """Return the tensors of SpQR (spqr_quant/inference.py, QuantizedLinear, 0.2).

    No rule gives their sizes: the config contains them as `shapes`.
    """
    shapes = settings.get("shapes")
    if not isinstance(shapes, dict):
        raise ConfigError(
            "quantization_config is malformed", given=f"shapes = {quote(shapes)}", allowed="shapes by layer"
        )
    dtypes = {"dense_weights": torch.int64, "row_offsets": torch.int32, "col_vals": torch.int32, "in_perm": torch.int32}
    return {name: ((whole(shapes, f"{name}.shape", None),), held) for name, held in dtypes.items()}


def _bitnet(settings: Mapping[str, Any], outputs: int, inputs: int, dtype: torch.dtype) -> Tensors:
    """Return the tensors of transformers/integrations/bitnet.py, BitLinear, 5.23: four weights to a byte."""
    return {"weight": ((outputs // 4, inputs), torch.uint8), "weight_scale": ((1,), dtype)}


def _eetq(settings: Mapping[str, Any], outputs: int, inputs: int, dtype: torch.dtype) -> Tensors:
    """Return the tensors of transformers/integrations/eetq.py, EetqLinear, 5.23."""
    return {"weight": ((inputs, outputs), torch.int8), "weight_scales": ((outputs,), torch.float16)}


def _fbgemm_fp8(settings: Mapping[str, Any], outputs: int, inputs: int, dtype: torch.dtype) -> Tensors:
    """Return the tensors of transformers/integrations/fbgemm_fp8.py, FbgemmFp8Linear, 5.23."""
    return {"weight": ((outputs, inputs), torch.float8_e4m3fn), "weight_scale": ((outputs, 1), torch.float32)}


def _gemma(settings: Mapping[str, Any], outputs: int, inputs: int, dtype: torch.dtype) -> Tensors:
    """Return the tensors of transformers/integrations/gemma_quant.py, QuantizedLinear, 5.23."""
    bits = whole(settings, "num_bits", 4, (2, 4, 8))
    held = torch.int8 if bits == 8 else torch.uint8
    return {
        "weight": ((outputs, ceil(inputs * bits, 8)), held),
        "weight_scale": ((outputs, 1), torch.float32),
        "input_activation_scale": ((), torch.float32),
        "output_activation_scale": ((), torch.float32),
    }


def _higgs(settings: Mapping[str, Any], outputs: int, inputs: int, dtype: torch.dtype) -> Tensors:
    """Return the tensors of transformers/integrations/higgs.py, HiggsLinear, 5.23."""
    bits = whole(settings, "bits", 4, (2, 3, 4))
    return {
        "weight": ((outputs * bits // 16, inputs), torch.int16),
        "scales": ((outputs, groups_of(settings, inputs, 256)), dtype),
        "tables": ((2**bits,), dtype),
        "tables2": ((2**bits, 2**bits, 2), dtype),
    }


def _hqq(settings: Mapping[str, Any], outputs: int, inputs: int, dtype: torch.dtype) -> Tensors:
    """Return the tensors of hqq/core/quantize.py, Quantizer.quantize, and hqq/core/bitpack.py, 0.2.8.

    Ten 3-bit values share a 32-bit word.
    """
    chosen = settings.get("quant_config", settings)
    chosen = chosen.get("weight_quant_params", chosen) if isinstance(chosen, dict) else settings
    bits = whole(chosen, "nbits", 4, (1, 2, 3, 4, 8))
    size = whole(chosen, "group_size", 64)
    if size < 1:
        raise ConfigError("quantization_config is malformed", given=f"group_size = {size}", allowed="1 and more")
    groups = ceil(outputs * inputs, size)
    weight = ((ceil(groups, 10), size), torch.int32) if bits == 3 else ((ceil(groups * bits, 8), size), torch.uint8)
    return {"W_q": weight, "scale": ((groups, 1), dtype), "zero": ((groups, 1), dtype)}


def _quanto(settings: Mapping[str, Any], outputs: int, inputs: int, dtype: torch.dtype) -> Tensors:
    """Return the tensors of optimum/quanto/nn/qmodule.py and tensor/weights/, 0.2.

    There is a scale for each output, or a scale and a shift for each group of 128 inputs.
    """
    kind = settings.get("weights", "int8")
    if kind in ("int8", "float8"):
        held = torch.int8 if kind == "int8" else torch.float8_e4m3fn
        return {"_data": ((outputs, inputs), held), "_scale": ((outputs, 1), dtype)}
    if kind not in ("int4", "int2"):
        allowed = "int8, float8, int4, int2"
        raise ConfigError("quantization_config is malformed", given=f"weights = {quote(kind)}", allowed=allowed)
    size = next((size for size in (128, 96, 64, 32) if inputs > 128 and not inputs % size), inputs)
    groups = outputs * (inputs // size)
    held = ceil(groups * int(kind[3:]), 8), size
    return {"_data": (held, torch.uint8), "_scale": ((groups, 1), dtype), "_shift": ((groups, 1), dtype)}


LAYOUTS: dict[str, Layout] = {
    "bitsandbytes": _bitsandbytes,
    "fp8": _fp8,
    "mxfp8": _fp8,
    "modelopt": modelopt,
    "mxfp4": _mxfp4,
    "awq": _awq,
    "gptq": _gptq,
    "aqlm": aqlm,
    "auto-round": _auto_round,
    "bitnet": _bitnet,
    "eetq": _eetq,
    "fbgemm_fp8": _fbgemm_fp8,
    "gemma": _gemma,
    "higgs": _higgs,
    "hqq": _hqq,
    "quanto": _quanto,
    "quark": quark,
    "spqr": _spqr,
    "torchao": torchao,
    "vptq": vptq,
    "compressed-tensors": compressed_tensors,
}

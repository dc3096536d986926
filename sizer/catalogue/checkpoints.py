"""Quantization of published checkpoints: the values of `quant_method` in a `quantization_config`, and the loaders of each.

Source for each method: transformers' quantizers (transformers/quantizers/, 5.23).
"""

from __future__ import annotations

from dataclasses import dataclass

from sizer.catalogue.optimizers import BITSANDBYTES
from sizer.catalogue.weights import FP8_CAPABILITY

# quantizer_mxfp4.py: on older devices, and if the package kernels is not installed, weights are converted to bfloat16
MXFP4_CAPABILITY = (7, 5)
FBGEMM_CAPABILITY = (9, 0)  # quantizer_fbgemm_fp8.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One value of `quant_method`.

    - `traced`: transformers' own layers of the method are traced. Otherwise, weights are counted by the method's layout, and a
      matrix product only allocates its result.
    - `adapts`: an adapter on such weights is traced; `adapters` names these adapters if not all are.
    - `lowest`: lowest capability that computes with such weights. On older devices, transformers converts them to 16 bits on
      load.
    - `decompresses`: transformers converts them in the first forward pass on every device.
    - `backends`: device types with known kernels.
    - `settings`: the keys of a `quantization_config` that are passed to transformers' own code.
    """

    key: str
    title: str
    traced: bool = False
    adapts: bool = False
    adapters: tuple[str, ...] = ()
    lowest: tuple[int, int] | None = None
    decompresses: bool = False
    backends: tuple[str, ...] = ("cuda",)
    settings: tuple[str, ...] = ()


_OF_BITSANDBYTES = (
    *("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype"),
    *("bnb_4bit_quant_storage", "llm_int8_threshold", "llm_int8_has_fp16_weight", "llm_int8_skip_modules"),
)
_OF_FP8 = (
    *("activation_scheme", "weight_block_size", "modules_to_not_convert", "modules_to_convert", "scale_fmt"),
    "expert_dtype",
)
_ROWS = (
    Method(
        key=BITSANDBYTES,
        title="bitsandbytes",
        traced=True,
        adapts=True,
        backends=("cuda", "cpu"),
        settings=_OF_BITSANDBYTES,
    ),
    Method(key="fp8", title="FP8 in blocks", traced=True, adapts=True, lowest=FP8_CAPABILITY, settings=_OF_FP8),
    Method(key="mxfp4", title="MXFP4", lowest=MXFP4_CAPABILITY),
    Method(key="awq", title="AWQ"),
    Method(key="gptq", title="GPTQ", adapts=True, adapters=("lora", "rslora")),
    Method(key="auto-round", title="AutoRound"),
    Method(key="modelopt", title="ModelOpt"),
    Method(key="mxfp8", title="MXFP8", lowest=FP8_CAPABILITY),
    Method(key="spqr", title="SpQR"),
    Method(key="vptq", title="VPTQ"),
    Method(key="compressed-tensors", title="compressed-tensors", decompresses=True),
    Method(key="aqlm", title="AQLM"),
    Method(key="bitnet", title="BitNet"),
    Method(key="eetq", title="EETQ"),
    Method(key="fbgemm_fp8", title="FBGEMM FP8", lowest=FBGEMM_CAPABILITY),
    Method(key="gemma", title="Gemma's own format"),
    Method(key="higgs", title="HIGGS"),
    Method(key="hqq", title="HQQ"),
    Method(key="quanto", title="quanto"),
    Method(key="quark", title="Quark"),
    Method(key="torchao", title="torchao"),
)

METHODS: dict[str, Method] = {row.key: row for row in _ROWS}


def title_of(method: str) -> str:
    """Return the title of a `quant_method`; the method's own name if it has no row."""
    return METHODS[method].title if method in METHODS else method

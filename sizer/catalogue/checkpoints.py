"""Quantisation of published checkpoints: the methods that `quantization_config` may name, and the loaders of each.

What transformers does with each was read in its quantizers (transformers/quantizers/, 5.23).
"""

from __future__ import annotations

from dataclasses import dataclass

from sizer.catalogue.optimizers import BITSANDBYTES
from sizer.catalogue.weights import FP8_CAPABILITY

# quantizer_mxfp4.py: below it, and where the package kernels is not installed, weights are made bfloat16
MXFP4_CAPABILITY = (7, 5)
FBGEMM_CAPABILITY = (9, 0)  # quantizer_fbgemm_fp8.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One value of `quant_method`. `traced` says whether transformers' own layers of it are traced; where they are not, their
    weights are counted by the method's layout, and a product takes its result alone.

    `adapts` says whether an adapter beside such weights is traced, `adapters` which if not all. `lowest` is the least
    capability that computes with them, below which transformers makes them 16 bits while it loads them;
    `decompresses` says that it does so in the first forward pass on every device.
    `backends` are the kinds of devices whose kernels for them are known. `settings` are what of a
    `quantization_config` transformers' own code is given.
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
    """Return what a `quant_method` is called: its own name where it has no row."""
    return METHODS[method].title if method in METHODS else method

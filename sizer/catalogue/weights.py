"""Formats of a language model's weights: as its config has them, quantized while they are loaded, or in a quantized checkpoint.

Source for each method of a checkpoint: transformers' quantizers (transformers/quantizers/, 5.23).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from sizer.catalogue.gpus import Gpu
from sizer.catalogue.optimizers import BITSANDBYTES

FP8_CAPABILITY = (8, 9)  # transformers/quantizers/quantizer_finegrained_fp8.py, 5.23: below it loads unquantized


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """One value of `weights=`: the `quantization_config`, as in a config.json, with which `from_pretrained` quantizes.

    Weights are not quantized if it is empty. `package` is needed in addition to transformers. `lowest` is the lowest capability
    of a GPU that computes with such weights; on older GPUs they are loaded unquantized.
    """

    key: str
    title: str
    config: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    package: str | None = None
    lowest: tuple[int, int] | None = None

    @property
    def has_4_bits(self) -> bool:
        """Return True for bitsandbytes' 4-bit layers, which have a separate compute dtype."""
        return bool(self.config.get("load_in_4bit"))

    @property
    def quantizes(self) -> bool:
        """Return True if weights are quantized on load."""
        return bool(self.config)

    def quantizes_on(self, gpu: Gpu) -> bool:
        """Return whether weights are quantized on this device."""
        return self.quantizes and (
            self.lowest is None or (gpu.capability is not None and gpu.capability >= self.lowest)
        )


def _of_bitsandbytes(key: str, title: str, **options: object) -> Weights:
    config = MappingProxyType({"quant_method": BITSANDBYTES, **options})
    return Weights(key=key, title=title, config=config, package=BITSANDBYTES)


_ROWS = (
    Weights(key="checkpoint", title="As the checkpoint has them"),
    Weights(key="full", title="Unquantized"),
    _of_bitsandbytes("nf4", "NF4", load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    _of_bitsandbytes(
        "nf4-dq", "NF4, quantized twice", load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    _of_bitsandbytes("fp4", "FP4", load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    _of_bitsandbytes("int8", "LLM.int8()", load_in_8bit=True),
    Weights(key="fp8", title="FP8", config=MappingProxyType({"quant_method": "fp8"}), lowest=FP8_CAPABILITY),
)

WEIGHTS: dict[str, Weights] = {row.key: row for row in _ROWS}


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
_CHECKPOINT_ROWS = (
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

METHODS: dict[str, Method] = {row.key: row for row in _CHECKPOINT_ROWS}


def title_of(method: str) -> str:
    """Return the title of a `quant_method`; the method's own name if it has no row."""
    return METHODS[method].title if method in METHODS else method

"""Formats of a language model's weights: as its config has them, or quantized while they are loaded."""

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
    Weights(key="full", title="Unquantised"),
    _of_bitsandbytes("nf4", "NF4", load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    _of_bitsandbytes(
        "nf4-dq", "NF4, quantised twice", load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    _of_bitsandbytes("fp4", "FP4", load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    _of_bitsandbytes("int8", "LLM.int8()", load_in_8bit=True),
    Weights(key="fp8", title="FP8", config=MappingProxyType({"quant_method": "fp8"}), lowest=FP8_CAPABILITY),
)

WEIGHTS: dict[str, Weights] = {row.key: row for row in _ROWS}

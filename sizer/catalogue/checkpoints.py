"""How published checkpoints are quantised: the methods that a config.json names in `quantization_config`, and what loads them.

What transformers does with each was read in its quantizers (transformers/quantizers/, 5.23).
"""

from __future__ import annotations

from dataclasses import dataclass

from sizer.catalogue.optimizers import BITSANDBYTES
from sizer.catalogue.weights import FP8_CAPABILITY

MXFP4_CAPABILITY = (
    7,
    5,
)  # quantizer_mxfp4.py: below it, and where `kernels` is not installed, weights are made bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One value of `quant_method`. `traced` says whether transformers' own layers of it are traced; where they are not, their
    weights are counted by the method's layout, and a product takes its result alone.

    `adapts` says whether an adapter beside such weights is traced. `lowest` is the least capability that computes with them, below
    which transformers makes them 16 bits while it loads them; `decompresses` says that it does so in the first forward pass on
    every device. `package` is what tracing needs beside transformers.
    """

    key: str
    title: str
    traced: bool = False
    adapts: bool = False
    lowest: tuple[int, int] | None = None
    decompresses: bool = False
    package: str | None = None


_ROWS = (
    Method(key="bitsandbytes", title="bitsandbytes", traced=True, adapts=True, package=BITSANDBYTES),
    Method(key="fp8", title="FP8 in blocks", traced=True, adapts=True, lowest=FP8_CAPABILITY),
    Method(key="mxfp4", title="MXFP4", lowest=MXFP4_CAPABILITY),
    Method(key="awq", title="AWQ"),
    Method(key="gptq", title="GPTQ"),
    Method(key="compressed-tensors", title="compressed-tensors", decompresses=True),
    Method(key="auto-round", title="AutoRound"),
    Method(key="aqlm", title="AQLM"),
    Method(key="bitnet", title="BitNet"),
    Method(key="eetq", title="EETQ"),
    Method(key="fbgemm_fp8", title="FBGEMM FP8", lowest=(9, 0)),
    Method(key="higgs", title="HIGGS"),
    Method(key="hqq", title="HQQ"),
    Method(key="quanto", title="quanto"),
    Method(key="torchao", title="torchao"),
)

METHODS: dict[str, Method] = {row.key: row for row in _ROWS}

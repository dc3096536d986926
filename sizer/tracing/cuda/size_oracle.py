"""The size oracle of a GPU, which resolves the size queries of a tape (sizer.memory.size_queries): one line for each kind."""

from __future__ import annotations

from collections.abc import Callable

from sizer.catalogue.gpus import Gpu
from sizer.catalogue.hardware import HARDWARE
from sizer.memory.size_queries import SizeOracle
from sizer.tracing.cuda import bitsandbytes, convolution, cudnn, cudnn_convolution, embedding, normalization, reductions

# Each takes the key of a GPU, the query's words and numbers, and returns bytes, or None where it cannot tell.
KINDS: dict[str, Callable[[str, tuple[str, ...], tuple[int, ...]], int | None]] = {
    bitsandbytes.GEMM_4BIT: bitsandbytes.resolve,
    convolution.CUDNN: cudnn_convolution.workspace_bytes,
    embedding.EMBEDDING: embedding.resolve,
    normalization.NORM: normalization.resolve,
    reductions.REDUCTION: reductions.resolve,
}


def size_oracle_of(gpu: Gpu) -> SizeOracle | None:
    """The function that resolves size queries (bytes) for this GPU; None for a device whose hardware is not in the catalogue."""
    if gpu.key not in HARDWARE:
        return None

    def resolve(kind: str, words: tuple[str, ...], numbers: tuple[int, ...]) -> int | None:
        return KINDS[kind](gpu.key, words, numbers)

    return resolve


def oracle_name(gpu: Gpu) -> str | None:
    """Where its sizes come from, in words for a report; None where there is no cuDNN to ask and workspaces are modelled."""
    if gpu.key not in HARDWARE or cudnn.version() is None:
        return None
    return f"cuDNN {cudnn.version_text()} chooses for a described {HARDWARE[gpu.key].name}"

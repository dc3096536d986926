"""Who answers the questions on a tape (sizer.memory.size_queries): one line for each kind."""

from __future__ import annotations

from collections.abc import Callable

from sizer.catalogue.gpus import Gpu
from sizer.catalogue.hardware import HARDWARE
from sizer.memory.size_queries import SizeOracle
from sizer.tracing.cuda import convolution, cudnn, cudnn_convolution, embedding, normalization, reductions

# Each takes the key of a GPU, the question's words and numbers, and returns bytes, or None where it cannot tell.
KINDS: dict[str, Callable[[str, tuple[str, ...], tuple[int, ...]], int | None]] = {
    convolution.CUDNN: cudnn_convolution.workspace_bytes,
    embedding.EMBEDDING: embedding.answer,
    normalization.NORM: normalization.answer,
    reductions.REDUCTION: reductions.answer,
}


def size_oracle_of(gpu: Gpu) -> SizeOracle | None:
    """The function that answers questions (bytes) about this GPU; None for a device that nobody can describe."""
    if gpu.key not in HARDWARE:
        return None

    def answer(kind: str, words: tuple[str, ...], numbers: tuple[int, ...]) -> int | None:
        return KINDS[kind](gpu.key, words, numbers)

    return answer


def oracle_name(gpu: Gpu) -> str | None:
    """Whose answers they are, in words for a report; None where nobody answers and workspaces are modelled."""
    if gpu.key not in HARDWARE or cudnn.version() is None:
        return None
    return f"cuDNN {cudnn.version_text()} chooses for a described {HARDWARE[gpu.key].name}"

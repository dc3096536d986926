"""Who answers the questions on a tape (sizer.memory.questions): one line for each kind."""

from __future__ import annotations

from collections.abc import Callable

from sizer.memory.gpus import Gpu
from sizer.memory.hardware import HARDWARE
from sizer.memory.questions import Answer
from sizer.tracing import (
    convolution_cuda,
    cudnn,
    cudnn_convolution,
    embedding_cuda,
    normalization_cuda,
    reductions_cuda,
)

# Each takes the key of a GPU, the question's words and numbers, and returns bytes, or None where it cannot tell.
KINDS: dict[str, Callable[[str, tuple[str, ...], tuple[int, ...]], int | None]] = {
    convolution_cuda.CUDNN: cudnn_convolution.workspace_bytes,
    embedding_cuda.EMBEDDING: embedding_cuda.answer,
    normalization_cuda.NORM: normalization_cuda.answer,
    reductions_cuda.REDUCTION: reductions_cuda.answer,
}


def answers_for(gpu: Gpu) -> Answer | None:
    """The function that answers questions (bytes) about this GPU; None for a device that nobody can describe."""
    if gpu.key not in HARDWARE:
        return None

    def answer(kind: str, words: tuple[str, ...], numbers: tuple[int, ...]) -> int | None:
        return KINDS[kind](gpu.key, words, numbers)

    return answer


def who_answers(gpu: Gpu) -> str | None:
    """Whose answers they are, in words for a report; None where nobody answers and workspaces are modelled."""
    if gpu.key not in HARDWARE or cudnn.version() is None:
        return None
    return f"cuDNN {cudnn.version_text()} chooses for a described {HARDWARE[gpu.key].name}"

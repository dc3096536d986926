"""Size oracle of a GPU, which resolves the size queries of a tape (sizer.tape.size_queries): one line for each kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sizer.catalogue.gpus import Gpu
from sizer.catalogue.hardware import HARDWARE
from sizer.tape.size_queries import SizeOracle, SizeQueryKey
from sizer.tracing.cuda import by_hardware, cudnn, cudnn_convolution
from sizer.tracing.cuda.by_capability import CUDNN

# Each function takes the key of a GPU and the words and numbers of queries. It returns bytes for each query, None if unknown.
Resolve = Callable[[str, Sequence[tuple[tuple[str, ...], tuple[int, ...]]]], list[int | None]]


def _each(resolve: Callable[[str, tuple[str, ...], tuple[int, ...]], int | None]) -> Resolve:
    """Return a resolver of many queries from a resolver of one query."""
    return lambda gpu, queries: [resolve(gpu, words, numbers) for words, numbers in queries]


def _gemm_4bit(key: str, words: tuple[str, ...], numbers: tuple[int, ...]) -> int:
    from sizer.tracing.cuda import bitsandbytes  # imports torch, which no other kind needs

    return bitsandbytes.resolve(key, words, numbers)


KINDS: dict[str, Resolve] = {
    by_hardware.GEMM_4BIT: _each(_gemm_4bit),
    CUDNN: cudnn_convolution.workspace_bytes,
    by_hardware.DROPOUT: _each(by_hardware.dropout_state),
    by_hardware.EMBEDDING: _each(by_hardware.embedding_block),
    by_hardware.NORM: _each(by_hardware.norm_block),
    by_hardware.REDUCTION: _each(by_hardware.reduction_block),
    by_hardware.SORT: _each(by_hardware.sort_block),
}


def size_oracle_of(gpu: Gpu) -> SizeOracle | None:
    """Return the function that resolves size queries (bytes) for this GPU; None if its hardware is not in the catalogue."""
    if gpu.key not in HARDWARE:
        return None

    def resolve(asked: Sequence[SizeQueryKey]) -> list[int | None]:
        places: dict[str, list[int]] = {}
        for place, (kind, _, _) in enumerate(asked):
            places.setdefault(kind, []).append(place)
        found: list[int | None] = [None] * len(asked)
        for kind, alike in places.items():
            answers = KINDS[kind](gpu.key, [asked[place][1:] for place in alike])
            for place, answer in zip(alike, answers, strict=True):
                found[place] = answer
        return found

    return resolve


def oracle_name(gpu: Gpu) -> str | None:
    """Return the source of this GPU's sizes, in words for a report; None if there is no cuDNN and workspaces are modelled."""
    if gpu.key not in HARDWARE or cudnn.version() is None:
        return None
    return f"cuDNN {cudnn.version_text()} chooses for a described {HARDWARE[gpu.key].name}"

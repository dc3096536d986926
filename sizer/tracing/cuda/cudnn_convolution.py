"""Workspace of one convolution, queried from cuDNN as PyTorch does.

Source: aten/src/ATen/native/cudnn/Conv_v8.cpp, versions 2.11 to 2.15.

The words of a size query are the direction, the dtype, the layout and flags ("tf32", "deterministic", "benchmark"). Its numbers
are the sizes of input, output and weight, then padding, stride and dilation, then the offsets in bytes of input, output and
weight in their blocks.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Sequence
from itertools import product

import numpy as np

from sizer.catalogue.hardware import HARDWARE
from sizer.tracing.cuda import cudnn

_MOST_KEPT = 2**12  # answers of one GPU
_NEW = object()  # marks an answer that is not known yet

# An fp32 1x1 convolution [8, 256, 56, 56] to 64 channels: cuDNN queries cuBLASLt for it on every device.
_POINTWISE = (8, 256, 56, 56, 8, 64, 56, 56, 64, 256, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0)
_SPATIAL = (8, 64, 56, 56, 8, 64, 56, 56, 64, 64, 3, 3, 1, 1, 1, 1, 1, 1, 0, 0, 0)  # 3x3
_STRIDED = (8, 128, 56, 56, 8, 128, 28, 28, 128, 128, 3, 3, 1, 1, 2, 2, 1, 1, 0, 0, 0)
_WORDS = ("forward", "float32", "contiguous", "tf32")
_DIRECTIONS = ("forward", "backward data", "backward filter")


@functools.cache
def without_cublaslt() -> str | None:
    """Return why cuDNN cannot choose engines that use cuBLASLt, in words; None if it can.

    The query also has to be the first one of a process, about a device with TF32. cuDNN remembers from the first device of a
    process whether TF32 is available, and would deny it to later devices (seen in 9.19 and 9.26).
    """
    interposed = cudnn.interposer()
    if isinstance(interposed, str):
        return interposed
    ask("a100-80gb", _WORDS, [_POINTWISE])
    return None if interposed.product_queries else "cuDNN had looked for cuBLASLt before, or does not"


def prepare() -> None:
    """Query each device once, so that forked processes inherit cuDNN's lookups for its kind.

    Does nothing if there is a driver: cuDNN would initialize it, and CUDA cannot be used in a process forked after that.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        for gpu in HARDWARE:
            queries = product(_DIRECTIONS, (_POINTWISE, _SPATIAL, _STRIDED))
            workspace_bytes(gpu, [((direction, *_WORDS[1:]), numbers) for direction, numbers in queries])


# cuDNN's answers in this process, by the key of a GPU, then by a query's words and numbers
_kept: dict[str, dict[tuple[tuple[str, ...], tuple[int, ...]], int | None]] = {}


def workspace_bytes(gpu: str, queries: Sequence[tuple[tuple[str, ...], tuple[int, ...]]]) -> list[int | None]:
    """Return the workspace (bytes) for each query's words and numbers, on a GPU of the catalogue.

    The workspace is that of the first plan that PyTorch would run, or the largest of the plans that it would benchmark. The result
    is None if cuDNN is not installed, is too old for described devices, or has no plan.
    """
    without_cublaslt()
    kept = _kept.setdefault(gpu, {})
    found: list = [kept.get(query, _NEW) for query in queries]
    alike: dict[tuple, list[int]] = {}  # positions of new queries with the same words and rank
    for place, ((words, numbers), answer) in enumerate(zip(queries, found, strict=True)):
        if answer is _NEW:
            alike.setdefault((words, len(numbers)), []).append(place)
    for (words, _), places in alike.items():
        places.sort(key=lambda place: queries[place][1][1:])  # all numbers except the batch: cuDNN answers similar queries faster
        for place, answer in zip(places, ask(gpu, words, [queries[place][1] for place in places]), strict=True):
            found[place] = kept[queries[place]] = answer
    while len(kept) > _MOST_KEPT:
        del kept[next(iter(kept))]  # the oldest answer
    return found


def ask(gpu: str, words: tuple[str, ...], rows: Iterable[tuple[int, ...]]) -> list[int | None]:
    """Return the result of `workspace_bytes` for queries of the same words and rank."""
    asked = np.array([*rows], np.int64)
    found, device = cudnn.library(), cudnn.device(gpu)
    if found is None or device is None:
        return [None] * len(asked)
    from sizer.tracing.cuda.cudnn_plans import workspaces  # imports Numba, which is not needed without queries

    with cudnn.described(gpu):
        # Plans that need more than the free memory are left out (get_available_workspace). Here the limit is the memory of the
        # device.
        most = HARDWARE[gpu].gpu.total_bytes if "benchmark" in words else 0
        unwanted = _unwanted_engines(words[0], gpu, rank=(asked.shape[1] + 3) // 6)
        answers = workspaces(found, device, words, asked, unwanted, most=most)
    return [answer if answer >= 0 else None for answer in answers.tolist()]


def _unwanted_engines(direction: str, gpu: str, *, rank: int) -> frozenset[int]:
    """Return the engines that are skipped (plan_errata_exception)."""
    version = cudnn.version() or 0
    found: frozenset[int] = frozenset()
    if rank == 5 and (direction == "backward data" or 90800 <= version < 91500):
        found |= _ERRATA_3D.get(direction, frozenset())
    if HARDWARE[gpu].capability[0] == 12 and version >= 92300:
        found |= _ERRATA_SM120[direction]
    return found


_ERRATA_3D = {"forward": frozenset({23}), "backward data": frozenset({23})}
_ERRATA_SM120 = {"forward": frozenset({58}), "backward data": frozenset({63}), "backward filter": frozenset({63})}

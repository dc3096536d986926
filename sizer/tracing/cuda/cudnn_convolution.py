"""The workspace of one convolution as PyTorch would ask cuDNN for it: aten/src/ATen/native/cudnn/Conv_v8.cpp, versions 2.11
to 2.15, without benchmarking.

A size query's words are the direction, the dtype, the layout and flags ("tf32", "deterministic"); its numbers the sizes of
input, output and weight, then padding, stride and dilation, then where input, output and weight begin in their blocks (bytes).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Sequence

import numpy as np

from sizer.catalogue.hardware import HARDWARE
from sizer.memory.compiled import compiled, compiled_within
from sizer.tracing.cuda import cudnn, cudnn_graph

_FARTHEST = 32  # getAlignment looks no farther
_MOST_KEPT = 2**16

# The kinds of operation, each with the numbers of its attributes: alpha, beta, convolution, weight, input, output.
_OPERATIONS = {
    "forward": (10, *range(700, 706)),
    "backward data": (12, *range(706, 712)),
    "backward filter": (11, *range(712, 718)),
}
_X, _Y, _W = b"xyw"  # names of input, output and weight
_ONE = int(np.float32(1).view(np.int32))  # the bits of alpha

# An fp32 1x1 convolution [8, 256, 56, 56] to 64 channels: cuDNN asks cuBLASLt for it on every device.
_POINTWISE = (8, 256, 56, 56, 8, 64, 56, 56, 64, 256, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0)
_SPATIAL = (8, 64, 56, 56, 8, 64, 56, 56, 64, 64, 3, 3, 1, 1, 1, 1, 1, 1, 0, 0, 0)  # 3x3
_WORDS = ("forward", "float32", "contiguous", "tf32")


@functools.cache
def without_cublaslt() -> str | None:
    """Why engines that use cuBLASLt are not among those that cuDNN chooses from, in words; None where they are.

    The query that tells is also the first one of a process, about a device with TF32: cuDNN remembers from the first device
    that it is asked about whether TF32 is to be had, and would deny it to later ones (seen in 9.19 and 9.26).
    """
    interposed = cudnn.interposer()
    if isinstance(interposed, str):
        return interposed
    ask("a100-80gb", _WORDS, [_POINTWISE])
    return None if interposed.product_queries else "cuDNN had looked for cuBLASLt before, or does not"


def prepare() -> None:
    """Ask about a device of each capability: what cuDNN looks up for its kind stands in processes that are forked from this one.

    Not where there is a driver: cuDNN would initialize it, and CUDA cannot be used in what is forked from such a process.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        for gpu in {hardware.capability: key for key, hardware in HARDWARE.items()}.values():
            workspace_bytes(gpu, [(_WORDS, _POINTWISE), (_WORDS, _SPATIAL)])


# What cuDNN has answered in this process, by the key of a GPU and a query's words and numbers
_kept: dict[tuple[str, tuple[str, ...], tuple[int, ...]], int | None] = {}


def workspace_bytes(gpu: str, queries: Sequence[tuple[tuple[str, ...], tuple[int, ...]]]) -> list[int | None]:
    """The workspace (bytes) of the first plan that PyTorch would run on a GPU of the catalogue, for each query's words and
    numbers; None where cuDNN is not installed, too old for described devices, or has no plan."""
    without_cublaslt()
    alike: dict[tuple, dict[tuple[int, ...], None]] = {}
    for words, numbers in queries:
        if (gpu, words, numbers) not in _kept:
            alike.setdefault((words, len(numbers)), {})[numbers] = None
    for (words, _), rows in alike.items():
        _kept.update(zip([(gpu, words, numbers) for numbers in rows], ask(gpu, words, rows), strict=True))
    found = [_kept[gpu, words, numbers] for words, numbers in queries]
    while len(_kept) > _MOST_KEPT:
        del _kept[next(iter(_kept))]  # that of the oldest
    return found


def ask(gpu: str, words: tuple[str, ...], rows: Iterable[tuple[int, ...]]) -> list[int | None]:
    """What `workspace_bytes` returns, asked for queries of the same words and rank."""
    asked = np.array([*rows], np.int64)
    found, device = cudnn.library(), cudnn.device(gpu)
    if found is None or device is None:
        return [None] * len(asked)
    direction, dtype, layout = words[:3]
    types = (
        cudnn_graph.DATA_TYPES[dtype],
        cudnn_graph.DATA_TYPES["float32" if dtype in ("float16", "bfloat16") else dtype],
    )
    notes = sum(1 << note for note in _unwanted_notes(words))
    engines = _unwanted_engines(direction, gpu, rank=_rank(asked.shape[1]))
    answers = np.empty(len(asked), np.int64)
    with cudnn.described(gpu):
        _workspaces(
            cudnn_graph.begin(found), device, _OPERATIONS[direction], *types, layout == "channels last", notes,
            np.array(sorted(engines), np.int64), asked, answers,
        )  # fmt: skip
    return [int(answer) if answer >= 0 else None for answer in answers]


def _unwanted_notes(words: tuple[str, ...]) -> list[int]:
    """Notes of engines that are passed over (filterEngineConfigs)."""
    no_tensor_cores = words[1] == "float32" and "tf32" not in words
    return [
        cudnn_graph.DOWN_CONVERT,
        *[cudnn_graph.TENSOR_CORE] * no_tensor_cores,
        *[cudnn_graph.NONDETERMINISTIC] * ("deterministic" in words),
    ]


def _unwanted_engines(direction: str, gpu: str, *, rank: int) -> frozenset[int]:
    """Engines that are passed over (plan_errata_exception)."""
    version, found = cudnn.version() or 0, frozenset()
    if rank == 5 and (direction == "backward data" or 90800 <= version < 91500):
        found |= _ERRATA_3D.get(direction, frozenset())
    if HARDWARE[gpu].capability[0] == 12 and version >= 92300:
        found |= _ERRATA_SM120[direction]
    return found


_ERRATA_3D = {"forward": frozenset({23}), "backward data": frozenset({23})}
_ERRATA_SM120 = {"forward": frozenset({58}), "backward data": frozenset({63}), "backward filter": frozenset({63})}


# ---------------------------------------------------------------------------------------------------------- compiled


@compiled_within
def _graph(
    cudnn: np.ndarray, operation: tuple[int, ...], dtype: int, computed: int, channels_last: bool, numbers: np.ndarray
) -> int:  # fmt: skip
    """build_opgraph, getTensorDescriptor and getConvDescriptor; 0 where cuDNN refuses it."""
    kind, alpha, beta, described, weight, input, output = operation
    rank = _rank(len(numbers))
    rest, spatial = numbers[3 * rank :], rank - 2
    made = cudnn_graph.create(cudnn, kind)
    convolution = cudnn_graph.convolution(
        cudnn, computed, rest[:spatial], rest[spatial : 2 * spatial], rest[2 * spatial : 3 * spatial]
    )
    if not (made and convolution and _put(cudnn, made, described, convolution)):
        return 0
    for place, (attribute, name) in enumerate(((input, _X), (output, _Y), (weight, _W))):
        sizes, begin = numbers[place * rank : (place + 1) * rank], numbers[len(numbers) - 3 + place]
        tensor = cudnn_graph.tensor(cudnn, name, dtype, sizes, channels_last, _alignment(begin))
        if not (tensor and _put(cudnn, made, attribute, tensor)):
            return 0
    scaled = cudnn_graph.put(cudnn, made, alpha, cudnn_graph.FLOAT, _ONE)
    if not (scaled and cudnn_graph.put(cudnn, made, beta, cudnn_graph.FLOAT, 0)):
        return 0
    return cudnn_graph.graph(cudnn, made) if cudnn_graph.finalize(cudnn, made) else 0


@compiled_within
def _put(cudnn: np.ndarray, operation: int, attribute: int, part: int) -> bool:
    return cudnn_graph.put(cudnn, operation, attribute, cudnn_graph.DESCRIPTOR, part)


@compiled_within
def _rank(numbers: int) -> int:
    """The dimensions of tensors whose query has so many numbers."""
    return (numbers + 3) // 6


@compiled_within
def _alignment(begin: int) -> int:
    """getAlignment."""
    found = _FARTHEST
    while begin % found:
        found //= 2
    return found


@compiled(
    "void(int64[::1], int64, UniTuple(int64, 7), int64, int64, boolean, int64, int64[::1], int64[:, ::1], int64[::1])"
)
def _workspaces(
    cudnn: np.ndarray, device: int, operation: tuple[int, ...], dtype: int, computed: int, channels_last: bool,
    unwanted_notes: int, unwanted_engines: np.ndarray, asked: np.ndarray, answers: np.ndarray,
) -> None:  # fmt: skip
    """Write the answer to each row of numbers, -1 where there is no plan."""
    for at in range(len(asked)):
        answers[at] = -1
        graph = _graph(cudnn, operation, dtype, computed, channels_last, asked[at])
        if graph:
            config = cudnn_graph.first_config(
                cudnn, graph, device, cudnn_graph.INSTANT, unwanted_notes, unwanted_engines
            )
            if not config:
                config = cudnn_graph.first_config(
                    cudnn, graph, device, cudnn_graph.FALLBACK, unwanted_notes, unwanted_engines
                )
            if config:
                answers[at] = cudnn_graph.workspace(cudnn, config)
        cudnn_graph.destroy(cudnn, 0)

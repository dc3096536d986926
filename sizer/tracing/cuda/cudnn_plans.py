"""Plans of cuDNN for convolutions, as PyTorch would choose them: compiled, for many of the same kind at once.

As of PyTorch 2.11 to 2.15: aten/src/ATen/native/cudnn/Conv_v8.cpp.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np

from sizer.allocator.numba_functions import compiled, compiled_within
from sizer.tracing.cuda import cudnn_graph

_FARTHEST = 32  # largest alignment that getAlignment checks

# Kinds of operation, each with the numbers of its attributes: alpha, beta, convolution, weight, input, output.
_OPERATIONS = {
    "forward": (10, *range(700, 706)),
    "backward data": (12, *range(706, 712)),
    "backward filter": (11, *range(712, 718)),
}
_X, _Y, _W = b"xyw"  # names of input, output and weight
_ONE = int(np.float32(1).view(np.int32))  # the bits of alpha


def workspaces(
    library: ctypes.CDLL,
    device: int,
    words: tuple[str, ...],
    asked: np.ndarray,
    unwanted_engines: Iterable[int],
    *,
    most: int = 0,
) -> np.ndarray:
    """Return the bytes of a workspace for each row of a query's numbers [queries, numbers], int64; -1 if there is no plan.

    The workspace is that of the first plan, or the largest one up to `most` bytes if `most` is given. `words` are those of a
    size query (sizer.tracing.cuda.cudnn_convolution), `device` is a descriptor.
    """
    direction, dtype, layout = words[:3]
    computed = "float32" if dtype in ("float16", "bfloat16") else dtype
    answers: np.ndarray = np.empty(len(asked), np.int64)
    _workspaces(
        cudnn_graph.begin(library), device, _OPERATIONS[direction], cudnn_graph.DATA_TYPES[dtype],
        cudnn_graph.DATA_TYPES[computed], layout == "channels last", sum(1 << note for note in _unwanted_notes(words)),
        np.array(sorted(unwanted_engines), np.int64), most, asked, answers,
    )  # fmt: skip
    return answers


def _unwanted_notes(words: tuple[str, ...]) -> list[int]:
    """Return the notes of engines that are skipped (filterEngineConfigs)."""
    no_tensor_cores = words[1] == "float32" and "tf32" not in words
    return [
        cudnn_graph.DOWN_CONVERT,
        *[cudnn_graph.TENSOR_CORE] * no_tensor_cores,
        *[cudnn_graph.NONDETERMINISTIC] * ("deterministic" in words),
    ]


@compiled_within
def _graph(
    cudnn: np.ndarray, operation: tuple[int, ...], dtype: int, computed: int, channels_last: bool, numbers: np.ndarray
) -> int:  # fmt: skip
    """Return the graph of a convolution (build_opgraph, getTensorDescriptor and getConvDescriptor); 0 if cuDNN refuses it."""
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
    """Return the number of dimensions of tensors from the length of their query's numbers."""
    return (numbers + 3) // 6


@compiled_within
def _alignment(begin: int) -> int:
    """Return the alignment in bytes of an offset (getAlignment)."""
    found = _FARTHEST
    while begin % found:
        found //= 2
    return found


@compiled(
    "void(int64[::1], int64, UniTuple(int64, 7), int64, int64, boolean, int64, int64[::1], int64, int64[:, ::1], int64[::1])"
)
def _workspaces(
    cudnn: np.ndarray, device: int, operation: tuple[int, ...], dtype: int, computed: int, channels_last: bool,
    unwanted_notes: int, unwanted_engines: np.ndarray, most: int, asked: np.ndarray, answers: np.ndarray,
) -> None:  # fmt: skip
    """Write the answer to each row of numbers; -1 if there is no plan."""
    for at in range(len(asked)):
        answers[at] = -1
        graph = _graph(cudnn, operation, dtype, computed, channels_last, asked[at])
        if graph and most:
            for mode in (cudnn_graph.INSTANT, cudnn_graph.FALLBACK):
                largest = cudnn_graph.largest_workspace(
                    cudnn, graph, device, mode, unwanted_notes, unwanted_engines, most
                )
                answers[at] = max(answers[at], largest)
        elif graph:
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

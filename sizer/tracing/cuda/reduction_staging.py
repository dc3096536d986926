"""The staging memory of CUDA reductions that several blocks of threads share: bytes by shapes, strides and device.

Source: ATen/native/cuda/Reduce.cuh (setReduceConfig, global_memory_size, semaphore_size; alike in PyTorch 2.6, 2.11 and 2.15) and
TensorIterator.cpp (reorder_dimensions, coalesce_dimensions). Where rows are many and columns few, as in the gradient of a bias,
each column's partial sums of all blocks are kept apart, thread by thread: tens of MiB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

_WARP = 32
_MOST_THREADS = 512  # of a block: mnt_wrapper
_LEAST_VALUES, _MOST_VALUES = 16, 256  # per thread
_INDEXED = 2**31 - 1  # elements (and bytes of reach) that 32-bit indices can tell apart


@dataclass(frozen=True, slots=True)
class _Dim:
    size: int
    stride: int  # of the input, in elements
    out: int  # of the output; 0 where reduced


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """What is reduced: `shape` and `strides` (in elements) of the input, of bytes `itemsize`, and which dimensions go.

    `accumulator` is the bytes of a partial result, `vector` the elements that a thread loads at once; `converts` says whether
    partial results can wait in the output.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    reduced: tuple[bool, ...]
    itemsize: int
    accumulator: int
    vector: int = 4
    converts: bool = True


@lru_cache(maxsize=4096)
def staging_bytes(work: Reduction, processors: int, threads: int) -> tuple[tuple[int, ...], ...]:
    """The blocks (bytes) that a reduction holds, as stages: partial results and semaphores, once per piece that 32 bits index.

    `processors` and `threads` are the device's multiprocessors and what each of them can hold.
    """
    if not prod(work.shape):
        return ()
    dims = _iterator_order(work.shape, work.strides, work.reduced)
    pieces = list(_pieces(dims, work.itemsize))
    waiting: tuple[int, ...] = ()
    if len(pieces) > 1 and not work.converts:
        waiting = (prod(dim.size for dim in dims if dim.out) * work.accumulator,)
    stages = [(*waiting, *_staging(piece, work, processors, threads)) for piece in pieces]
    return tuple(stage for stage in stages if stage)


def _staging(dims: list[_Dim], work: Reduction, processors: int, threads: int) -> tuple[int, ...]:
    inner = sum(1 for dim in dims if dim.out == 0)  # num_reduce_dims
    inputs = prod(dim.size for dim in dims[:inner])
    outputs = prod(dim.size for dim in dims[inner:])
    along_rows = inner == len(dims) or (inner > 0 and dims[0].stride < dims[inner].stride)
    width, height = (inputs, outputs) if along_rows else (outputs, inputs)
    lanes = 1  # output_vec_size
    if dims and dims[0 if along_rows else inner].stride == 1:
        if along_rows and width >= 128 and inner == 1:
            width //= work.vector
        elif not along_rows:
            lanes = _output_vector(dims, inner)
            width //= lanes
    across, down = _block(width, height, _MOST_THREADS // lanes)
    step_input, step_output = (across, 1) if along_rows else (1, across)
    if -(-inputs // step_input) < min(down * 16, _MOST_VALUES):
        return ()  # each warp has outputs of its own, and blocks do not share
    grid = -(-(outputs // lanes) // step_output)
    values = -(-inputs // (step_input * down))
    target = processors * (threads // (across * down))
    if values < _MOST_VALUES or grid > target:
        return ()
    fewest, most = -(-values // _MOST_VALUES), -(-values // _LEAST_VALUES)
    blocks = min(max(-(-target // grid), fewest), most)  # per output
    if blocks <= 1:
        return ()
    return work.accumulator * outputs * blocks * (1 if along_rows else across * lanes), 4 * grid


def _pieces(dims: list[_Dim], itemsize: int) -> Iterator[list[_Dim]]:
    """The dimensions in pieces that 32 bits index: TensorIterator halves the dimension that reaches farthest."""
    reaches = [(dim.size - 1) * dim.stride * itemsize for dim in dims]
    if prod(dim.size for dim in dims) <= _INDEXED and 1 + sum(reaches) <= _INDEXED:
        yield dims
        return
    place = max(range(len(dims)), key=lambda at: (reaches[at], at))
    dim = dims[place]
    for size in (dim.size // 2, dim.size - dim.size // 2):
        yield from _pieces([*dims[:place], replace(dim, size=size), *dims[place + 1 :]], itemsize)


def _iterator_order(shape: Sequence[int], strides: Sequence[int], reduced: Sequence[bool]) -> list[_Dim]:
    """The dimensions as TensorIterator has them: reduced ones first, then by stride; neighbours that are one are made one."""
    outs, step = [], 1
    for size, gone in zip(reversed(shape), reversed(reduced), strict=True):
        outs.append(0 if gone or size == 1 else step)
        step *= 1 if gone else size
    dims = [_Dim(*row) for row in zip(shape, strides, reversed(outs), strict=True)]
    merged: list[_Dim] = []
    for dim in sorted((d for d in reversed(dims) if d.size != 1), key=lambda d: (d.out != 0, d.out, d.stride)):
        last = merged[-1] if merged else None
        if last and last.size * last.stride == dim.stride and last.size * last.out == dim.out:
            merged[-1] = _Dim(last.size * dim.size, last.stride, last.out)
        else:
            merged.append(dim)
    return merged


def _output_vector(dims: list[_Dim], inner: int) -> int:
    vector = 4
    for number in (dims[inner].size, *(dim.stride for place, dim in enumerate(dims) if place != inner)):
        while number % vector:
            vector //= 2
    return vector


def _block(width: int, height: int, most: int) -> tuple[int, int]:
    """The threads of a block along and across: set_block_dimension."""
    wide, tall = (most if size >= most else _power_of_two(size) for size in (width, height))
    across = min(wide, _WARP)
    down = min(tall, most // across)
    return min(wide, most // down), down


def _power_of_two(number: int) -> int:
    return 1 << max(0, number.bit_length() - 1)

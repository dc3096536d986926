"""Reductions on CUDA: which operators reduce, over what, and the size query by which their staging is sized.

As of PyTorch 2.11 to 2.15: aten/src/ATen/native/cuda/Reduce*.cu for what partial results are, native/ReduceOpsUtils.h
(make_reduction) for the dtype that the input is brought to first.

The staging memory of CUDA reductions that several blocks of threads share: bytes by shapes, strides and device.

Source: ATen/native/cuda/Reduce.cuh (setReduceConfig, global_memory_size, semaphore_size; alike in PyTorch 2.6, 2.11 and 2.15) and
TensorIterator.cpp (reorder_dimensions, coalesce_dimensions). Where rows are many and columns few, as in the gradient of a bias,
each column's partial sums of all blocks are kept apart, thread by thread: tens of MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from sizer.catalogue.hardware import HARDWARE
from sizer.tracing.allocations import Held, Steps, after_results
from sizer.tracing.device import Device
from sizer.tracing.log import DeferredSize
from sizer.tracing.operator_tables import listed
from sizer.tracing.values.handler import HandlerContext

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
    stages = [(*waiting, *_piece_staging(piece, work, processors, threads)) for piece in pieces]
    return tuple(stage for stage in stages if stage)


def _piece_staging(dims: list[_Dim], work: Reduction, processors: int, threads: int) -> tuple[int, ...]:
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


# ---------------------------------------------------------------------------------------------------------- reductions


REDUCTION = "CUDA reduction"
PARTIAL, SEMAPHORES = "partial results", "semaphores"

_HALVES = (torch.float16, torch.bfloat16)
_PAIR = 16  # a value and its place, or the four numbers of Welford's method


def _summing(input: Tensor) -> int:
    return 4 if input.dtype in _HALVES else input.itemsize


def _as_it_is(input: Tensor) -> int:
    return input.itemsize


def _boolean(input: Tensor) -> int:
    return 1


def _reducer(accumulator: Callable[[Tensor], int], at: int | None, *, sums: bool = False) -> Held:
    """What an operator holds that reduces over the dimensions in its argument `at`; over all where there is none.

    `sums` says that integers are brought to the result's dtype first.
    """

    def held(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
        """Where blocks of threads share an output, their partial results and a semaphore each (cuda/Reduce.cuh); integers that
        are summed are brought to the result's dtype first."""
        input, result = args[0], out if isinstance(out, Tensor) else out[0]
        if input.numel() <= 1:
            converts = accumulator is _boolean and input.numel() and input.dtype not in (torch.bool, torch.uint8)
            return [[1]] if converts else []  # any, all: the only element as a boolean
        given = args[at] if at is not None and len(args) > at else kwargs.get("dim")
        copies = []
        if sums and result.dtype != input.dtype and not (input.dtype in _HALVES and result.dtype == torch.float32):
            input = input.to(result.dtype)
            copies = [input.numel() * input.itemsize]
        return [[*copies, *_staging(input, _mask(input, given), accumulator(input), result.dtype)]]

    return after_results(held)


def summed_rows(key: str, which: str, rows: int, columns: int, itemsize: int) -> int:
    """What a sum over the rows [rows, columns] of a floating-point matrix holds on a GPU: `which` of its blocks, in bytes."""
    accumulator, converts = (4, "0") if itemsize == 2 else (itemsize, "1")
    return resolve(key, (which, "10", str(itemsize), str(accumulator), converts), (rows, columns, columns, 1))


def summing(input: Tensor, dims: tuple[int, ...]) -> list[int]:
    """What a sum over these dimensions, in the input's dtype, holds while it runs."""
    return _staging(input, _mask(input, dims), _summing(input), input.dtype) if input.numel() > 1 else []


def staged(input: Tensor, dims: Any) -> list[int]:
    """Return the scratch bytes of a sum over dimensions; None or an empty list means all dimensions."""
    return _staging(input, _mask(input, dims), _summing(input), input.dtype) if input.numel() > 1 else []


def extremes(input: Tensor) -> list[int]:
    """Return the scratch bytes of the least and the largest element of a tensor (aminmax)."""
    return _staging(input, _mask(input, None), 2 * input.itemsize, input.dtype) if input.numel() > 1 else []


def largest_of_rows(input: Tensor) -> list[int]:
    """Return the scratch bytes of the place of the largest element of each row (argmax)."""
    return _staging(input, _mask(input, -1), _PAIR, torch.int64) if input.numel() > 1 else []


def _mask(input: Tensor, given: Any) -> tuple[bool, ...]:
    if given is None or (isinstance(given, (list, tuple)) and not given):
        return (True,) * input.dim()
    dims = {dim % input.dim() for dim in (given if isinstance(given, (list, tuple)) else (given,))}
    return tuple(dim in dims for dim in range(input.dim()))


def _staging(input: Tensor, reduced: tuple[bool, ...], accumulator: int, result: torch.dtype) -> list[int]:
    converts = accumulator != _PAIR and not (input.dtype in _HALVES and result == input.dtype and accumulator > 2)
    words = "".join("01"[gone] for gone in reduced), str(input.itemsize), str(accumulator), str(int(converts))
    numbers = *input.shape, *input.stride()
    return [DeferredSize(0, REDUCTION, (which, *words), numbers) for which in (PARTIAL, SEMAPHORES)]


def resolve(key: str, words: tuple[str, ...], numbers: tuple[int, ...]) -> int:
    """The bytes of one block of a reduction on a GPU; where 32 bits do not index the input, the largest of its pieces' blocks."""
    which, reduced, itemsize, accumulator, converts = words
    rank = len(reduced)
    work = Reduction(
        shape=numbers[:rank],
        strides=numbers[rank:],
        reduced=tuple(mark == "1" for mark in reduced),
        itemsize=int(itemsize),
        accumulator=int(accumulator),
        converts=converts == "1",
    )
    device = HARDWARE[key]
    stages = staging_bytes(work, device.processors, device.threads)
    if which == SEMAPHORES:
        return max((stage[-1] for stage in stages if len(stage) > 1), default=0)
    return max((sum(stage[: max(1, len(stage) - 1)]) for stage in stages), default=0)


HELD: dict[Any, Held] = {
    **listed("sum", _reducer(_summing, None, sums=True)),
    **listed("sum.dim_IntList nansum", _reducer(_summing, 1, sums=True)),
    **listed("prod", _reducer(_summing, None, sums=True)),
    **listed("prod.dim_int", _reducer(_summing, 1, sums=True)),
    **listed("mean", _reducer(_summing, None)),
    **listed("mean.dim", _reducer(_summing, 1)),
    **listed("linalg_vector_norm", _reducer(_summing, 2)),
    **listed("amax amin", _reducer(_as_it_is, 1)),
    **listed("max min", _reducer(_as_it_is, None)),
    **listed("max.dim min.dim argmax argmin", _reducer(lambda input: _PAIR, 1)),
    **listed("var.correction std.correction var_mean.correction std_mean.correction", _reducer(lambda input: _PAIR, 1)),
    **listed("any all", _reducer(_boolean, None)),
    **listed("any.dim any.dims all.dim all.dims", _reducer(_boolean, 1)),
}


def in_float32(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """The gradient of renorm adds in float32 on CUDA, on meta in float64 as on the CPU (FunctionsManual.cpp, renorm_backward)."""
    if kwargs.get("dtype") != torch.float64 or args[0].dtype != torch.float32:
        return NotImplemented
    node = torch._C._current_autograd_node()
    if node is None or not node.name().startswith("RenormBackward"):
        return NotImplemented
    with recorder:
        return func(*args, **(kwargs | {"dtype": None}))


HANDLERS = listed("linalg_vector_norm sum.dim_IntList", in_float32)

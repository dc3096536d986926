"""Scans, sorts and order statistics on CUDA: what CUB and the kernels around it hold.

PyTorch 2.15: native/cuda/ScanUtils.cuh, Sort.cpp, SortStable.cu, Sorting.cpp, TensorModeKernel.cpp. The sizes of CUB are those of
CCCL's DeviceScan (tile descriptors) and DeviceRadixSort (onesweep: bins, lookback of a tile, double buffers), with the tiles that
its tuning for compute capability 9.0 has. Other capabilities have other tiles: a difference of a few bytes in a thousand elements.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sizer.tracing.allocations import Held, Steps, after_results, copies, round_up
from sizer.tracing.device import Device
from sizer.tracing.tables import listed

_ALIGNED, _SMALL, _SEGMENTS, _LARGE = 256, 4096, 128, 1_000_000
_SCAN = {2: (7680, 16), 4: (1920, 8), 8: (896, 16)}  # by bytes of a value: elements of a tile, bytes of its descriptor
_SORT = {1: 5632, 2: 5632, 4: 5376, 8: 4608}  # by bytes of a key: elements of a tile beside places of 8 bytes


def scanned(elements: int, itemsize: int) -> int:
    """Return the bytes that CUB holds for an inclusive scan: descriptors of its tiles and 32 more."""
    tile, descriptor = _SCAN.get(itemsize, _SCAN[8])
    return round_up((-(-elements // tile) + 32) * descriptor, _ALIGNED) + 2 * _ALIGNED - 1


def radix_sorted(elements: int, itemsize: int) -> int:
    """Return the bytes that CUB holds while it sorts keys with places of 8 bytes: buffers, a pass for each byte of a key."""
    tiles = -(-elements // _SORT.get(itemsize, _SORT[8]))
    buffers = round_up(elements * itemsize, _ALIGNED) + round_up(elements * 8, _ALIGNED)
    return buffers + itemsize * 256 * 8 + _ALIGNED + tiles * 1024 + _ALIGNED - 1


def sorted_in_place(elements: int, bits: int) -> int:
    """Return the bytes that CUB holds while it sorts int64 keys of so many bits between two buffers it is given."""
    tiles = -(-elements // _SORT[8])
    return 1 if tiles <= 1 else -(-bits // 8) * 256 * 8 + _ALIGNED + tiles * 1024 + _ALIGNED - 1


def scan(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """The input in the result's dtype and contiguous; CUB scans where one dimension has all elements (ScanUtils.cuh, scan_dim)."""
    input, dim = args[0], args[1] if len(args) > 1 else kwargs["dim"]
    if not input.numel() or not input.dim():
        return []
    converted = [input.numel() * out.itemsize] if input.dtype != out.dtype else []
    whole = input.shape[dim] == input.numel()
    scratch = [scanned(input.numel(), out.itemsize)] if whole else []
    return [[*converted, *(() if converted else copies(input)), *scratch]]


def sort(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Places of one row for rows of up to 4,096; CUB sorts longer rows, from a copy unless
    they are contiguous (cuda/Sort.cpp, SortStable.cu)."""
    values, places = out
    dim = kwargs.get("dim", args[-2] if len(args) > 2 else args[1] if len(args) == 2 else -1)
    return _sorting(args[0], values, places, dim)


def _sorting(input: Tensor, values: Tensor, places: Tensor, dim: int) -> Steps:
    if not input.dim() or not input.numel():
        return []
    row = input.shape[dim]
    rows, steps = input.numel() // row, []
    if row <= _SMALL:
        return sorted_rows(rows, row, values.itemsize)
    if input.stride(dim) != 1 or not torch.ops.aten.is_non_overlapping_and_dense.default(input):
        steps.append((input.nbytes, values.nbytes, places.nbytes))
    return [*steps, *sorted_rows(rows, row, values.itemsize)]


def sorted_rows(rows: int, row: int, itemsize: int) -> Steps:
    """Return what sorting rows of so many values holds: places of one row if a row is short, else CUB's work row after row, all at
    once with the row as a second key, or in segments (SortStable.cu)."""
    elements = rows * row
    if row <= _SMALL:
        return [[row * 8]]
    if rows == 1 or row >= _LARGE:
        return [[row * 8, radix_sorted(row, itemsize)]]
    if rows < _SEGMENTS:
        pairs = elements * 8  # of place and segment, before and after a sort
        return [[pairs, pairs, elements * itemsize, radix_sorted(elements, itemsize)]]
    segmented = round_up(elements * itemsize, _ALIGNED) + round_up(elements * 8, _ALIGNED) + _ALIGNED - 1
    return [[elements * 8, segmented]]


def median(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """The elements sorted with their places, then whether the last is NaN (Sorting.cpp, median_impl)."""
    input = args[0]
    yield [*copies(input), *_sorted_elements(input)]
    yield (input.nbytes, 1)
    yield out


def nanmedian(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """The elements sorted, then which are NaN [n], how many, and the place of the median (Sorting.cpp, median_impl)."""
    input = args[0]
    yield [*copies(input), *_sorted_elements(input)]
    yield (input.nbytes,)
    yield [input.numel(), 8, input.numel() * 8]
    yield [input.numel(), 8, 8, 4, 8]
    yield out


def _sorted_elements(input: Tensor) -> list[int]:
    elements = input.numel()
    scratch = [elements * 8] if elements <= _SMALL else [elements * 8, radix_sorted(elements, input.itemsize)]
    return [input.nbytes, elements * 8, *scratch]


def mode(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """The input with the dimension last and contiguous (TensorModeKernel.cpp)."""
    input, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", -1)
    return [copies(input.transpose(dim, -1))] if input.dim() and input.numel() > 1 else []


HELD: dict[Any, Held] = {
    **listed("cumsum cumprod _logcumsumexp logcumsumexp", after_results(scan)),
    **listed("sort sort.stable", after_results(sort)),
    **listed("mode", after_results(mode)),
    **listed("median", median),
    **listed("nanmedian", nanmedian),
}

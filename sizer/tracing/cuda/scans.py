"""Scans, sorts and order statistics on CUDA: what CUB and the kernels around it hold.

PyTorch 2.15: native/cuda/ScanUtils.cuh, Sort.cpp, SortStable.cu, Sorting.cpp, TensorModeKernel.cpp. The sizes of CUB are those of
CCCL's DeviceScan (tile descriptors) and DeviceRadixSort (onesweep: bins, lookback of a tile, buffers). Its tiles are those of the
GPU's generation (cub/device/dispatch/tuning/tuning_radix_sort.cuh); those of capability 10.0 and 12.0 are taken to be 9.0's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sizer.catalogue.hardware import HARDWARE
from sizer.tracing.allocations import Held, Steps, after_results, copies, round_up
from sizer.tracing.device import Device
from sizer.tracing.log import DeferredSize
from sizer.tracing.operator_tables import listed

SORT = "CUB sort"
_INDICES = "indices"

_ALIGNED, _SMALL, _SEGMENTS, _LARGE = 256, 4096, 128, 1_000_000
_SCAN = {2: (7680, 16), 4: (1920, 8), 8: (896, 16)}  # by bytes of a value: elements of a tile, bytes of its descriptor
# Elements of a tile by the bytes of a key and of what is sorted with it; from capability 9.0 on, from 8.0 on, and before
_TILES = {(1, 8): 3456, (2, 8): 5632, (4, 8): 5376, (8, 8): 4608, (4, 4): 6528}
_TILES_OF_8 = {(4, 8): 3072, (8, 8): 3840, (4, 4): 6528}
_TILES_BEFORE = {(4, 8): 2816, (8, 8): 2816, (4, 4): 11776}
# Before 9.0 keys of less than 4 bytes are counted by blocks of threads, so many digits at a time
_DIGITS = {1: 32, 2: 64}
_BLOCKS_PER_PROCESSOR, _THREADS, _SCANNED_BYTES = 5, 128, 44_800
_AT_ONCE = {(8, 8): 2304, (4, 4): 4864}  # elements that are sorted in one tile, without anything beside


def scanned(elements: int, itemsize: int) -> int:
    """Return the bytes that CUB holds for an inclusive scan: descriptors of its tiles and 32 more."""
    tile, descriptor = _SCAN.get(itemsize, _SCAN[8])
    return round_up((-(-elements // tile) + 32) * descriptor, _ALIGNED) + 2 * _ALIGNED - 1


def sort_bytes(key: str, elements: int, sizes: tuple[int, int], passes: int) -> int:
    """Return the bytes that CUB holds while it sorts pairs on a GPU.

    Args:
        key: The GPU.
        elements: Pairs.
        sizes: Bytes of a key, and of what is sorted with it.
        passes: Passes of 8 bits; with several of them keys and values are there once more.
    """
    hardware = HARDWARE[key]
    if elements <= _AT_ONCE.get(sizes, 0):
        return 1
    copies = sum(round_up(elements * size, _ALIGNED) for size in sizes)
    if sizes[0] in _DIGITS and hardware.capability < (9, 0):
        blocks = hardware.processors * _BLOCKS_PER_PROCESSOR * (hardware.threads // _THREADS)
        return copies + blocks * _DIGITS[sizes[0]] * 8 + _SCANNED_BYTES + 2 * _ALIGNED - 1
    generation = hardware.capability
    tiles = _TILES if generation >= (9, 0) else _TILES_OF_8 if generation >= (8, 0) else _TILES_BEFORE
    tile = tiles.get(sizes) or tiles[8, 8]
    return (copies if passes > 1 else 0) + (2 + 8 * passes) * _ALIGNED + 1024 * -(-elements // tile) - 1


def sorted_pairs(elements: int, rows: int) -> DeferredSize:
    """Return the bytes that CUB holds while it sorts int64 indices of so many rows with as many places."""
    return DeferredSize(16 * elements, SORT, (_INDICES,), (elements, rows))


def resolve(key: str, words: tuple[str, ...], numbers: tuple[int, ...]) -> int:
    """The bytes of one block of a sort on a GPU, by its name: of indices, by (indices, rows); of rows of values, by bytes of a
    value and passes, and by (rows, values of a row)."""
    name = words[0]
    if name == _INDICES:
        elements, rows = numbers
        return sort_bytes(key, elements, (8, 8), -(-max(1, rows - 1).bit_length() // 8))
    itemsize, passes = map(int, words[1:])
    rows, row = numbers
    elements = rows * row
    small, single, segmented = row <= _SMALL, rows == 1 or row >= _LARGE, rows >= _SEGMENTS
    if name == "places":
        return (row if small or single else elements) * 8
    if small or (name != "scratch" and (single or segmented)):
        return 0
    if name == "scratch" and segmented and not single:
        return round_up(elements * itemsize, _ALIGNED) + round_up(elements * 8, _ALIGNED) + _ALIGNED - 1
    if name == "scratch":
        return sort_bytes(key, row if single else elements, (itemsize, 8), passes)
    return elements * (8 if name == "pairs" else itemsize)


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


def sorted_rows(rows: int, row: int, itemsize: int) -> list[list[int]]:
    """Return what sorting rows of so many values holds: places of one row if a row is short, else CUB's work row after row, all at
    once with the row as a second key, or in segments (SortStable.cu)."""
    elements = rows * row
    # of a GPU that is not described: on a line over the elements, however many there are
    modelled = {"places": elements * 8, "pairs": 0, "keys": 0, "scratch": elements * (itemsize + 8)}
    words = (str(itemsize), str(itemsize))  # a pass for each byte of a key
    return [[DeferredSize(size, SORT, (name, *words), (rows, row)) for name, size in modelled.items()]]


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
    return [input.nbytes, elements * 8, *sorted_rows(1, elements, input.itemsize)[0]]


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

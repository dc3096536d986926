"""Scans, sorts and order statistics on CUDA: what CUB and the kernels around it hold.

PyTorch 2.15: native/cuda/ScanUtils.cuh, Sort.cpp, SortStable.cu, Sorting.cpp, TensorModeKernel.cpp. The sizes of CUB are those of
CCCL's DeviceScan (tile descriptors) and DeviceRadixSort (onesweep: bins, lookback of a tile, buffers). Its tiles are those of the
GPU's generation (cub/device/dispatch/tuning/tuning_radix_sort.cuh); those of capability 10.0 and 12.0 are taken to be 9.0's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sizer.tracing.allocations import Held, Steps, after_results, copies
from sizer.tracing.cuda.by_hardware import (
    COMPLEX,
    COUNT,
    FLOAT,
    INDICES,
    KEYS,
    LARGEST,
    NUMBERED,
    PERMUTED,
    RUNS,
    SCAN,
    SMALL_ROW,
    SORT,
    UNIQUE,
    WHOLE,
)
from sizer.tracing.device import Device
from sizer.tracing.log import DeferredSize
from sizer.tracing.operator_tables import listed


def sorted_pairs(elements: int, rows: int) -> DeferredSize:
    """Return the bytes that CUB holds while it sorts int64 indices of so many rows with as many places."""
    return DeferredSize(16 * elements, SORT, (INDICES,), (elements, rows))


def scanned_elements(elements: int, dtype: torch.dtype) -> DeferredSize:
    """Return the bytes that CUB holds while it scans elements: whole tiles, which are on no line over the batch.

    Of a GPU that is not described they are not counted: 16 bytes for 896 elements of 8 bytes.
    """
    return DeferredSize(0, SORT, (SCAN, str(dtype.itemsize), COMPLEX if dtype.is_complex else WHOLE), (elements,))


def scan(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """The input in the result's dtype and contiguous; CUB scans where one dimension has all elements (ScanUtils.cuh, scan_dim)."""
    input, dim = args[0], args[1] if len(args) > 1 else kwargs["dim"]
    if not input.numel() or not input.dim():
        return []
    converted = [input.numel() * out.itemsize] if input.dtype != out.dtype else []
    whole = input.shape[dim] == input.numel()
    scratch = [scanned_elements(input.numel(), out.dtype)] if whole else []
    return [[*converted, *(() if converted else copies(input)), *scratch]]


def repeated(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """aten.repeat_interleave(counts): their sums so far, and the last of them if no result size is given (native/Repeat.cpp)."""
    count = args[0].numel()
    yield (count * 8,)
    yield [scanned_elements(count, torch.int64)]
    yield [8] if kwargs.get("output_size") is None else []
    yield out


def counted(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """aten.bincount: the least and the largest number stay until it ends (cuda/SummaryOps.cu, _bincount_cuda_template)."""
    yield (args[0].itemsize, args[0].itemsize)
    yield out


def histogram(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """aten.histc(input, bins, min, max): the extremes if no range is given (cuda/SummaryOps.cu, _histc_cuda_template)."""
    low = args[2] if len(args) > 2 else kwargs.get("min", 0)
    high = args[3] if len(args) > 3 else kwargs.get("max", 0)
    yield out
    yield [args[0].itemsize, args[0].itemsize] if low == high else []


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
    if row <= SMALL_ROW:
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


def unique(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """aten._unique and _unique2: the sorted elements, with their places if the result has the inverse; then what `_runs` holds.
    Booleans are counted instead (cuda/UniqueCub.cu, unique_cuda_template and UniqueCub<bool>)."""
    input, (values, inverse, *counts) = args[0], out
    elements, itemsize = input.numel(), input.itemsize
    if not elements:
        return
    yield tuple(copies(input))
    if input.dtype == torch.bool:
        yield (4,)
        yield [DeferredSize(0, SORT, (COUNT,), (elements,))]
        yield values
        if counts and counts[0].numel():
            yield counts[0]
        else:
            yield (16,)
        if inverse.numel():
            yield inverse
    elif inverse.numel():
        yield (elements * itemsize, elements * 8)
        yield [elements * 8, DeferredSize(elements * (itemsize + 8), SORT, (PERMUTED,), (elements, itemsize, 8 * itemsize))]
        yield from _runs(input, out, number_bytes=8)
    else:
        yield (elements * itemsize,)
        yield [DeferredSize(elements * itemsize, SORT, (KEYS, *_words(input)), (elements,))]
        yield from _runs(input, out, number_bytes=8)


def unique_consecutive(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """aten.unique_consecutive: what `_runs` holds; along one dimension nothing is counted (cuda/UniqueCub.cu)."""
    dim = kwargs.get("dim", args[3] if len(args) > 3 else None)
    if dim is None and args[0].numel():
        yield tuple(copies(args[0]))
        yield from _runs(args[0], out, number_bytes=4)


def _words(input: Tensor) -> tuple[str, str]:
    return str(input.itemsize), FLOAT if input.dtype.is_floating_point else WHOLE


def _runs(input: Tensor, out: Any, *, number_bytes: int) -> Steps:
    """Yield what runs of equal elements take: the number of each element's run if the result has the inverse, one element of each
    run, and its length if the result has the counts (cuda/UniqueCub.cu, compute_unique)."""
    elements = (input.numel(),)
    values, inverse, *counts = out
    if inverse.numel():
        yield inverse
        yield [input.numel() * number_bytes, DeferredSize(0, SORT, (NUMBERED,), elements)]
    yield values
    yield (8,)
    if counts and counts[0].numel():
        yield counts[0]
        yield [DeferredSize(0, SORT, (RUNS,), elements)]
    else:
        yield [DeferredSize(0, SORT, (UNIQUE, *_words(input)), elements)]


def mode(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """The input with the dimension last and contiguous (TensorModeKernel.cpp)."""
    input, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", -1)
    return [copies(input.transpose(dim, -1))] if input.dim() and input.numel() > 1 else []


_BUFFERS = ("values", "places", "digits", "counts", "sums", "before", "before", "scan")


def largest(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """topk(input, k, dim, ..): the input contiguous; for many or long rows the counts of digits of several blocks of threads
    (TensorTopK.cpp, TensorTopK.cu)."""
    input, dim = args[0], args[2] if len(args) > 2 else kwargs.get("dim", -1)
    if not input.dim() or not input.numel():
        return []
    row = input.shape[dim]
    numbers = input.numel() // row, row
    words = str(input.itemsize)
    return [[*copies(input), *(DeferredSize(0, SORT, (LARGEST, which, words), numbers) for which in _BUFFERS)]]


HELD: dict[Any, Held] = {
    **listed("topk", after_results(largest)),
    **listed("cumsum cumprod _logcumsumexp logcumsumexp", after_results(scan)),
    **listed("sort sort.stable", after_results(sort)),
    **listed("repeat_interleave.Tensor", repeated),
    **listed("bincount", counted),
    **listed("histc", histogram),
    **listed("mode", after_results(mode)),
    **listed("_unique _unique2", unique),
    **listed("unique_consecutive", unique_consecutive),
    **listed("median", median),
    **listed("nanmedian", nanmedian),
}

"""Scans, sorts and order statistics on CUDA: memory of CUB and of the kernels that call it.

PyTorch 2.15: native/cuda/ScanUtils.cuh, Sort.cpp, SortStable.cu, Sorting.cpp, TensorModeKernel.cpp. The sizes of CUB are those
of CCCL's DeviceScan (tile descriptors) and DeviceRadixSort (onesweep: bins, lookback of a tile, buffers). Tiles depend on the
GPU's generation (cub/device/dispatch/tuning/tuning_radix_sort.cuh). Capabilities 10.0 and 12.0 are assumed to equal 9.0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sizer.tracing.allocations import AllocationRule, Steps, after_results, copies
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
from sizer.tracing.cuda.reductions import extremes
from sizer.tracing.device import Device
from sizer.tracing.log import DeferredSize
from sizer.tracing.operator_tables import listed


def sorted_pairs(elements: int, rows: int) -> DeferredSize:
    """Return the bytes that CUB holds while it sorts int64 indices into `rows` rows together with their positions."""
    return DeferredSize(16 * elements, SORT, (INDICES,), (elements, rows))


def scanned_elements(elements: int, dtype: torch.dtype) -> DeferredSize:
    """Return the bytes that CUB holds while it scans elements: whole tiles, which are not linear in the batch size.

    For an unknown GPU they are not counted: 16 bytes for 896 elements of 8 bytes.
    """
    return DeferredSize(0, SORT, (SCAN, str(dtype.itemsize), COMPLEX if dtype.is_complex else WHOLE), (elements,))


def scan(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add a contiguous input in the result's dtype, and CUB's scratch for a single dimension (ScanUtils.cuh, scan_dim).

    CUB scans if one dimension has all elements.
    """
    input, dim = args[0], args[1] if len(args) > 1 else kwargs["dim"]
    if not input.numel() or not input.dim():
        return []
    converted = [input.numel() * out.itemsize] if input.dtype != out.dtype else []
    whole = input.shape[dim] == input.numel()
    scratch = [scanned_elements(input.numel(), out.dtype)] if whole else []
    return [[*converted, *(() if converted else copies(input)), *scratch]]


def repeated(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add aten.repeat_interleave's cumulative counts, and the last of them if no result size is given (native/Repeat.cpp)."""
    count = args[0].numel()
    yield (count * 8,)
    yield [scanned_elements(count, torch.int64)]
    yield [8] if kwargs.get("output_size") is None else []
    yield out


def counted(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add the least and the largest number of aten.bincount until it ends (cuda/SummaryOps.cu, _bincount_cuda_template)."""
    yield (args[0].itemsize, args[0].itemsize)
    yield out


def histogram(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add the extremes of aten.histc if no range is given (cuda/SummaryOps.cu, _histc_cuda_template).

    Arguments: input, bins, min, max.
    """
    low = args[2] if len(args) > 2 else kwargs.get("min", 0)
    high = args[3] if len(args) > 3 else kwargs.get("max", 0)
    yield out
    yield [args[0].itemsize, args[0].itemsize, *extremes(args[0])] if low == high else []


def sort(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add indices of one row for rows of up to 4,096; CUB sorts longer rows (cuda/Sort.cpp, SortStable.cu).

    CUB sorts a copy with contiguous rows. Results with other strides than the copy have a copy, too.
    """
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
        wanted = _strides_of_rows(input, dim)
        steps.append((input.nbytes, *(result.nbytes for result in (values, places) if result.stride() != wanted)))
    return [*steps, *sorted_rows(rows, row, values.itemsize)]


def _strides_of_rows(input: Tensor, dim: int) -> tuple[int, ...]:
    """Return dense strides in the input's order with one dimension the fastest (Sort.cpp, infer_dense_strides_dim_last)."""
    found, step = [0] * input.dim(), 1
    kept = {dim % input.dim(): -1}
    for place in sorted(range(input.dim() - 1, -1, -1), key=lambda place: kept.get(place, input.stride(place))):
        found[place] = step
        step *= input.shape[place]
    return tuple(found)


def sorted_rows(rows: int, row: int, itemsize: int) -> list[list[int]]:
    """Return the memory of sorting rows with `row` values each (SortStable.cu).

    Short rows need the indices of one row. CUB sorts longer rows one by one, all at once with the row as a second key, or in
    segments.
    """
    elements = rows * row
    # for an unknown GPU: linear in the number of elements
    modelled = {"places": elements * 8, "pairs": 0, "keys": 0, "scratch": elements * (itemsize + 8)}
    words = (str(itemsize), str(itemsize))  # one pass for each byte of a key
    return [[DeferredSize(size, SORT, (name, *words), (rows, row)) for name, size in modelled.items()]]


def median(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add the sorted elements with their indices, then whether the last is NaN (Sorting.cpp, median_impl)."""
    input = args[0]
    yield [*copies(input), *_sorted_elements(input)]
    yield (input.nbytes, 1)
    yield out


def nanmedian(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add the sorted elements, then a NaN mask [n], its count, and the index of the median (Sorting.cpp, median_impl)."""
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
    """Add the memory of aten._unique and _unique2 (cuda/UniqueCub.cu, unique_cuda_template and UniqueCub<bool>).

    It consists of the sorted elements, with their indices if the result has the inverse, and the memory of `_runs`. Booleans
    are counted instead.
    """
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
    """Add the numbers and lengths of aten.unique_consecutive's runs of equal elements (cuda/UniqueCub.cu).

    The memory is that of `_runs`. Along one dimension nothing is counted.
    """
    dim = kwargs.get("dim", args[3] if len(args) > 3 else None)
    if dim is None and args[0].numel():
        yield tuple(copies(args[0]))
        yield from _runs(args[0], out, number_bytes=4)


def _words(input: Tensor) -> tuple[str, str]:
    return str(input.itemsize), FLOAT if input.dtype.is_floating_point else WHOLE


def _runs(input: Tensor, out: Any, *, number_bytes: int) -> Steps:
    """Yield the memory of runs of equal elements (cuda/UniqueCub.cu, compute_unique).

    It consists of the number of each element's run if the result has the inverse, one element of each run, and the run's length
    if the result has the counts.
    """
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
    """Add a contiguous copy of the input with the dimension last (TensorModeKernel.cpp)."""
    input, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", -1)
    return [copies(input.transpose(dim, -1))] if input.dim() and input.numel() > 1 else []


_BUFFERS = ("values", "places", "digits", "counts", "sums", "before", "before", "scan")


def largest(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add topk's contiguous input, and digit counts of thread blocks for many or long rows (TensorTopK.cpp, TensorTopK.cu).

    Arguments: input, k, dim, ...
    """
    input, dim = args[0], args[2] if len(args) > 2 else kwargs.get("dim", -1)
    if not input.dim() or not input.numel():
        return []
    row = input.shape[dim]
    numbers = input.numel() // row, row
    words = str(input.itemsize)
    return [[*copies(input), *(DeferredSize(0, SORT, (LARGEST, which, words), numbers) for which in _BUFFERS)]]


def searched(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add contiguous copies of searchsorted's boundaries, values and order, then both in one dtype (native/BucketizationUtils.h).

    Arguments: boundaries, values. Those of `bucketize` are the other way round. The extremes of an order are found first
    (native/Bucketization.cpp, searchsorted_pre_check).
    """
    given, order = args[:2], kwargs.get("sorter")
    if order is not None and order.numel():
        yield [order.itemsize, order.itemsize, *extremes(order)]
    yield out
    common = torch.result_type(*given)
    yield [*copies(*given, order), *(one.numel() * common.itemsize for one in given if one.dtype != common)]


ALLOCATIONS: dict[Any, AllocationRule] = {
    **listed("searchsorted.Tensor bucketize.Tensor", searched),
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

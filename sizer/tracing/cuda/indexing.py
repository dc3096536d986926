"""Indexing, rolling and embedding on CUDA: memory inside their kernels (PyTorch 2.6 and 2.11 to 2.15).

For the gradient of an embedding on CUDA, indices are sorted so that one thread block sums each row of the gradient. As of
PyTorch 2.6 and 2.11 to 2.15: aten/src/ATen/native/cuda/Embedding.cu (embedding_dense_backward_cuda), EmbeddingBackwardKernel.cu
(embedding_backward_cuda_kernel). CUB's temporary storage for sorting and scanning (dispatch_radix_sort.cuh, dispatch_scan.cuh)
was fitted to its own answers in CUDA 13; 2.6 is assumed to get the same. The sizes of scans are off by a few hundred bytes.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from sizer.base.versions import format_version
from sizer.tracing.allocations import AllocationRule, Steps, after_results, copies
from sizer.tracing.cuda.by_hardware import ALWAYS, COUNT, EMBEDDING, FEW, SELECT, SORT
from sizer.tracing.cuda.scans import scanned_elements, sorted_pairs, sorted_rows
from sizer.tracing.device import Device
from sizer.tracing.log import DeferredSize
from sizer.tracing.meta.strides import common_shape

_aten = torch.ops.aten
_COUNT_BYTES = 4  # of the number of true elements


def nonzero(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add the number of nonzero elements, scratch of counting, the indices and scratch of selecting them (cuda/Nonzero.cu)."""
    yield tuple(copies(args[0]))
    yield _scratch(COUNT, args[0])
    yield out
    yield _scratch(SELECT, args[0])


def masked_select(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add the indices of the mask, broadcast with the input (cuda/IndexKernel.cpp, masked_select_out_cuda_impl)."""
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    yield from _places(args[1].expand(shape), out.numel())
    yield out


def masked_scatter(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add int64 indices of the source, the mask in the result's shape and a scan of it (cuda/IndexKernel.cpp).

    Operator: aten.masked_scatter, with arguments input, mask and source. Source: masked_scatter__cuda; IndexKernel.cu,
    launch_masked_scatter_kernel.
    """
    count = out.numel()
    return [[count * 8, *copies(args[1].expand(out.shape)), scanned_elements(count, torch.int64)]] if count else []


def _scratch(name: str, mask: torch.Tensor) -> list[Any]:
    """Return the number of true elements, and the scratch of CUB while it counts or selects them."""
    return [_COUNT_BYTES, DeferredSize(0, SORT, (name,), (mask.numel(),))]


def _places(mask: torch.Tensor, count: int) -> Steps:
    """Add the indices of a mask's true elements: `count` of them, in int64 for each dimension."""
    copied = copies(mask)
    yield [*copied, *_scratch(COUNT, mask)]
    yield ([*copied, _COUNT_BYTES], count * mask.dim() * 8)
    yield [*copied, *_scratch(SELECT, mask)]


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _selected_places(tensor: torch.Tensor, indices: Any, values: torch.Tensor) -> int:
    """Return the number of positions that indices select from a tensor, from the shape of the values read or written there.

    Values that are broadcast do not show the number; then all elements of the masks count.
    """
    left, dim = [], 0
    for index in indices:
        if index is None:
            left.append(tensor.shape[dim])
        dim += index.dim() if _is_mask(index) else 1
    left += tensor.shape[dim:]
    if values.dim() > len(left) and 0 not in left:
        return values.numel() // prod(left)
    return max((index.numel() for index in indices if _is_mask(index)), default=0)


def accumulating_index_put(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add the memory of adding at sorted linear indices (cuda/Indexing.cu, index_put_with_sort_kernel).

    It consists of four vectors of int64 (five before 2.15), the sort's scratch, and copies of a strided target and of strided or
    broadcast values. Indices of masks are found first. Filling one number at a mask needs none of these
    (TensorAdvancedIndexing.cpp, canDispatchToMaskedFill).
    """
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    indices = [index for index in args[1] if index is not None]
    masks = [index for index in indices if _is_mask(index)]
    if not indices or (args[2].numel() == 1 and len(masks) == len(indices) == 1 and not accumulate):
        return
    if not accumulate and not masks:
        return
    places = _selected_places(args[0], args[1], args[2]) if masks else prod(common_shape(indices))
    dims = sum(index.dim() if _is_mask(index) else 1 for index in args[1])
    if not accumulate:
        for mask in masks:
            yield from _places(mask, places)
        return
    # the mask's indices are released once they are linear, which needs a dimension's remainder, its product and their sum
    for mask in masks:
        yield [*copies(mask), *_scratch(COUNT, mask)]
        yield [places * mask.dim() * 8, *[places * 8] * min(dims + 1, 3)]
    kept = [size for size, index in zip(out.shape, (*args[1], *[None] * out.dim()), strict=False) if index is None]
    values = places * prod(kept if not masks else out.shape[dims:])
    spread = [values * out.itemsize] if values > args[2].numel() else copies(args[2])
    copied = [*copies(out), *spread]
    if device.version < (2, 15):
        yield [*[places * 8] * 5, *copied]
        return
    rows = prod(args[0].shape[:dims])
    yield [*[places * 8] * 4, sorted_pairs(places, rows), *copied]


def indexing(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add the indices of masks, and copies of indices with different strides after broadcasting (TensorAdvancedIndexing.cpp).

    Contiguous indices are not copied. Source: native/TensorAdvancedIndexing.cpp, AdvancedIndex: "force all index tensors to
    have the same striding".
    """
    masks = [index for index in args[1] if _is_mask(index)]
    for mask in masks:
        yield from _places(mask, _selected_places(args[0], args[1], out))
    yield tuple(copied_indices(args[1]))
    yield out


def copied_indices(given: Any) -> list[int]:
    """Return the bytes of the copies of indices with different strides after broadcasting."""
    indices = [index for index in given if index is not None]
    if len(indices) < 2 or any(map(_is_mask, indices)):
        return []
    alike = all(index.shape == indices[0].shape for index in indices)
    spread = indices if alike else torch.broadcast_tensors(*indices)
    if all(index.stride() == spread[0].stride() for index in spread):
        return []
    return [index.numel() * index.itemsize for index in spread if not index.is_contiguous()]


def roll(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add a contiguous input, and a tensor for each dimension that is rolled (native/TensorTransformations.h, roll_common).

    The dimensions are rolled one after another; each of these tensors stays until the end.
    """
    dims = args[2] if len(args) > 2 else kwargs.get("dims", ())
    copied = copies(args[0])
    if len(dims) > 1:
        yield (copied, out.nbytes)
        yield (out.nbytes,) * (len(dims) - 2)
        yield out
    else:
        yield out
        yield copied


# ----------------------------------------------------------------------------------------------------------- embedding




_MAX = 2  # EmbeddingBagMode
_HALVES = (torch.float16, torch.bfloat16)


def embedding_forward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add contiguous copies of strided indices (native/Embedding.cpp, index_select)."""
    yield tuple(copies(args[1]))
    yield out


def dense_backward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add the memory of sorting and summing more than 3,072 indices (cuda/Embedding.cu, EmbeddingBackwardKernel.cu).

    Indices are sorted through copies and counted into segments. Partial sums of rows are in float32, unless rows are few.
    Strided operands are copied.
    """
    grad, indices, rows, scales = args[0], args[1], args[2], args[4]
    yield tuple(copies(grad, indices))
    # pull request 170589, of PyTorch 2.11: parts of few rows are added to the result by atomic operations, unless deterministic
    # algorithms are requested (EmbeddingBackwardKernel.cu)
    few = device.version >= (2, 11) and not torch.are_deterministic_algorithms_enabled()
    kinds = [kind for kind, holds in ((ALWAYS, scales), (FEW, few)) if holds]
    yield from _summed_rows(device, grad, indices, rows, out, *kinds, scales=scales)


def bag_backward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add the memory of an embedding's gradient, for any number of indices (cuda/EmbeddingBag.cu).

    Operator: _embedding_bag_backward, with arguments gradient, indices, .., rows, scales, mode, ... The gradients of a bag's
    maximum are added at the maximum's position.
    """
    grad, indices, rows, scales, mode = args[0], args[1], args[6], args[7], args[8]
    if mode == _MAX or not indices.numel():
        return [tuple(copies(grad)), out]
    return [tuple(copies(grad)), *_summed_rows(device, grad, indices, rows, out, ALWAYS, scales=scales)]


def _summed_rows(
    device: Device, grad: torch.Tensor, indices: torch.Tensor, rows: int, out: Any, *kinds: str, scales: bool
) -> Steps:
    """Yield the memory of summing a gradient's rows by their sorted indices; with `scales` indices are counted, too."""
    width = grad.shape[-1] * (4 if grad.dtype in _HALVES else grad.itemsize)
    numbers = indices.numel(), rows, width, indices.itemsize

    def blocks(*names: str) -> list[int]:
        words = (format_version(device.version), *kinds)
        return [DeferredSize(0, EMBEDDING, (name, *words), numbers) for name in names]

    yield tuple(blocks("indices", "indices"))
    yield blocks("indices", "sort")
    if scales:
        yield tuple(blocks("indices"))
        yield blocks("scan")
    yield out
    yield tuple(blocks("indices", "count"))
    yield blocks("indices", "scan")
    yield tuple(blocks("segments", "segments"))
    yield blocks("scan")
    yield tuple(blocks("count", "parts"))
    few = ["segment of a part", "result in float32"][: 2 if grad.dtype in _HALVES else 1] if FEW in kinds else []
    yield blocks("sums", *few)


def renorm(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add the indices, sorted, then without duplicates, with CUB's scratch (cuda/Embedding.cu).

    Operator: embedding_renorm_, with arguments weight, indices, ...
    """
    indices = args[1]
    count, size = indices.numel(), indices.nbytes
    if not count:
        return
    yield (size, size)
    for step in sorted_rows(1, count, indices.itemsize):
        yield [count * 8, *step]
    yield (size,)
    yield [8, 1023]


ALLOCATIONS: dict[Any, AllocationRule] = {
    _aten.roll.default: roll,
    _aten.nonzero.default: nonzero,
    _aten.masked_select.default: masked_select,
    _aten.masked_scatter.default: after_results(masked_scatter),
    _aten.masked_scatter_.default: after_results(masked_scatter),
    _aten.index.Tensor: indexing,
    _aten._unsafe_index.Tensor: indexing,
    _aten.index_put.default: after_results(accumulating_index_put),
    _aten.index_put_.default: after_results(accumulating_index_put),
    _aten._index_put_impl_.default: after_results(accumulating_index_put),
    _aten.embedding.default: embedding_forward,
    _aten.embedding_renorm_.default: renorm,
    _aten.embedding_dense_backward.default: dense_backward,
    _aten._embedding_bag_backward.default: bag_backward,
}

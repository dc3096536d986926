"""Kernels over many tensors on CUDA: grouped matrix products, norms, and copies of many tensors in one kernel.

Source of grouped matrix products: aten/src/ATen/native/cuda/GroupedBlas.cpp, GroupMM.cu, and CUTLASS's get_workspace_size,
called with the host code of PyTorch 2.11 and 2.15. They hold descriptors of tensors for each multiprocessor, and on 10.x
barriers between its warps.

FSDP2 copies many tensors in one kernel to pack and unpack its communication buffers. Source:
aten/src/ATen/native/cuda/TensorShape.cu, and TensorShape.cpp for inputs without a kernel, PyTorch 2.11 and 2.15.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from math import ceil, inf, prod, sqrt
from typing import Any

import torch
from torch import Tensor

from sizer.base.units import round_up
from sizer.catalogue.hardware import HARDWARE
from sizer.tracing.allocations import PRODUCT, AllocationRule, Steps, after_results
from sizer.tracing.device import Device
from sizer.tracing.values.known import tensors_of


def processors_of(device: Device) -> int:
    """Return the multiprocessors of the largest GPU of the device's capability, or of the next lower one if there is none.

    *Known limitation*: on a smaller GPU the few kernels that depend on the number hold a little less.
    """
    return next((count for capability, count in _most() if device.capability >= capability), _most()[-1][1])


@cache
def _most() -> tuple[tuple[tuple[int, int], int], ...]:
    """Return the capabilities, highest first, each with its largest number of multiprocessors."""
    found: dict[tuple[int, int], int] = {}
    for row in HARDWARE.values():
        found[row.capability] = max(found.get(row.capability, 0), row.processors)
    return tuple(sorted(found.items(), reverse=True))


# ------------------------------------------------------------------------------------------------------------- grouped


# Bytes for each multiprocessor: on 9.x, on 10.x in tiles for few rows or columns, and in other tiles on 10.x.
SM90, SM100_SMALL, SM100 = 512, 5_376, 5_888
SMALL = 128  # rows or columns of a group, at most


def grouped_mm(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add CUTLASS's arguments and workspace for aten._grouped_mm in bfloat16 on 9.x and 10.x (native/cuda/GroupMM.cu).

    Other products are computed by cuBLAS, group by group.
    """
    first, second = args[0], args[1]
    groups = args[2] if len(args) > 2 else kwargs.get("offs")
    dtypes = {first.dtype, second.dtype, out.dtype}
    if dtypes != {torch.bfloat16} or not (device.capability[0] == 9 or device.capability[0] == 10):
        return [[PRODUCT]]
    count = first.shape[0] if groups is None else groups.shape[0]
    # pointers to both matrices and the result, padded to 16 bytes; three strides; rows, columns and depth as int32
    arguments = round_up(count, 2) * 3 * 8 + count * (3 * 8 + 3 * 4)
    each = SM90 if device.capability[0] == 9 else SM100_SMALL if _is_small(first, second, count) else SM100
    return [[arguments, processors_of(device) * each]]


def _is_small(first: Tensor, second: Tensor, groups: int) -> bool:
    """Return whether a group has few rows or columns, if all groups have the same size."""
    rows, columns = first.shape[-2], second.shape[-1]
    if first.dim() == 2 and second.dim() == 3:
        rows //= groups
    elif first.dim() == 3 and second.dim() == 2:
        columns //= groups
    return rows <= SMALL or columns <= SMALL


# ------------------------------------------------------------------------------------------------------- packed copies


# BLOCK_SIZE and TILE_SIZE: threads of a block, and the bytes that they copy at a time, 16 each.
BLOCK_THREADS, TILE_BYTES = 128, 2048
PROCESSOR_THREADS = 2048  # maxThreadsPerMultiProcessor, of 7.0, 8.0, 9.0, 10.0 and 10.3
ENTRY_BYTES = 8  # of the tables that define the copies of a kernel's blocks: int64


def chunk_cat(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add a table of seven columns for fsdp.chunk_cat along the first dimension (TensorShape.cu).

    Arguments: tensors, dim, num_chunks, *, out. The tensors have one dtype. Unsupported inputs are padded as a whole, then
    copied: strided tensors, and dtypes other than the result's, except bfloat16 for float32.
    """
    tensors, _, chunks = args
    result = kwargs["out"]
    rows = [-(-tensor.shape[0] // chunks) for tensor in tensors]  # of each chunk
    same = tensors[0].dtype == result.dtype
    widens = (tensors[0].dtype, result.dtype) == (torch.bfloat16, torch.float32)
    if not (same or widens) or not _are_dense(tensors):
        padded = zip(tensors, rows, strict=True)
        return [[_bytes(t, each * chunks) for t, each in padded if each * chunks != t.shape[0]]]
    of_chunks = (each * prod(t.shape[1:]) * result.itemsize for t, each in zip(tensors, rows, strict=True))
    blocks = sum(-(-size // TILE_BYTES) for size in of_chunks)
    return [[(6 * len(tensors) + 2 + blocks) * ENTRY_BYTES]]


def chunk_cat_mixed_dtype(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add fsdp.chunk_cat's table for each dtype, for fsdp.chunk_cat_mixed_dtype (TensorShape.cu).

    PyTorch 2.15 has this operator instead of fsdp.chunk_cat.
    """
    tensors, *others = args
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        yield from chunk_cat(device, ([tensor for tensor in tensors if tensor.dtype == dtype], *others), kwargs, out)


def split_with_sizes_copy(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add a table of five columns for fsdp.split_with_sizes_copy (TensorShape.cu).

    Arguments: tensor, sizes, dim, *, out. The number of blocks keeps the multiprocessors busy twice.
    """
    tensor, sizes, *rest = args
    dim, results = rest[0] if rest else kwargs.get("dim", 0), kwargs["out"]
    if not _are_dense((tensor, *results)) or any(one.dtype != tensor.dtype for one in results):
        return []
    of_chunks = [size * tensor.stride(dim) * tensor.itemsize for size in sizes]
    chunks = tensor.numel() // prod(tensor.shape[dim:])
    blocks = sum(-(-size // TILE_BYTES) for size in of_chunks)
    most = processors_of(device) * PROCESSOR_THREADS // BLOCK_THREADS * 2
    each = -(-blocks * chunks // most)  # tiles that a block copies: about as many chunks as tiles of each chunk
    tiles = -(-each // min(ceil(sqrt(each)), chunks))
    launched = sum(-(-size // (TILE_BYTES * tiles)) for size in of_chunks)
    return [[(4 * len(sizes) + 1 + launched) * ENTRY_BYTES]]


# ----------------------------------------------------------------------------------------------------------------- norms


_CHUNK = 65536  # elements of a tensor that a block reads (MultiTensorApply.cuh, kChunkSize)
_NORMS = (0, 1, 2, inf)
_HALVES = (torch.float16, torch.bfloat16)


def norms(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add the position of each tensor's chunks, and a number for each chunk (ForeachReduceOp.cu).

    Operator: _foreach_norm, with arguments tensors and order. Before 2.15 each tensor has as many numbers as the largest one,
    and there are no positions.
    """
    tensors, order = args[0], args[1] if len(args) > 1 else kwargs.get("ord", 2)
    plain = all(one.is_floating_point() and one.dtype == tensors[0].dtype for one in tensors) and _are_dense(tensors)
    if not plain or order not in _NORMS:
        yield from tensors_of(out)
        return
    itemsize = 4 if tensors[0].dtype in _HALVES else tensors[0].itemsize
    chunks = [ceil(one.numel() / _CHUNK) for one in tensors]
    if device.version < (2, 15):
        yield (len(tensors) * max(chunks) * itemsize,)
    else:
        yield ((len(tensors) + 1) * ENTRY_BYTES, sum(chunks) * itemsize)
    yield from tensors_of(out)


def largest(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add the position of each tensor's chunks, and the largest element of each chunk, for _foreach_max (ForeachReduceOp.cu)."""
    tensors = args[0]
    if all(one.dtype == tensors[0].dtype for one in tensors) and _are_dense(tensors):
        chunks = [ceil(one.numel() / _CHUNK) for one in tensors]
        count = sum(chunks) if device.version >= (2, 15) else len(tensors) * max(chunks)
        positions = [(len(tensors) + 1) * ENTRY_BYTES] if device.version >= (2, 15) else []
        yield (*positions, count * tensors[0].itemsize)
    yield from tensors_of(out)


def _bytes(tensor: Tensor, rows: int) -> int:
    """Return the bytes of a tensor with `rows` rows."""
    return rows * prod(tensor.shape[1:]) * tensor.itemsize


def _are_dense(tensors: Iterable[Tensor]) -> bool:
    return all(torch.ops.aten.is_non_overlapping_and_dense.default(tensor) for tensor in tensors)


# By name: PyTorch defines them as FSDP2 is imported.
ALLOCATIONS: dict[Any, AllocationRule] = {
    torch.ops.aten._grouped_mm.default: after_results(grouped_mm),
    torch.ops.aten._foreach_norm.Scalar: norms,
    torch.ops.aten._foreach_max.default: largest,
    "fsdp.chunk_cat.default": chunk_cat,
    "fsdp.chunk_cat_mixed_dtype.default": chunk_cat_mixed_dtype,
    "fsdp.split_with_sizes_copy.default": split_with_sizes_copy,
}

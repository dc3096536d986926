"""What CUDA's kernels allocate inside: bytes per operator as functions of shapes and dtypes, one function per operator.

Each returns stages as in `scratch`. Sizes follow the C++ that the docstring names (PyTorch 2.6 and 2.11 to 2.15); `MODELLED` lists
those
whose true size a closed library decides. Sizes stay linear in the leading dimension, so that one tape serves every batch size:
where a kernel counts distinct rows, a batch is taken to share none.

*Known limitations*: flash attention's split keys in inference with few queries are not counted.
"""

from __future__ import annotations

from functools import wraps
from math import prod
from typing import Any

import torch
from torch import Tensor

from sizer.tracing.cuda import convolution
from sizer.tracing.kernels import recurrent
from sizer.tracing.scratch import Scratch, Stages, safe_softmax
from sizer.tracing.steps import Inner, Steps
from sizer.tracing.values.known import tensors_of
from sizer.versions import version_followed

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _copies_of_strided(*tensors: Tensor | None) -> list[int]:
    """What `contiguous()` copies."""
    return [_bytes(t) for t in tensors if t is not None and not t.is_contiguous()]


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# ------------------------------------------------------------------------------------------------------------- attention


def flash_backward(device: Any, args: tuple, kwargs: dict, out: Any) -> Stages:
    """In float32 softmax_d [batch, heads, queries to 128] and dq_accum [.., head_dim to 32, since 2.11 above 128 to 64]; for
    grouped heads the gradients of key and value of every query head (flash_attn/flash_api.cpp, mha_bwd)."""
    query, key = args[1], args[2]
    batch, heads, queries, head = query.shape
    rows = batch * heads * _up(queries, 128) * 4
    sizes = [rows, rows * _up(head, 32 if head <= 128 or version_followed(device.version) < (2, 11) else 64)]
    if key.shape[1] != heads:
        sizes += [batch * key.shape[2] * heads * head * query.itemsize] * 2
    return [sizes]


def cudnn_attention(device: Any, args: tuple, kwargs: dict, out: Any) -> Stages:
    """256 bytes (cudnn/MHA.cpp asks cuDNN, which answered so for every shape tried: 9.19 and 9.26, capability 9.0)."""
    return [[256]]


def cudnn_attention_backward(device: Any, args: tuple, kwargs: dict, out: Any) -> Stages:
    """In float32 the query's gradient [batch, heads, queries, head_dim] and a number a row, and 256 bytes; for grouped heads the
    gradients of key and value of every query head (cudnn/MHA.cpp asks cuDNN; its answers for 24 shapes by 9.26 on capability
    9.0, met to the byte)."""
    query, key, value = args[1:4]
    batch, heads, queries, head = query.shape
    size = batch * heads * queries * (head + 1) * 4 + 256
    if key.shape[1] != heads:
        size += batch * heads * key.shape[2] * (head + value.shape[-1]) * query.itemsize
    return [[size]]


def efficient_backward(device: Any, args: tuple, kwargs: dict, out: Any) -> Steps:
    """delta [batch, heads, queries] in float32 and tiles of 4 bytes an element, 16 more a tile, that accumulate the gradient of
    the query, for wide heads in half precision those of key and value too; grouped heads expanded
    (attention_backward.cu and mem_eff_attention/kernel_backward.h, workspace_size).

    *Known limitations*: below 200 pairs of sample and head, wide heads may split their keys, which takes up to 26 MB more.
    """
    query, key, value = args[1:4]
    batch, heads, queries, head = query.shape
    half, widest = query.dtype in _HALVES, max(head, value.shape[-1])
    rows, columns, in_registers = _efficient_blocks(device.capability, half, widest)
    tiles = -(-queries // rows) * -(-head // columns)
    elements = tiles * (4 + rows * columns)
    if half and not in_registers:
        elements += columns * (_up(head, rows) + _up(value.shape[-1], rows))
    delta = batch * heads * queries * 4
    copies = []
    if key.shape[1] != heads:
        copies = [batch * heads * key.shape[2] * t.shape[-1] * t.itemsize for t in (key, value)]
    workspace = batch * heads * _up(elements, 4) * 4
    if half:
        return [[*copies, delta, workspace]]
    # in float32 delta is the sum of a product as large as the output, copied to be contiguous
    return [(*copies, delta), [batch * heads * queries * value.shape[-1] * 4, delta], [workspace]]


def _efficient_blocks(capability: tuple[int, int], half: bool, widest: int) -> tuple[int, int, bool]:
    """(rows, columns, whether gradients of key and value stay in registers) of the first kernel that fits, in the order of
    mem_eff_attention/kernels/cutlassB.h; devices with 100 KiB of shared memory cannot take the largest blocks."""
    roomy = capability in ((8, 0), (8, 7)) or capability[0] in (9, 10)
    if widest <= 64:
        return 64, 64, True
    if not half or capability < (8, 0):
        return (128, 64, True) if roomy or (half and widest <= 128) else (64, 64, False)
    if capability in ((8, 6), (8, 9)) and widest <= 96:
        return 128, 64, True
    if widest <= 128:
        return (128, 128, True) if roomy else (64, 64, False)
    return (128, 64, False) if roomy else (64, 64, False)


def mask_first(device: Any, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Dropout's mask is made before its output (cuda/Dropout.cu, dropout_cuda)."""
    yield out[1]
    yield out[0]


def roll(device: Any, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Rolled along one dimension after another, each into a tensor of its own (native/TensorTransformations.h, roll_common)."""
    dims = args[2] if len(args) > 2 else kwargs.get("dims", ())
    yield (_bytes(out),) if len(dims) > 1 else ()
    yield out


def _with_copied_gradient(work: Inner) -> Inner:
    """What an operator holds whose strided gradient is copied before the results (transformers/cuda/attention_backward.cu)."""

    @wraps(work)
    def steps(device: Any, args: tuple, kwargs: dict, out: Any) -> Steps:
        yield tuple(_copies_of_strided(args[0].transpose(1, 2)))
        yield from tensors_of(out)
        yield from work(device, args, kwargs, out)

    return steps


# ------------------------------------------------------------------------------------------------------ matrix products


def strided_operands(device: Any, args: tuple, kwargs: dict, out: Any) -> Stages:
    """A copy of each operand that cuBLAS cannot read as rows or columns: neither of its last two strides is 1, or one is 0
    (prepare_matrix_for_cublas in cuda/Blas.cpp, prepare_batch_matrix_for_cublas)."""
    operands = args[1:3] if len(args) > 2 else args[:2]
    return [[_bytes(t) for t in operands if not _is_readable(t)]]


def _is_readable(tensor: Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    (rows, columns), (row, column) = tensor.shape[-2:], tensor.stride()[-2:]
    if (column == 1 and row >= max(1, columns)) or (row == 1 and column >= max(1, rows)):
        return True
    return tensor.dim() == 2 and _aten.is_non_overlapping_and_dense.default(tensor)


# ------------------------------------------------------------------------------------------------------------- indexing


def accumulating_index_put(device: Any, args: tuple, kwargs: dict, out: Any) -> Stages:
    """Adding at indices: they are made linear and sorted, five vectors of int64 and the sort's own; strided values are copied
    (cuda/Indexing.cu, index_put_with_sort_kernel)."""
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    indices = [index for index in args[1] if index is not None]
    if not accumulate or not indices or any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        return []
    places = torch.broadcast_shapes(*[index.shape for index in indices])
    return [[*[prod(places) * 8] * 5, *_copies_of_strided(args[2])]]


def sort(device: Any, args: tuple, kwargs: dict, out: Any) -> Stages:
    """Rows of more than 4,096 elements are sorted through a copy of keys and places (cuda/Sort.cpp, SortStable.cu)."""
    values, places = out
    dim = kwargs.get("dim", -1)
    if not values.dim() or values.shape[dim] <= 4096:
        return []
    return [[_bytes(values), _bytes(places), _bytes(places)]]


# -------------------------------------------------------------------------------------------------------- normalization


def softmax(device: Any, args: tuple, kwargs: dict, out: Any) -> Stages:
    """The input made contiguous (cuda/SoftMax.cu, host_softmax)."""
    return [_copies_of_strided(args[0])]


def softmax_backward(device: Any, args: tuple, kwargs: dict, out: Any) -> Stages:
    """The product of gradient and output; both made contiguous (cuda/SoftMax.cu, softmax_backward_cuda_out)."""
    return [[_bytes(args[0]), *_copies_of_strided(args[0], args[1])]]


def log_softmax_backward(device: Any, args: tuple, kwargs: dict, out: Any) -> Stages:
    """Gradient and output made contiguous (cuda/SoftMax.cu, host_softmax_backward)."""
    return [_copies_of_strided(args[0], args[1])]


def group_norm(device: Any, args: tuple, kwargs: dict, out: Any) -> Stages:
    """A scale and a shift per sample and channel in the accumulation dtype (group_norm_kernel.cu); the input made contiguous."""
    return [[*_copies_of_strided(args[0]), *[args[3] * args[4] * 4] * 2]]


def group_norm_backward(device: Any, args: tuple, kwargs: dict, out: Any) -> Stages:
    """In the accumulation dtype two sums per sample and channel, a factor likewise and two per group (group_norm_kernel.cu)."""
    samples, channels, groups = args[5], args[6], args[8]
    return [[*_copies_of_strided(args[0]), *[samples * channels * 4] * 3, *[samples * groups * 4] * 2]]


INNER: dict[Any, Inner] = {
    _aten.native_dropout.default: mask_first,
    _aten.roll.default: roll,
    _aten._scaled_dot_product_flash_attention_backward.default: _with_copied_gradient(flash_backward),
    _aten._scaled_dot_product_efficient_attention_backward.default: _with_copied_gradient(efficient_backward),
    _aten._scaled_dot_product_cudnn_attention_backward.default: _with_copied_gradient(cudnn_attention_backward),
}

SCRATCH: dict[Any, Scratch] = {
    _aten._scaled_dot_product_cudnn_attention.default: cudnn_attention,
    _aten.native_group_norm.default: group_norm,
    _aten.native_group_norm_backward.default: group_norm_backward,
    _aten._safe_softmax.default: safe_softmax,
    _aten._softmax.default: softmax,
    _aten._log_softmax.default: softmax,
    _aten._softmax_backward_data.default: softmax_backward,
    _aten._log_softmax_backward_data.default: log_softmax_backward,
    _aten.mm.default: strided_operands,
    _aten.addmm.default: strided_operands,
    _aten.bmm.default: strided_operands,
    _aten.baddbmm.default: strided_operands,
    _aten.index_put.default: accumulating_index_put,
    _aten.index_put_.default: accumulating_index_put,
    _aten._index_put_impl_.default: accumulating_index_put,
    _aten.sort.default: sort,
    _aten.sort.stable: sort,
    _aten._cudnn_rnn.default: recurrent.workspace,
    _aten._cudnn_rnn_backward.default: recurrent.workspace,
}

# What cuDNN decides by itself; for convolutions it can be asked.
MODELLED = frozenset({recurrent.workspace, convolution.convolution, convolution.convolution_backward})

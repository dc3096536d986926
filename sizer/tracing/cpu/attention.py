"""Scaled dot product attention on the CPU: its single fused kernel, and the memory inside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sizer.tracing.allocations import AllocationRule, Steps
from sizer.tracing.cpu import processor
from sizer.tracing.cpu.products import buffer_bytes, is_small, sum_bytes
from sizer.tracing.device import Device
from sizer.tracing.meta.attention import (
    NO_KERNEL,
    Attention,
    additive_mask,
    attention_kernel,
    has_rows,
    heads_fit,
    is_dense,
    is_switched_on,
    math_attention,
)

_aten = torch.ops.aten


@attention_kernel
def scaled_dot_product_attention(device: Device, a: Attention) -> Tensor:
    """Run aten.scaled_dot_product_attention as the CPU does (sdp_utils_cpp.cpp, use_flash_attention_cpp)."""
    strides = all(t.stride(-1) == 1 for t in (a.query, a.key, a.value))
    heads = a.query.shape[-1] == a.key.shape[-1] == a.value.shape[-1]
    trainable_mask = a.mask is not None and a.mask.requires_grad
    shapes = is_dense(device, a) and has_rows(device, a) and heads_fit(device, a)
    why = f"{str(a.query.dtype)[6:]}, head dim {a.query.shape[-1]}"
    if a.dropout == 0 and shapes and heads and strides and not trainable_mask and is_switched_on("flash"):
        device.note_choice("attention", "flash for CPU", why)
        mask = additive_mask(a.mask, a.query.dtype)
        return _aten._scaled_dot_product_flash_attention_for_cpu.default(
            a.query, a.key, a.value, a.dropout, a.is_causal, attn_mask=mask, scale=a.scale
        )[0]
    if not is_switched_on("math"):
        raise RuntimeError(NO_KERNEL)
    device.note_choice("attention", "math", why)
    return math_attention(a)


def _split(queries: int, keys: int) -> tuple[int, int]:
    """Return the rows and columns of a thread's block of weights (cpu/FlashAttentionKernel.cpp)."""
    rows = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return min(rows, queries), min(512, keys)


def flash_attention(device: Device, args: tuple, kwargs: dict, out: tuple) -> Steps:
    """Add a block of weights, row maxima, row sums and the output per thread (cpu/FlashAttentionKernel.cpp).

    Operator: _scaled_dot_product_flash_attention_for_cpu; function cpu_flash_attention. The buffers have the accumulation
    dtype. Half precision needs a second block of weights in the input's dtype.
    """
    query, key = args[0], args[1]
    rows, columns = _split(query.shape[2], key.shape[2])
    threads, wide = torch.get_num_threads(), max(4, query.itemsize)
    buffer = threads * (rows * columns + 2 * rows + rows * query.shape[3]) * wide
    return [*out, [buffer, threads * rows * columns * query.itemsize if query.itemsize < 4 else 0]]


def flash_attention_backward(device: Device, args: tuple, kwargs: dict, out: tuple) -> Steps:
    """Add two blocks of weights per thread and a sum for every row (cpu/FlashAttentionKernel.cpp).

    Operator: .._flash_attention_for_cpu_backward. Half precision needs the blocks in both precisions; oneDNN's matrix products
    in half precision have buffers of their own. Function: cpu_flash_attention_backward.
    """
    grad, query, key = args[0], args[1], args[2]
    rows, columns = _split(query.shape[2], key.shape[2])
    threads, wide, half = torch.get_num_threads(), max(4, query.itemsize), query.itemsize < 4
    sizes = [threads * 2 * rows * columns * wide, threads * rows * wide]
    if half:
        sizes += [threads * 2 * rows * columns * query.itemsize]
        if query.dtype == torch.bfloat16 and not processor.multiplies_bfloat16():
            small = is_small(rows, columns, query.shape[3])
            products = (0,) if small else (sum_bytes(1, columns, query.shape[3]), sum_bytes(1, rows, query.shape[3]))
        else:
            products = (
                buffer_bytes(columns, rows, query.shape[3], True),
                buffer_bytes(rows, columns, query.shape[3], False),
            )
        sizes += [max(products) if processor.onednn_takes(query.dtype) else 0]
    copy = 0 if grad.transpose(1, 2).is_contiguous() else grad.nbytes
    return [[copy], *out, [copy, *sizes]]


KERNELS = {_aten.scaled_dot_product_attention.default: scaled_dot_product_attention}
ALLOCATIONS: dict[Any, AllocationRule] = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: flash_attention_backward,
}

"""Memory inside attention kernels on CUDA, by shapes and dtypes (PyTorch 2.6 and 2.11 to 2.15).

*Known limitations*: flash attention's split keys in inference with few queries are not counted.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor

from sizer.base.units import round_up
from sizer.base.versions import rules_version
from sizer.tracing.allocations import AllocationRule, During, Steps, copies
from sizer.tracing.cuda.by_capability import EFFICIENT, HALF, SINGLE, efficient_workspace
from sizer.tracing.device import Device
from sizer.tracing.log import DeferredSize
from sizer.tracing.values.known import tensors_of

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


def flash_attention(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add a second seed of 16 bytes that dropout creates and frees at the end (flash_attn/flash_api.cpp, mha_fwd; since 2.11)."""
    dropout = args[3] if len(args) > 3 else kwargs.get("dropout_p", 0.0)
    if not dropout or rules_version(device.version) < (2, 11):
        return [*tensors_of(out)]
    return [*tensors_of(out[:6]), (16,), out[7], out[6], *tensors_of(out[8:])]


def flash_backward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add softmax_d and dq_accum in float32, and gradients of grouped heads (flash_attn/flash_api.cpp, mha_bwd).

    softmax_d is [batch, heads, queries to 128]. dq_accum is [.., head_dim to 32]; since 2.11, head dimensions above 128 are
    rounded up to 64. With grouped heads, key and value get a gradient for each query head.
    """
    query, key = args[1], args[2]
    batch, heads, queries, head = query.shape
    rows = batch * heads * round_up(queries, 128) * 4
    sizes = [rows, rows * round_up(head, 32 if head <= 128 or rules_version(device.version) < (2, 11) else 64)]
    if key.shape[1] != heads:
        sizes += [batch * key.shape[2] * heads * head * query.itemsize] * 2
    return [sizes]


def cudnn_attention(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add seed and offset before the other results, and 256 bytes (cuda/attention.cu, _cudnn_attention_forward; cudnn/MHA.cpp).

    cuDNN answered 256 bytes for every tested shape: cuDNN 9.19 and 9.26, capability 9.0.
    """
    return [*tensors_of((out[6:8], out[:6], out[8:])), [256]]


def cudnn_attention_backward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add the query's gradient and one number per row in float32, and 256 bytes (cudnn/MHA.cpp).

    The query's gradient is [batch, heads, queries, head_dim]. With grouped heads, key and value get a gradient for each query
    head. The sizes equal cuDNN's answers for 24 shapes to the byte (9.26 on capability 9.0).
    """
    query, key, value = args[1:4]
    batch, heads, queries, head = query.shape
    size = batch * heads * queries * (head + 1) * 4 + 256
    if key.shape[1] != heads:
        size += batch * heads * key.shape[2] * (head + value.shape[-1]) * query.itemsize
    return [[size]]


def efficient_backward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add delta [batch, heads, queries] in float32, a workspace and expanded grouped heads (attention_backward.cu).

    The workspace is `efficient_workspace`. In a trace that devices share, it is a size query.
    """
    query, key, value = args[1:4]
    batch, heads, queries, _ = query.shape
    copies = []
    if key.shape[1] != heads:
        copies = [batch * heads * key.shape[2] * t.shape[-1] * t.itemsize for t in (key, value)]
    return _efficient_scratch(device, query, value, copies, batch, queries, heads, batch * queries)


def _efficient_scratch(
    device: Device, query: Tensor, value: Tensor, copies: list[int], batch: int, queries: int, heads: int, rows: int
) -> Steps:
    head, value_head, half = query.shape[-1], value.shape[-1], query.dtype in _HALVES
    words, numbers = (HALF if half else SINGLE, *map(str, (queries, head, value_head))), (batch * heads,)
    workspace: int | DeferredSize
    if device.shared:
        workspace = DeferredSize(
            efficient_workspace(device.capability.plain, words, numbers), EFFICIENT, words, numbers
        )
    else:
        workspace = efficient_workspace(device.capability, words, numbers)
    delta = rows * heads * 4
    if half:
        return [[*copies, delta, workspace]]
    # in float32 delta is a contiguous copy of the sum of a product as large as the output
    return [tuple(copies), ([delta * value_head, delta], delta), [workspace]]


# Concatenated sequences of several lengths, as in nested tensors: [rows of all, heads, head_dim], and the start of each.


def flash_of_lengths(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add a second seed of 16 bytes for dropout in _flash_attention_forward (flash_attn/flash_api.cpp, mha_varlen_fwd).

    Arguments: query, key, value, starts, .., dropout, ...
    """
    yield from tensors_of(out)
    yield [16] if args[7] and rules_version(device.version) >= (2, 11) else []


def flash_of_lengths_backward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add copies of strided gradients and outputs, softmax_d and dq_accum (flash_attn/flash_api.cpp, mha_varlen_bwd).

    Operator: _flash_attention_backward, with arguments gradient, query, key, value, out, sums, starts, ... softmax_d and
    dq_accum are as for equal lengths, with 128 more rows for each sequence.
    """
    query, key, starts = args[1], args[2], args[6]
    yield tuple(copies(args[0], args[4]))
    yield from tensors_of(out)
    if starts is None:
        yield from flash_backward(device, (None, query.transpose(1, 2), key.transpose(1, 2)), {}, out)
        return
    total, heads, head = query.shape
    rows = (total + 128 * (len(starts) - 1)) * heads * 4
    sizes = [rows, rows * round_up(head, 32 if head <= 128 or rules_version(device.version) < (2, 11) else 64)]
    if key.shape[1] != heads:
        sizes += [key.shape[0] * heads * head * query.itemsize] * 2
    yield sizes


def efficient_of_lengths_backward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add the memory of sequences that all have the longest length, for _efficient_attention_backward (attention_backward.cu).

    Arguments: gradient, query [1, rows, heads, head_dim], .., starts, _, longest, ...
    """
    query, value, starts = args[1], args[3], args[6]
    yield tuple(copies(args[0], args[5]))
    yield from tensors_of(out)
    batch, rows, heads, _ = query.shape
    sequences, longest = (batch, rows) if starts is None else (len(starts) - 1, int(args[8]))
    yield from _efficient_scratch(device, query, value, [], sequences, longest, heads, batch * rows)


def _with_copied(work: AllocationRule, *positions: int) -> AllocationRule:
    """Return a rule that adds copies of strided arguments at some positions before the results.

    Source: transformers/cuda/attention_backward.cu, 2.15: the gradient; _flash_attention_backward also copies the output.
    """

    @wraps(work)
    def steps(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
        yield tuple(copies(*(args[position].transpose(1, 2) for position in positions)))
        yield from tensors_of(out)
        yield from work(device, args, kwargs, out)

    return steps


def cudnn_backward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add the gradients, a copy of the incoming gradient if its innermost stride is not 1, and the workspace (cudnn/MHA.cpp).

    In the order of allocation. Source: run_cudnn_SDP_bprop, with cuDNN 9.5.1 or later.
    """
    grad = args[0]
    yield from tensors_of(out)
    copy = [] if grad.stride(-1) == 1 else [grad.nbytes]
    yield During(copy, cudnn_attention_backward(device, args, kwargs, out))


def efficient_of_lengths(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add seed and offset before the other results of _efficient_attention_forward (transformers/cuda/attention.cu)."""
    return tensors_of((out[2:4], out[:2]))


def efficient_attention(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Add seed and offset before the other results (transformers/cuda/attention.cu, _efficient_attention_forward, 2.15)."""
    return tensors_of((out[2:], out[:2]))


ALLOCATIONS: dict[Any, AllocationRule] = {
    _aten._flash_attention_forward.default: flash_of_lengths,
    _aten._flash_attention_backward.default: flash_of_lengths_backward,
    _aten._efficient_attention_forward.default: efficient_of_lengths,
    _aten._efficient_attention_backward.default: efficient_of_lengths_backward,
    _aten._scaled_dot_product_flash_attention.default: flash_attention,
    _aten._scaled_dot_product_efficient_attention.default: efficient_attention,
    _aten._scaled_dot_product_cudnn_attention.default: cudnn_attention,
    _aten._scaled_dot_product_flash_attention_backward.default: _with_copied(flash_backward, 0, 4),
    _aten._scaled_dot_product_efficient_attention_backward.default: _with_copied(efficient_backward, 0),
    _aten._scaled_dot_product_cudnn_attention_backward.default: cudnn_backward,
}

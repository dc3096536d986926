"""What attention's kernels hold inside on CUDA, by shapes and dtypes (PyTorch 2.6 and 2.11 to 2.15).

*Known limitations*: flash attention's split keys in inference with few queries are not counted.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor

from sizer.base.units import round_up
from sizer.base.versions import version_followed
from sizer.tracing.allocations import During, Held, Steps, copies
from sizer.tracing.cuda.by_capability import EFFICIENT, HALF, SINGLE, efficient_workspace
from sizer.tracing.device import Device
from sizer.tracing.log import DeferredSize
from sizer.tracing.values.known import tensors_of

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


def flash_attention(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """With dropout the seed is made twice, and the first of them, 16 bytes, is freed at the end (flash_attn/flash_api.cpp, mha_fwd;
    since 2.11)."""
    dropout = args[3] if len(args) > 3 else kwargs.get("dropout_p", 0.0)
    if not dropout or version_followed(device.version) < (2, 11):
        return [*tensors_of(out)]
    return [*tensors_of(out[:6]), (16,), out[7], out[6], *tensors_of(out[8:])]


def flash_backward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """In float32 softmax_d [batch, heads, queries to 128] and dq_accum [.., head_dim to 32, since 2.11 above 128 to 64]; for
    grouped heads the gradients of key and value of every query head (flash_attn/flash_api.cpp, mha_bwd)."""
    query, key = args[1], args[2]
    batch, heads, queries, head = query.shape
    rows = batch * heads * round_up(queries, 128) * 4
    sizes = [rows, rows * round_up(head, 32 if head <= 128 or version_followed(device.version) < (2, 11) else 64)]
    if key.shape[1] != heads:
        sizes += [batch * key.shape[2] * heads * head * query.itemsize] * 2
    return [sizes]


def cudnn_attention(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Seed and offset, which come before the other results (cuda/attention.cu, _cudnn_attention_forward), and 256 bytes
    (cudnn/MHA.cpp asks cuDNN, which answered so for every shape tried: 9.19 and 9.26, capability 9.0)."""
    return [*tensors_of((out[6:8], out[:6], out[8:])), [256]]


def cudnn_attention_backward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """In float32 the query's gradient [batch, heads, queries, head_dim] and a number a row, and 256 bytes; for grouped heads the
    gradients of key and value of every query head (cudnn/MHA.cpp asks cuDNN; its answers for 24 shapes by 9.26 on capability
    9.0, met to the byte)."""
    query, key, value = args[1:4]
    batch, heads, queries, head = query.shape
    size = batch * heads * queries * (head + 1) * 4 + 256
    if key.shape[1] != heads:
        size += batch * heads * key.shape[2] * (head + value.shape[-1]) * query.itemsize
    return [[size]]


def efficient_backward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """delta [batch, heads, queries] in float32 and what `efficient_workspace` says, which a trace that devices share leaves to a
    size query; grouped heads expanded (attention_backward.cu)."""
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
    # in float32 delta is a copy, made contiguous, of the sum of a product as large as the output
    return [tuple(copies), ([delta * value_head, delta], delta), [workspace]]


# Sequences of several lengths one after another, as of nested tensors: [rows of all, heads, head_dim], and where each begins.


def flash_of_lengths(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """_flash_attention_forward(query, key, value, starts, .., dropout, ..): with dropout the seed is made twice
    (flash_attn/flash_api.cpp, mha_varlen_fwd)."""
    yield from tensors_of(out)
    yield [16] if args[7] and version_followed(device.version) >= (2, 11) else []


def flash_of_lengths_backward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """_flash_attention_backward(gradient, query, key, value, out, sums, starts, ..): strided gradients and outputs copied; as of
    equal lengths softmax_d and dq_accum, with 128 rows more for each sequence (flash_attn/flash_api.cpp, mha_varlen_bwd)."""
    query, key, starts = args[1], args[2], args[6]
    yield tuple(copies(args[0], args[4]))
    yield from tensors_of(out)
    if starts is None:
        yield from flash_backward(device, (None, query.transpose(1, 2), key.transpose(1, 2)), {}, out)
        return
    total, heads, head = query.shape
    rows = (total + 128 * (len(starts) - 1)) * heads * 4
    sizes = [rows, rows * round_up(head, 32 if head <= 128 or version_followed(device.version) < (2, 11) else 64)]
    if key.shape[1] != heads:
        sizes += [key.shape[0] * heads * head * query.itemsize] * 2
    yield sizes


def efficient_of_lengths_backward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """_efficient_attention_backward(gradient, query [1, rows, heads, head_dim], .., starts, _, longest, ..): as of sequences that
    all have the longest length (attention_backward.cu)."""
    query, value, starts = args[1], args[3], args[6]
    yield tuple(copies(args[0], args[5]))
    yield from tensors_of(out)
    batch, rows, heads, _ = query.shape
    sequences, longest = (batch, rows) if starts is None else (len(starts) - 1, int(args[8]))
    yield from _efficient_scratch(device, query, value, [], sequences, longest, heads, batch * rows)


def _with_copied(work: Held, *positions: int) -> Held:
    """Yield what an operator holds whose strided arguments at some positions are copied before the results.

    Source: transformers/cuda/attention_backward.cu, 2.15: the gradient; _flash_attention_backward also copies the output.
    """

    @wraps(work)
    def steps(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
        yield tuple(copies(*(args[position].transpose(1, 2) for position in positions)))
        yield from tensors_of(out)
        yield from work(device, args, kwargs, out)

    return steps


def cudnn_backward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Return the gradients, a copy of the incoming gradient if its innermost stride is not 1 (cudnn/MHA.cpp, run_cudnn_SDP_bprop,
    with cuDNN 9.5.1 or later), and the workspace, in the order of allocation."""
    grad = args[0]
    yield from tensors_of(out)
    copy = [] if grad.stride(-1) == 1 else [grad.nbytes]
    yield During(copy, cudnn_attention_backward(device, args, kwargs, out))


def efficient_of_lengths(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """_efficient_attention_forward: seed and offset come before the other results, too (transformers/cuda/attention.cu)."""
    return tensors_of((out[2:4], out[:2]))


def efficient_attention(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Seed and offset come before the other results (transformers/cuda/attention.cu, _efficient_attention_forward, 2.15)."""
    return tensors_of((out[2:], out[:2]))


HELD: dict[Any, Held] = {
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

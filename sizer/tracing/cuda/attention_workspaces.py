"""What attention's kernels hold inside on CUDA, by shapes and dtypes (PyTorch 2.6 and 2.11 to 2.15).

*Known limitations*: flash attention's split keys in inference with few queries are not counted.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from sizer.base.versions import version_followed
from sizer.tracing.allocations import Held, Steps, copies, round_up
from sizer.tracing.device import Device
from sizer.tracing.log import DeferredSize
from sizer.tracing.values.known import tensors_of

EFFICIENT = "attention's efficient backward pass"  # the kind of its size queries

_aten = torch.ops.aten
_HALF, _SINGLE = "half", "single"
_HALVES = (torch.float16, torch.bfloat16)


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
    batch, heads, queries, head = query.shape
    half = query.dtype in _HALVES
    words, numbers = (_HALF if half else _SINGLE, *map(str, (queries, head, value.shape[-1]))), (batch * heads,)
    workspace: int | DeferredSize
    if device.shared:
        workspace = DeferredSize(
            efficient_workspace(device.capability.plain, words, numbers), EFFICIENT, words, numbers
        )
    else:
        workspace = efficient_workspace(device.capability, words, numbers)
    delta = batch * heads * queries * 4
    copies = []
    if key.shape[1] != heads:
        copies = [batch * heads * key.shape[2] * t.shape[-1] * t.itemsize for t in (key, value)]
    if half:
        return [[*copies, delta, workspace]]
    # in float32 delta is a copy, made contiguous, of the sum of a product as large as the output
    return [tuple(copies), ([batch * heads * queries * value.shape[-1] * 4, delta], delta), [workspace]]


def efficient_workspace(capability: tuple[int, int], words: tuple[str, ...], numbers: tuple[int, ...]) -> int:
    """Bytes in which memory-efficient attention's backward pass works: tiles of 4 bytes an element, 16 more a tile, that accumulate
    the gradient of the query, for wide heads in half precision those of key and value too (mem_eff_attention/kernel_backward.h,
    workspace_size).

    `words` are the precision, the queries and the head dims of query and value, the one number is that of pairs of sample and head.
    *Known limitations*: below 200 pairs wide heads may split their keys, which takes up to 26 MB more.
    """
    half, (queries, head, value_head), (pairs,) = words[0] == _HALF, map(int, words[1:]), numbers
    rows, columns, in_registers = _efficient_blocks(capability, half, max(head, value_head))
    tiles = -(-queries // rows) * -(-head // columns)
    elements = tiles * (4 + rows * columns)
    if half and not in_registers:
        elements += columns * (round_up(head, rows) + round_up(value_head, rows))
    return pairs * round_up(elements, 4) * 4


def _efficient_blocks(capability: tuple[int, int], half: bool, widest: int) -> tuple[int, int, bool]:
    """(rows, columns, whether gradients of key and value stay in registers) of the first kernel that fits, in the order of
    mem_eff_attention/kernels/cutlassB.h; devices with 100 KiB of shared memory cannot take the largest blocks."""
    if widest <= 64:
        return 64, 64, True
    roomy = capability in ((8, 0), (8, 7)) or (9, 0) <= capability <= (10, 9)
    if not half or capability < (8, 0):
        return (128, 64, True) if roomy or (half and widest <= 128) else (64, 64, False)
    if widest <= 96 and capability in ((8, 6), (8, 9)):
        return 128, 64, True
    if widest <= 128:
        return (128, 128, True) if roomy else (64, 64, False)
    return (128, 64, False) if roomy else (64, 64, False)


def _with_copied_gradient(work: Held) -> Held:
    """What an operator holds whose strided gradient is copied before the results (transformers/cuda/attention_backward.cu)."""

    @wraps(work)
    def steps(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
        yield tuple(copies(args[0].transpose(1, 2)))
        yield from tensors_of(out)
        yield from work(device, args, kwargs, out)

    return steps


def cudnn_backward(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """Return the gradients, a copy of the incoming gradient if its innermost stride is not 1 (cudnn/MHA.cpp, run_cudnn_SDP_bprop,
    with cuDNN 9.5.1 or later), and the workspace, in the order of allocation."""
    grad = args[0]
    yield from tensors_of(out)
    copy = [] if grad.stride(-1) == 1 else [grad.nbytes]
    for step in cudnn_attention_backward(device, args, kwargs, out):
        yield [*copy, *step]


HELD: dict[Any, Held] = {
    _aten._scaled_dot_product_cudnn_attention.default: cudnn_attention,
    _aten._scaled_dot_product_flash_attention_backward.default: _with_copied_gradient(flash_backward),
    _aten._scaled_dot_product_efficient_attention_backward.default: _with_copied_gradient(efficient_backward),
    _aten._scaled_dot_product_cudnn_attention_backward.default: cudnn_backward,
}

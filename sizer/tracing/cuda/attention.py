"""Scaled dot product attention on CUDA: calls of the backends, and results that differ from those of meta kernels.

Source: aten/src/ATen/native/transformers/attention.cpp and cuda/attention.cu, PyTorch 2.6 and 2.11 to 2.15. The memory inside
the backends is in `attention_workspaces`.

The backend is chosen in PyTorch's order, by PyTorch's conditions. Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
and sdp_utils_cpp.{h,cpp}, PyTorch 2.6 and 2.11 to 2.15. Conditions that differ between these versions check the device's
version.

Shapes: query [batch, heads, queries, head_dim], key and value [batch, key_heads, keys, head_dim].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from sizer.base.versions import Version, rules_version
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
from sizer.tracing.meta.dtypes import check_bias
from sizer.tracing.operator_tables import Results

_HALVES = (torch.float16, torch.bfloat16)
_LARGEST_GRID = 65535  # batch or heads that cuDNN and flash support

# A reason for not using a backend, and the condition that must hold to use it.
Condition = tuple[str, Callable[[Device, Attention], bool]]


def _within(low: tuple[int, int], high: tuple[int, int]) -> Callable[[Device, Attention], bool]:
    return lambda device, a: device.capability.among((low, high))


def _has_kernels(device: Device, a: Attention) -> bool:
    """Return whether check_sm_version passes: up to 9.0 in 2.6, 12.0 since 2.7 and 12.1 since 2.8.

    Source: pull requests 145602 (2.7) and 152314 (2.8).
    """
    highest = (9, 0) if device.version < (2, 7) else (12, 0) if device.version < (2, 8) else (12, 1)
    return device.capability <= highest


def _heads_fit_efficient(device: Device, a: Attention) -> bool:
    """Return whether the efficient kernels can read the heads; they read grouped heads since 2.14.

    Source: q_heads_per_kv in mem_eff_attention/kernel_forward.h.
    """
    return heads_fit(device, a, grouped=device.version >= (2, 14))


def _unit_stride(singleton: bool) -> Callable[[Device, Attention], bool]:
    """Return the condition check_last_dim_stride_equals_1_dense."""

    def holds(device: Device, a: Attention) -> bool:
        plain = all(t.stride(-1) == 1 for t in (a.query, a.key, a.value)) or (singleton and a.query.shape[-1] == 1)
        return plain and (a.mask is None or a.mask.stride(-1) == 1)

    return holds


def _same_dtype(a: Attention, allowed: tuple[torch.dtype, ...]) -> bool:
    return a.query.dtype == a.key.dtype == a.value.dtype and a.query.dtype in allowed


def _is_half(device: Device, a: Attention) -> bool:
    return _same_dtype(a, _HALVES)


def _grid_fits(device: Device, a: Attention) -> bool:
    return device.version < (2, 15) or max(a.query.shape[:2]) <= _LARGEST_GRID


def _flash_heads(device: Device, a: Attention) -> bool:
    query, key, value = a.heads
    return query == key == value and query <= 256


def _flash_trains(device: Device, a: Attention) -> bool:
    """Return whether check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120 holds."""
    head = a.query.shape[-1]
    if not a.trains or head <= 192 or (a.dropout == 0 and head > 224):
        return True
    return not device.capability.among(((8, 6), (8, 9)), ((12, 0), (12, 1)))


def _flash_causal(device: Device, a: Attention) -> bool:
    return not a.is_causal or a.query.shape[-2] == a.key.shape[-2]


def _are_aligned(device: Device, a: Attention, *elements: int) -> bool:
    """Return whether numbers of elements are multiples of minimum_gemm_alignment: 128 bits for tensor cores."""
    half = a.query.dtype in _HALVES
    if not any(number % (8 if half else 4) for number in elements):
        return True
    return device.capability < ((7, 0) if half else (8, 0))


def _efficient_heads(device: Device, a: Attention) -> bool:
    query, key, value = a.heads
    return query == key and query > 0 and value > 0 and _are_aligned(device, a, query, value)


def _efficient_offsets(device: Device, a: Attention) -> bool:
    """Return whether check_data_ptr_alignment_mem_efficient passes, which exists since 2.14."""
    offsets = [t.storage_offset() for t in (a.query, a.key, a.value)]
    return device.version < (2, 14) or _are_aligned(device, a, *offsets) or device.capability < (8, 0)


def _efficient_dtype(device: Device, a: Attention) -> bool:
    if _same_dtype(a, (torch.bfloat16,)):
        return device.capability >= (8, 0)
    return _same_dtype(a, (torch.float16, torch.float32))


def _cudnn_heads(device: Device, a: Attention) -> bool:
    """Return whether check_cudnn_tensor_shapes and check_cudnn_d256_bprop_head_dim pass.

    Head dimensions up to 256 pass since 2.15 (cuDNN after 9.22, frontend 1.24).
    """
    query, _, value = a.heads
    if query % 8 or value % 8:
        return False
    if max(query, value) <= 128:
        return True
    if not device.capability.among(((9, 0), (9, 0)), ((10, 0), (10, 9))):
        return False
    if device.version < (2, 15):
        return (query, value) == (192, 128)
    return max(query, value) <= 256 and (not a.trains or (query, value) in ((192, 128), (256, 256)))


def _cudnn_rows(device: Device, a: Attention) -> bool:
    return a.key.shape[-2] != 1 and not (a.dropout and a.query.shape[-2] == 1)


def _cudnn_mask(device: Device, a: Attention) -> bool:
    """Return whether check_attn_mask_shape passes.

    The mask must be [queries, keys] or [batch, heads, queries, keys], with 1 for any of these sizes, and must not require a
    gradient.
    """
    if a.mask is None:
        return True
    if a.mask.requires_grad or a.mask.dim() not in (2, 4):
        return False
    wanted = (*a.query.shape[:2], a.query.shape[-2], a.key.shape[-2])[-a.mask.dim() :]
    return all(size in (1, whole) for size, whole in zip(a.mask.shape, wanted, strict=True))


def _cudnn_dropout(device: Device, a: Attention) -> bool:
    """Return whether check_dropout_quantization passes, which exists since 2.12.

    Earlier versions of cuDNN accepted any dropout, as 2.11 did on an H200.
    """
    return device.version < (2, 12) or (a.dropout * 16).is_integer()


# The default order of `sdpa_kernel(..., set_priority=True)` (Context.h, sdp_priority_order), by the numbers of
# torch.nn.attention.SDPBackend.
_NUMBERS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
_DEFAULT_ORDER = [1, 2, 0, 3, 4]


_SHAPES: tuple[Condition, ...] = (
    ("query, key and value need four dimensions", is_dense),
    ("there are no queries or keys", has_rows),
)

_NO_KERNELS = "this version has none for the capability"

# One line per condition, in the order of the functions in sdp_utils.cpp. The dtype is checked before the capability: if the dtype
# is refused, the trace does not depend on the capability and serves more devices.
CONDITIONS: dict[str, tuple[Condition, ...]] = {
    "flash": (
        *_SHAPES,
        ("it takes no mask", lambda device, a: a.mask is None),
        ("it needs one head dim of at most 256", _flash_heads),
        ("it needs float16 or bfloat16", _is_half),
        ("it needs capability 8.0 to 12.1", _within((8, 0), (12, 1))),
        (_NO_KERNELS, _has_kernels),
        ("its backward pass has no kernel for this head dim here", _flash_trains),
        ("causal attention needs as many queries as keys", _flash_causal),
        ("batch or heads are above 65,535", _grid_fits),
        ("batches or heads do not match", heads_fit),
        ("the last dimension is strided", _unit_stride(singleton=True)),
    ),
    "efficient": (
        *_SHAPES,
        ("it needs capability 5.0 to 12.1", _within((5, 0), (12, 1))),
        (_NO_KERNELS, _has_kernels),
        ("head dims do not match or are not aligned", _efficient_heads),
        ("tensors do not begin at an aligned place", _efficient_offsets),
        ("the last dimension is strided", _unit_stride(singleton=False)),
        ("batches or heads do not match", _heads_fit_efficient),
        ("it has no kernel for this dtype here", _efficient_dtype),
    ),
    "cudnn": (
        *_SHAPES,
        ("it needs float16 or bfloat16", _is_half),
        ("it does not take this mask", _cudnn_mask),
        ("it needs capability 8.0 to 12.1", _within((8, 0), (12, 1))),
        (_NO_KERNELS, _has_kernels),
        ("dropout is no multiple of 1/16", _cudnn_dropout),
        ("the last dimension is strided", _unit_stride(singleton=True)),
        ("batch or heads are above 65,535", _grid_fits),
        ("batches or heads do not match", lambda device, a: heads_fit(device, a, same=False)),
        ("it has no kernel for these head dims", _cudnn_heads),
        ("it needs more than one key", _cudnn_rows),
    ),
    "math": (),
}


def refusal(backend: str, device: Device, a: Attention) -> str | None:
    """Return why the backend cannot be used; None if it can."""
    if not is_switched_on(backend):
        return "it is switched off (torch.nn.attention.sdpa_kernel)"
    return next((why for why, holds in CONDITIONS[backend] if not holds(device, a)), None)


@contextmanager
def backends_answered(device: Device) -> Iterator[None]:
    """Make `torch.backends.cuda.can_use_flash_attention` and its siblings answer for the device within the context."""

    def answer(backend: str) -> Callable[..., bool]:
        def can_use(params: Any, debug: bool = False) -> bool:
            asked = Attention(
                query=params.query, key=params.key, value=params.value, mask=params.attn_mask, dropout=params.dropout,
                is_causal=params.is_causal, scale=None, grouped=params.enable_gqa,
            )  # fmt: skip
            return refusal(backend, device, asked) is None

        return can_use

    with ExitStack() as stack:
        for backend in ("flash", "efficient", "cudnn"):
            stack.enter_context(mock.patch.object(torch.backends.cuda, f"can_use_{backend}_attention", answer(backend)))
        yield


def order(device: Device, a: Attention) -> tuple[str, ...]:
    """Return the backends in the order in which CUDA tries them (priority_order, check_prefer_cudnn_attention).

    cuDNN is first on capabilities 9 and 10, with the cuDNN (9.19 and newer) and CUDA (13) that come with PyTorch 2.11 and
    newer. It is left out if it does not support the dtype. In 2.6 cuDNN comes after the math path (Context.h,
    sdp_priority_order), which accepts every call. It is first in 2.9 (pull request 162073). It is not first in 2.10, which
    requires a newer cuDNN than it comes with. An order set by user code takes precedence.
    """
    if (asked := torch._C._get_sdp_priority_order()) != _DEFAULT_ORDER:
        return tuple(_NUMBERS[number] for number in asked if number in _NUMBERS)
    prefers = device.version == (2, 9) or device.version >= (2, 11)
    first = ("cudnn",) if prefers and _is_half(device, a) and device.capability.among(((9, 0), (10, 9))) else ()
    return (*first, "flash", "efficient", "math")


def choose(device: Device, a: Attention) -> str:
    """Return the backend that CUDA would choose: "cudnn", "flash", "efficient" or "math".

    Raises RuntimeError, as PyTorch does, if no enabled backend accepts the call.
    """
    for backend in order(device, a):
        if refusal(backend, device, a) is None:
            return backend
    raise RuntimeError(NO_KERNEL)


def reason(device: Device, a: Attention, backend: str) -> str:
    """Return the call's dtype, mask and head dimension, and why the backends earlier in the order were refused."""
    mask = "no mask" if a.mask is None else "mask"
    facts = [str(a.query.dtype)[6:], mask, f"head dim {a.query.shape[-1]}"]
    backends = order(device, a)
    passed = [f"not {other}: {refusal(other, device, a)}" for other in backends[: backends.index(backend)]]
    return "; ".join([", ".join(facts), *passed])


# ----------------------------------------------------------------------------------------------------------- attention


_aten = torch.ops.aten


def _flash(a: Attention) -> Tensor:
    head = a.query.shape[-1]
    scale = a.scale if a.scale is not None else 1 / math.sqrt(head)
    padding = -head % 8  # pad_last_dim<8>
    q, k, v = (F.pad(t, (0, padding)) if padding else t for t in (a.query, a.key, a.value))
    out = _aten._scaled_dot_product_flash_attention.default(q, k, v, a.dropout, a.is_causal, False, scale=scale)[0]
    return out[..., :head] if padding else out


def _efficient(a: Attention) -> Tensor:
    mask = additive_mask(a.mask, a.query.dtype)
    check_bias(a.query, mask)
    if mask is not None:  # preprocess_mask: rows padded to 16 bytes, then expanded
        keys = mask.shape[-1]
        if keys % 8:
            mask = F.pad(mask, (0, -keys % 8))[..., :keys]
        mask = mask.expand(a.query.shape[0], a.query.shape[1], a.query.shape[-2], a.key.shape[-2])
    return _aten._scaled_dot_product_efficient_attention.default(
        a.query, a.key, a.value, mask, a.trains, a.dropout, a.is_causal, scale=a.scale
    )[0]


def _cudnn(a: Attention) -> Tensor:
    mask = additive_mask(a.mask, a.query.dtype)
    return _aten._scaled_dot_product_cudnn_attention.default(
        a.query, a.key, a.value, mask, a.trains, a.dropout, a.is_causal, False, scale=a.scale
    )[0]


_BACKENDS = {"cudnn": _cudnn, "flash": _flash, "efficient": _efficient, "math": math_attention}


def _with_batch(a: Attention) -> Attention:
    """Return the call with a batch of one, for query, key and value of three dimensions (normalize_unbatched_input)."""
    mask = a.mask
    while mask is not None and mask.dim() < 4:
        mask = mask.unsqueeze(0)
    query, key, value = (t.unsqueeze(0) for t in (a.query, a.key, a.value))
    return replace(a, query=query, key=key, value=value, mask=mask)


@attention_kernel
def scaled_dot_product_attention(device: Device, given: Attention) -> Tensor:
    """Run aten.scaled_dot_product_attention as CUDA does, and note the choice of backend for the report."""
    unbatched = device.version >= (2, 14) and given.query.dim() == given.key.dim() == given.value.dim() == 3
    batched = _with_batch(given) if unbatched else given
    backend = choose(device, batched)
    device.note_choice("attention", backend, reason(device, batched, backend))
    if unbatched and backend != "math":
        return _BACKENDS[backend](batched).squeeze(0)
    return _BACKENDS[backend](given)


def _seeds_on_host(args: tuple, out: tuple) -> tuple:
    """Return the results with seed and offset on the host, except during graph capture.

    Results of _scaled_dot_product_efficient_attention: (output, log sums, seed, offset). Source: Note [Seed and Offset Device]
    in cuda/attention.cu.
    """
    if torch.cuda.is_current_stream_capturing():
        return out
    return (*out[:2], *(torch.empty((), dtype=t.dtype, device="cpu") for t in out[2:]))


def _seeds_on_host_with_dropout(args: tuple, out: tuple) -> tuple:
    """Return the results with seed and offset on the host if there is dropout; since 2.15 they stay on the device without it."""
    return _seeds_on_host(args, out) if len(args) > 5 and args[5] else out


def _of_lengths(args: tuple, out: tuple) -> tuple:
    """Return the results of _efficient_attention_forward with seed and offset on the host if there is dropout (`args[8]`).

    For 2.15 only, the version with which nested tensors were compared.
    """
    return _seeds_on_host(args, out[:4]) + out[4:] if args[8] else out


def _no_bias(args: tuple, out: tuple) -> tuple:
    """Return an empty tensor as the bias gradient of _efficient_attention_backward if there is no bias.

    The meta kernel returns a number there (cuda/attention_backward.cu).
    """
    return out if args[4] is not None else (*out[:3], torch.empty(0, dtype=out[0].dtype, device=out[0].device))


def _log_sums_if_asked(args: tuple, out: tuple) -> tuple:
    """Return _scaled_dot_product_cudnn_attention's results without log sums if the call does not request them.

    CUDA computes log sums in training only (cuda/attention.cu, _cudnn_attention_forward). The meta kernel always returns them.
    """
    return out if len(args) > 4 and args[4] else (out[0], torch.empty(0, device=out[1].device), *out[2:])


def _flash_seeds_on_host(args: tuple, out: tuple) -> tuple:
    """Return _scaled_dot_product_flash_attention's results with seed and offset on the host, as in 2.6.

    They are the seventh and eighth result (flash_attn/flash_api.cpp, mha_fwd). Later versions keep three numbers on the device.
    """
    seeds = (torch.empty((), dtype=torch.int64, device="cpu") for _ in range(2))
    return (*out[:6], *seeds, *out[8:])


def _gradients_like_inputs(args: tuple, out: tuple) -> tuple:
    """Return the gradients of query, key and value [batch, heads, rows, head_dim] in their inputs' shapes, stored row by row.

    Before PyTorch 2.14, meta kernels return gradients of grouped keys and values with the query's heads.
    """
    return (*(_like_input(gradient, input) for gradient, input in zip(out[:3], args[1:4], strict=True)), *out[3:])


def _like_input(gradient: Tensor | None, input: Tensor) -> Tensor | None:
    if gradient is None or gradient.shape == input.shape:
        return gradient
    batch, heads, rows, head = input.shape
    return torch.empty(batch, rows, heads, head, dtype=gradient.dtype, device=gradient.device).transpose(1, 2)


def results(version: Version) -> Results:
    """Return the corrections of attention's meta kernels for a version of PyTorch."""
    seeds = _seeds_on_host_with_dropout if version >= (2, 15) else _seeds_on_host
    flash = {_aten._scaled_dot_product_flash_attention.default: _flash_seeds_on_host}
    return {
        **(flash if rules_version(version) < (2, 11) else {}),
        _aten._scaled_dot_product_efficient_attention.default: seeds,
        _aten._efficient_attention_forward.default: _of_lengths,
        _aten._efficient_attention_backward.default: _no_bias,
        _aten._scaled_dot_product_efficient_attention_backward.default: _gradients_like_inputs,
        _aten._scaled_dot_product_cudnn_attention.default: _log_sums_if_asked,
    }


KERNELS = {_aten.scaled_dot_product_attention.default: scaled_dot_product_attention}

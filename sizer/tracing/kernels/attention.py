"""Scaled dot product attention: the backend that PyTorch would choose, in its order, by its conditions.

Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, sdp_utils_cpp.{h,cpp} and attention.cpp, PyTorch 2.6 and 2.11 to
2.15; where these differ, the conditions ask the device's version. Shapes: query [batch, heads, queries, head_dim], key and value
[batch, key_heads, keys, head_dim].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sizer.tracing.meta.dtypes import check_attention, check_bias
from sizer.versions import Version, version_followed

if TYPE_CHECKING:
    from sizer.tracing.device import Device

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
_LARGEST_GRID = 65535  # batch or heads that cuDNN and flash take


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The question as sdp_params holds it."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    is_causal: bool
    scale: float | None
    grouped: bool

    @property
    def trains(self) -> bool:
        """Whether a backward pass will follow (input_requires_grad, should_compute_logsumexp)."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.query, self.key, self.value))

    @property
    def heads(self) -> tuple[int, int, int]:
        """The head dimensions of query, key and value."""
        return self.query.shape[-1], self.key.shape[-1], self.value.shape[-1]


# A condition and what to say of a backend that is passed over because the condition does not hold.
Condition = tuple[str, Callable[["Device", Attention], bool]]


def _capability(device: Device) -> tuple[int, int]:
    return device.capability or (0, 0)


def _within(low: tuple[int, int], high: tuple[int, int]) -> Callable[[Device, Attention], bool]:
    return lambda device, a: low <= _capability(device) <= high


def _has_kernels(device: Device, a: Attention) -> bool:
    """check_sm_version goes to 9.0 in 2.6, to 12.0 since 2.7 (pull request 145602) and to 12.1 since 2.8 (152314)."""
    highest = (9, 0) if device.version < (2, 7) else (12, 0) if device.version < (2, 8) else (12, 1)
    return _capability(device) <= highest


def _is_dense(device: Device, a: Attention) -> bool:
    return a.query.dim() == a.key.dim() == a.value.dim() == 4


def _has_rows(device: Device, a: Attention) -> bool:
    return 0 not in (a.query.shape[-2], a.key.shape[-2])


def _heads_fit(device: Device, a: Attention, *, grouped: bool = True, same: bool = True) -> bool:
    """check_batch_size_and_num_heads_dense: equal batches; equal heads, or grouped ones, or since 2.14 a single key head."""
    if not a.query.shape[0] == a.key.shape[0] == a.value.shape[0]:
        return False
    heads, key_heads, value_heads = a.query.shape[1], a.key.shape[1], a.value.shape[1]
    if a.grouped and grouped:
        return (not same or key_heads == value_heads) and heads % key_heads == 0 and heads % value_heads == 0
    return heads == key_heads == value_heads or (device.version >= (2, 14) and key_heads == value_heads == 1)


def _heads_fit_efficient(device: Device, a: Attention) -> bool:
    """Its kernels read grouped heads since 2.14 (q_heads_per_kv in mem_eff_attention/kernel_forward.h)."""
    return _heads_fit(device, a, grouped=device.version >= (2, 14))


def _unit_stride(singleton: bool) -> Callable[[Device, Attention], bool]:
    """check_last_dim_stride_equals_1_dense"""

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
    """check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120"""
    consumer = (8, 6) <= _capability(device) <= (8, 9) or (12, 0) <= _capability(device) <= (12, 1)
    head = a.query.shape[-1]
    return not (a.trains and consumer) or head <= 192 or (a.dropout == 0 and head > 224)


def _flash_causal(device: Device, a: Attention) -> bool:
    return not a.is_causal or a.query.shape[-2] == a.key.shape[-2]


def _alignment(device: Device, a: Attention) -> int:
    """minimum_gemm_alignment: 128 bits where tensor cores work."""
    capability, half = _capability(device), a.query.dtype in _HALVES
    least = 4 if capability >= (8, 0) else 1
    tensor_cores = capability >= (8, 0) or (capability >= (7, 0) and half)
    return max(least, 8 if half else 4) if tensor_cores else least


def _efficient_heads(device: Device, a: Attention) -> bool:
    query, key, value = a.heads
    multiple = _alignment(device, a)
    return query == key and query > 0 and value > 0 and not query % multiple and not value % multiple


def _efficient_offsets(device: Device, a: Attention) -> bool:
    """check_data_ptr_alignment_mem_efficient, since 2.14."""
    if device.version < (2, 14) or _capability(device) < (8, 0):
        return True
    multiple = _alignment(device, a)
    return not any(t.storage_offset() % multiple for t in (a.query, a.key, a.value))


def _efficient_dtype(device: Device, a: Attention) -> bool:
    brain = (torch.bfloat16,) if _capability(device) >= (8, 0) else ()
    return _same_dtype(a, (torch.float16, torch.float32, *brain))


def _cudnn_wide(device: Device) -> bool:
    """Head dimensions up to 256: cuDNN newer than 9.22 with frontend 1.24, which come with 2.15."""
    capability = _capability(device)
    return device.version >= (2, 15) and (capability == (9, 0) or capability[0] == 10)


def _cudnn_heads(device: Device, a: Attention) -> bool:
    """check_cudnn_tensor_shapes and check_cudnn_d256_bprop_head_dim"""
    query, _, value = a.heads
    capability = _capability(device)
    if query % 8 or value % 8:
        return False
    if _cudnn_wide(device):
        trains = max(query, value) <= 128 or (query, value) in ((192, 128), (256, 256))
        return max(query, value) <= 256 and (trains or not a.trains)
    datacenter = capability == (9, 0) or capability[0] == 10
    return max(query, value) <= 128 or (datacenter and (query, value) == (192, 128))


def _cudnn_rows(device: Device, a: Attention) -> bool:
    return a.key.shape[-2] != 1 and not (a.dropout and a.query.shape[-2] == 1)


def _cudnn_mask(device: Device, a: Attention) -> bool:
    """check_attn_mask_shape: [queries, keys] or [batch, heads, queries, keys], each perhaps 1, and without gradient."""
    if a.mask is None:
        return True
    if a.mask.requires_grad or a.mask.dim() not in (2, 4):
        return False
    wanted = (*a.query.shape[:2], a.query.shape[-2], a.key.shape[-2])[-a.mask.dim() :]
    return all(size in (1, whole) for size, whole in zip(a.mask.shape, wanted, strict=True))


_SHAPES: tuple[Condition, ...] = (
    ("query, key and value need four dimensions", _is_dense),
    ("there are no queries or keys", _has_rows),
)

_NO_KERNELS = "this version has none for the capability"

# One line per condition, in the order of the functions that sdp_utils.cpp names.
CONDITIONS: dict[str, tuple[Condition, ...]] = {
    "flash": (
        *_SHAPES,
        ("it takes no mask", lambda device, a: a.mask is None),
        ("it needs one head dim of at most 256", _flash_heads),
        ("it needs capability 8.0 to 12.1", _within((8, 0), (12, 1))),
        (_NO_KERNELS, _has_kernels),
        ("its backward pass has no kernel for this head dim here", _flash_trains),
        ("causal attention needs as many queries as keys", _flash_causal),
        ("it needs float16 or bfloat16", _is_half),
        ("batch or heads are above 65,535", _grid_fits),
        ("batches or heads do not match", _heads_fit),
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
        ("dropout is no multiple of 1/16", lambda device, a: a.dropout * 16 == math.floor(a.dropout * 16)),
        ("the last dimension is strided", _unit_stride(singleton=True)),
        ("batch or heads are above 65,535", _grid_fits),
        ("batches or heads do not match", lambda device, a: _heads_fit(device, a, same=False)),
        ("it has no kernel for these head dims", _cudnn_heads),
        ("it needs more than one key", _cudnn_rows),
    ),
    "math": (),
}


def refusal(backend: str, device: Device, a: Attention) -> str | None:
    """Why the backend cannot be used, or None where it can."""
    return next((why for why, holds in CONDITIONS[backend] if not holds(device, a)), None)


def order(device: Device) -> tuple[str, ...]:
    """The backends in the order in which CUDA asks them (priority_order, check_prefer_cudnn_attention): cuDNN first on
    capabilities 9 and 10, for the cuDNN (9.19 and newer) and CUDA (13) that come with 2.11 and newer.

    In 2.6 cuDNN comes after the math path (Context.h, sdp_priority_order), which takes everything; it is first in 2.9 (pull request
    162073), but not in 2.10, which asks for a newer cuDNN than comes with it."""
    prefers = device.version == (2, 9) or device.version >= (2, 11)
    first = ("cudnn",) if prefers and _capability(device)[0] in (9, 10) else ()
    return (*first, "flash", "efficient", "math")


def choose(device: Device, a: Attention) -> str:
    """The name of the backend that CUDA would choose: "cudnn", "flash", "efficient" or "math"."""
    return next(backend for backend in order(device) if refusal(backend, device, a) is None)


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """convert_boolean_attn_mask: a boolean mask becomes one to add, minus infinity where False."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero, infinity = (torch.full((), v, dtype=dtype, device=mask.device) for v in (0.0, -math.inf))
    return torch.where(mask, zero, infinity)


def _flash(a: Attention) -> Tensor:
    head = a.query.shape[-1]
    scale = a.scale if a.scale is not None else 1 / math.sqrt(head)
    padding = -head % 8  # pad_last_dim<8>
    q, k, v = (F.pad(t, (0, padding)) if padding else t for t in (a.query, a.key, a.value))
    out = _aten._scaled_dot_product_flash_attention.default(q, k, v, a.dropout, a.is_causal, False, scale=scale)[0]
    return out[..., :head] if padding else out


def _efficient(a: Attention) -> Tensor:
    mask = _additive(a.mask, a.query.dtype)
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
    return _aten._scaled_dot_product_cudnn_attention.default(
        a.query,
        a.key,
        a.value,
        _additive(a.mask, a.query.dtype),
        a.trains,
        a.dropout,
        a.is_causal,
        False,
        scale=a.scale,
    )[0]


def _math(a: Attention) -> Tensor:
    """attention.cpp, _scaled_dot_product_attention_math: halves are computed in float32, the mask is added in place; a boolean one
    was made one of the query's dtype before."""
    dtype = a.query.dtype
    query, key, value = (t.float() if dtype in _HALVES else t for t in (a.query, a.key, a.value))
    half_scale = math.sqrt(a.scale if a.scale is not None else 1 / math.sqrt(query.shape[-1]))
    scaled = query * half_scale
    mask = _additive(a.mask, dtype)
    if a.is_causal:
        lower = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = _additive(lower, scaled.dtype)
    if a.grouped:  # pre_process_group_query_attention_input
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    weights = torch.matmul(scaled, key.transpose(-2, -1) * half_scale)
    if mask is not None:
        weights.add_(mask)
    weights = torch._safe_softmax(weights, -1)
    if a.dropout > 0:
        weights = torch.dropout(weights, a.dropout, True)
    output = torch.matmul(weights, value).to(dtype)
    weights.to(dtype)  # its second result, which nobody takes
    return output


_BACKENDS = {"cudnn": _cudnn, "flash": _flash, "efficient": _efficient, "math": _math}


def _with_batch(a: Attention) -> Attention:
    """normalize_unbatched_input: a batch of one before query, key and value of three dimensions."""
    mask = a.mask
    while mask is not None and mask.dim() < 4:
        mask = mask.unsqueeze(0)
    query, key, value = (t.unsqueeze(0) for t in (a.query, a.key, a.value))
    return Attention(query=query, key=key, value=value, mask=mask, dropout=a.dropout, is_causal=a.is_causal,
                     scale=a.scale, grouped=a.grouped)  # fmt: skip


def _because(device: Device, a: Attention, backend: str) -> str:
    """What was asked, and why the backends before this one were passed over."""
    mask = "no mask" if a.mask is None else "mask"
    facts = [str(a.query.dtype)[6:], mask, f"head dim {a.query.shape[-1]}"]
    passed = [f"not {other}: {refusal(other, device, a)}" for other in order(device)[: order(device).index(backend)]]
    return "; ".join([", ".join(facts), *passed])


def on_cuda(device, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """aten.scaled_dot_product_attention as CUDA runs it; the choice is noted for the report."""
    check_attention(query, key, value, attn_mask)
    asked = Attention(query=query, key=key, value=value, mask=attn_mask, dropout=dropout_p, is_causal=is_causal,
                      scale=scale, grouped=enable_gqa)  # fmt: skip
    unbatched = device.version >= (2, 14) and query.dim() == key.dim() == value.dim() == 3
    question = _with_batch(asked) if unbatched else asked
    backend = choose(device, question)
    device.note_choice("attention", backend, _because(device, question, backend))
    if unbatched and backend != "math":
        return _BACKENDS[backend](question).squeeze(0)
    return _BACKENDS[backend](asked)


def _seeds_on_host(args: tuple, out: tuple) -> tuple:
    """_scaled_dot_product_efficient_attention: (output, log sums, seed, offset), the last two on the host outside of graph
    capture (Note [Seed and Offset Device] in cuda/attention.cu)."""
    return (*out[:2], *(torch.empty((), dtype=t.dtype, device="cpu") for t in out[2:]))


def _seeds_on_host_with_dropout(args: tuple, out: tuple) -> tuple:
    """The same since 2.15: without dropout they stay on the device."""
    return _seeds_on_host(args, out) if len(args) > 5 and args[5] else out


def _log_sums_if_asked(args: tuple, out: tuple) -> tuple:
    """_scaled_dot_product_cudnn_attention(query, key, value, bias, compute_log_sumexp, ..): (output, log sums, ..), which are there
    in training alone (cuda/attention.cu, _cudnn_attention_forward); the meta kernel always has them."""
    return out if len(args) > 4 and args[4] else (out[0], torch.empty(0, device=out[1].device), *out[2:])


def _flash_seeds_on_host(args: tuple, out: tuple) -> tuple:
    """_scaled_dot_product_flash_attention in 2.6: its seed and offset, the seventh and eighth result, are on the host
    (flash_attn/flash_api.cpp, mha_fwd), where later versions keep three numbers on the device."""
    seeds = (torch.empty((), dtype=torch.int64, device="cpu") for _ in range(2))
    return (*out[:6], *seeds, *out[8:])


def _gradients_like_inputs(args: tuple, out: tuple) -> tuple:
    """The gradients of query, key and value [batch, heads, rows, head_dim] in their own shapes, stored row by row: the meta kernels
    of PyTorch before 2.14 give those of grouped keys the query's heads."""
    return (*(_like_input(gradient, input) for gradient, input in zip(out[:3], args[1:4], strict=True)), *out[3:])


def _like_input(gradient: Tensor | None, input: Tensor) -> Tensor | None:
    if gradient is None or gradient.shape == input.shape:
        return gradient
    batch, heads, rows, head = input.shape
    return torch.empty(batch, rows, heads, head, dtype=gradient.dtype, device=gradient.device).transpose(1, 2)


def results_on_cuda(version: Version) -> dict[Any, Callable[[tuple, Any], Any]]:
    """What mends the results of attention's meta kernels, by PyTorch's version."""
    seeds = _seeds_on_host_with_dropout if version >= (2, 15) else _seeds_on_host
    flash = {_aten._scaled_dot_product_flash_attention.default: _flash_seeds_on_host}
    return {
        **(flash if version_followed(version) < (2, 11) else {}),
        _aten._scaled_dot_product_efficient_attention.default: seeds,
        _aten._scaled_dot_product_efficient_attention_backward.default: _gradients_like_inputs,
        _aten._scaled_dot_product_cudnn_attention.default: _log_sums_if_asked,
    }


def on_cpu(device, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """aten.scaled_dot_product_attention as the CPU runs it (sdp_utils_cpp.cpp, use_flash_attention_cpp)."""
    check_attention(query, key, value, attn_mask)
    question = Attention(query=query, key=key, value=value, mask=attn_mask, dropout=dropout_p, is_causal=is_causal,
                         scale=scale, grouped=enable_gqa)  # fmt: skip
    strides = all(t.stride(-1) == 1 for t in (query, key, value))
    heads = query.shape[-1] == key.shape[-1] == value.shape[-1]
    trainable_mask = attn_mask is not None and attn_mask.requires_grad
    shapes = _is_dense(device, question) and _has_rows(device, question) and _heads_fit(device, question)
    why = f"{str(query.dtype)[6:]}, head dim {query.shape[-1]}"
    if dropout_p == 0 and shapes and heads and strides and not trainable_mask:
        device.note_choice("attention", "flash for CPU", why)
        return _aten._scaled_dot_product_flash_attention_for_cpu.default(
            query, key, value, dropout_p, is_causal, attn_mask=_additive(attn_mask, query.dtype), scale=scale
        )[0]
    device.note_choice("attention", "math", why)
    return _math(question)


def on_mps(device, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """aten.scaled_dot_product_attention on MPS: the math path (its fused kernel serves inference only)."""
    check_attention(query, key, value, attn_mask)
    question = Attention(query=query, key=key, value=value, mask=attn_mask, dropout=dropout_p, is_causal=is_causal,
                         scale=scale, grouped=enable_gqa)  # fmt: skip
    device.note_choice("attention", "math", f"{str(query.dtype)[6:]}, head dim {query.shape[-1]}")
    return _math(question)

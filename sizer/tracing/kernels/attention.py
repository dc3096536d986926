"""Scaled dot product attention: the backend that PyTorch would choose, in its order, by its conditions.

Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, sdp_utils_cpp.{h,cpp} and attention.cpp, as of PyTorch 2.11 to
2.15. Shapes: query [batch, heads, queries, head_dim], key and value [batch, key_heads, keys, head_dim].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from sizer.tracing.device import Device

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


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


def _fused_shapes(a: Attention) -> bool:
    """The conditions that every fused kernel shares: four dimensions, matching batches and heads, nothing empty."""
    q, k, v = a.query, a.key, a.value
    if not (q.dim() == k.dim() == v.dim() == 4) or not (q.shape[0] == k.shape[0] == v.shape[0]):
        return False
    if 0 in (q.shape[-2], k.shape[-2]):
        return False
    heads, key_heads, value_heads = q.shape[1], k.shape[1], v.shape[1]
    if a.grouped:
        return key_heads == value_heads and heads % key_heads == 0
    return heads == key_heads == value_heads


def _unit_stride(a: Attention, singleton: bool) -> bool:
    ok = all(t.stride(-1) == 1 for t in (a.query, a.key, a.value)) or (singleton and a.query.shape[-1] == 1)
    return ok and (a.mask is None or a.mask.stride(-1) == 1)


def _same_dtype(a: Attention, allowed: tuple[torch.dtype, ...]) -> bool:
    return a.query.dtype == a.key.dtype == a.value.dtype and a.query.dtype in allowed


def can_use_flash(device: Device, a: Attention) -> bool:
    """sdp_utils.cpp, can_use_flash_attention."""
    capability = device.capability or (0, 0)
    head = a.query.shape[-1]
    if a.mask is not None or not (8, 0) <= capability <= (12, 1) or not _fused_shapes(a):
        return False
    if not (head == a.key.shape[-1] == a.value.shape[-1]) or head > 256 or not _same_dtype(a, _HALVES):
        return False
    if a.is_causal and a.query.shape[-2] != a.key.shape[-2]:
        return False
    consumer = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    if a.trains and consumer and not (head <= 192 or (a.dropout == 0 and head > 224)):
        return False
    return _unit_stride(a, singleton=True)


def can_use_efficient(device: Device, a: Attention) -> bool:
    """sdp_utils.cpp, can_use_mem_efficient_attention."""
    capability = device.capability or (0, 0)
    if not (5, 0) <= capability <= (12, 1) or not _fused_shapes(a):
        return False
    half = a.query.dtype in _HALVES
    alignment = 4 if capability >= (8, 0) else 1
    if capability >= (8, 0) or (capability >= (7, 0) and half):  # minimum_gemm_alignment: 128 bits for tensor cores
        alignment = max(alignment, 8 if half else 4)
    if a.query.shape[-1] != a.key.shape[-1] or a.query.shape[-1] % alignment or a.value.shape[-1] % alignment:
        return False
    if capability >= (8, 0) and any(t.storage_offset() % alignment for t in (a.query, a.key, a.value)):
        return False
    allowed = (torch.float16, torch.float32, *((torch.bfloat16,) if capability >= (8, 0) else ()))
    return _unit_stride(a, singleton=False) and _same_dtype(a, allowed)


def can_use_cudnn(device: Device, a: Attention) -> bool:
    """sdp_utils.cpp, can_use_cudnn_attention, for the cuDNN that ships with the supported versions (9.16 and newer)."""
    capability = device.capability or (0, 0)
    if not (8, 0) <= capability <= (12, 1) or not _fused_shapes(a) or not _same_dtype(a, _HALVES):
        return False
    if a.dropout * 16 != math.floor(a.dropout * 16):
        return False
    qk, v = a.query.shape[-1], a.value.shape[-1]
    if qk % 8 or v % 8 or not (max(qk, v) <= 128 or (capability[0] in (9, 10) and (qk, v) == (192, 128))):
        return False
    keys, queries = a.key.shape[-2], a.query.shape[-2]
    return keys != 1 and not (a.dropout and queries == 1) and _unit_stride(a, singleton=True)


def choose(device: Device, a: Attention) -> str:
    """The name of the backend that CUDA would choose: "cudnn", "flash", "efficient" or "math"."""
    order = [("flash", can_use_flash), ("efficient", can_use_efficient)]
    if device.capability is not None and device.capability[0] in (9, 10):  # check_prefer_cudnn_attention
        order.insert(0, ("cudnn", can_use_cudnn))
    return next((name for name, usable in order if usable(device, a)), "math")


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
    if mask is not None:  # preprocess_mask: rows padded to 16 bytes, then expanded
        keys = mask.shape[-1]
        if keys % 8:
            mask = F.pad(mask, (0, -keys % 8))[..., :keys]
        mask = mask.expand(a.query.shape[0], a.query.shape[1], a.query.shape[-2], a.key.shape[-2])
    q, k, v = a.query, a.key, a.value
    if k.shape[1] != q.shape[1]:  # grouped heads are expanded views for this kernel
        q, k, v = q, k.repeat_interleave(q.shape[1] // k.shape[1], 1), v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return _aten._scaled_dot_product_efficient_attention.default(
        q, k, v, mask, a.trains, a.dropout, a.is_causal, scale=a.scale
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
    """attention.cpp, _scaled_dot_product_attention_math: halves are computed in float32, the mask is added in place."""
    dtype = a.query.dtype
    query, key, value = (t.float() if dtype in _HALVES else t for t in (a.query, a.key, a.value))
    half_scale = math.sqrt(a.scale if a.scale is not None else 1 / math.sqrt(query.shape[-1]))
    scaled = query * half_scale
    mask = _additive(a.mask, scaled.dtype)
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
    return torch.matmul(weights, value).to(dtype)


_BACKENDS = {"cudnn": _cudnn, "flash": _flash, "efficient": _efficient, "math": _math}


def on_cuda(device, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """aten.scaled_dot_product_attention as CUDA runs it; the choice is noted for the report."""
    question = Attention(query=query, key=key, value=value, mask=attn_mask, dropout=dropout_p, is_causal=is_causal,
                         scale=scale, grouped=enable_gqa)  # fmt: skip
    backend = choose(device, question)
    mask = "no mask" if attn_mask is None else "mask"
    device.note_choice(f"attention: {backend} ({str(query.dtype)[6:]}, {mask}, head dim {query.shape[-1]})")
    return _BACKENDS[backend](question)


def on_cpu(device, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """aten.scaled_dot_product_attention as the CPU runs it (sdp_utils_cpp.cpp, use_flash_attention_cpp)."""
    question = Attention(query=query, key=key, value=value, mask=attn_mask, dropout=dropout_p, is_causal=is_causal,
                         scale=scale, grouped=enable_gqa)  # fmt: skip
    strides = all(t.stride(-1) == 1 for t in (query, key, value))
    heads = query.shape[-1] == key.shape[-1] == value.shape[-1]
    trainable_mask = attn_mask is not None and attn_mask.requires_grad
    if dropout_p == 0 and _fused_shapes(question) and heads and strides and not trainable_mask:
        device.note_choice(f"attention: flash for CPU ({str(query.dtype)[6:]}, head dim {query.shape[-1]})")
        return _aten._scaled_dot_product_flash_attention_for_cpu.default(
            query, key, value, dropout_p, is_causal, attn_mask=_additive(attn_mask, query.dtype), scale=scale
        )[0]
    device.note_choice(f"attention: math ({str(query.dtype)[6:]}, head dim {query.shape[-1]})")
    return _math(question)


def on_mps(device, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """aten.scaled_dot_product_attention on MPS: the math path (its fused kernel serves inference only)."""
    question = Attention(query=query, key=key, value=value, mask=attn_mask, dropout=dropout_p, is_causal=is_causal,
                         scale=scale, grouped=enable_gqa)  # fmt: skip
    device.note_choice(f"attention: math ({str(query.dtype)[6:]}, head dim {query.shape[-1]})")
    return _math(question)

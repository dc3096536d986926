"""Scaled dot product attention: the call, and the math path of every device.

Source: aten/src/ATen/native/transformers/sdp_utils_cpp.h and attention.cpp, PyTorch 2.6 and 2.11 to 2.15. Shapes: query [batch,
heads, queries, head_dim], key and value [batch, key_heads, keys, head_dim].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps

import torch
from torch import Tensor

from sizer.tracing.device import Device
from sizer.tracing.meta.dtypes import check_attention

NO_KERNEL = (
    "No available kernel. Aborting execution."  # aten/src/ATen/native/transformers/sdp_utils.cpp, select_sdp_backend
)

_HALVES = (torch.float16, torch.bfloat16)
_SWITCHES = {
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    "math": torch.backends.cuda.math_sdp_enabled,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Call with the arguments of sdp_params."""

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
        """Return whether a backward pass will follow (input_requires_grad, should_compute_logsumexp)."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.query, self.key, self.value))

    @property
    def heads(self) -> tuple[int, int, int]:
        """The head dimensions of query, key and value."""
        return self.query.shape[-1], self.key.shape[-1], self.value.shape[-1]


def attention_kernel(run: Callable[[Device, Attention], Tensor]) -> Callable[..., Tensor]:
    """Return a kernel for aten.scaled_dot_product_attention, which checks its arguments and passes them on as one value."""

    @wraps(run)
    def kernel(
        device, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
    ):
        check_attention(query, key, value, attn_mask)
        return run(device, Attention(query=query, key=key, value=value, mask=attn_mask, dropout=dropout_p,
                                     is_causal=is_causal, scale=scale, grouped=enable_gqa))  # fmt: skip

    return kernel


def is_switched_on(backend: str) -> bool:
    """Return whether user code has enabled a backend (check_runtime_disabled_*).

    The switches are `sdpa_kernel` and `torch.backends.cuda.enable_*_sdp`.
    """
    return _SWITCHES[backend]()


def is_dense(device: Device, a: Attention) -> bool:
    return a.query.dim() == a.key.dim() == a.value.dim() == 4


def has_rows(device: Device, a: Attention) -> bool:
    return 0 not in (a.query.shape[-2], a.key.shape[-2])


def heads_fit(device: Device, a: Attention, *, grouped: bool = True, same: bool = True) -> bool:
    """Return whether check_batch_size_and_num_heads_dense passes.

    Batches must be equal. Heads must be equal or grouped; since 2.14 a single key head also passes.
    """
    if not a.query.shape[0] == a.key.shape[0] == a.value.shape[0]:
        return False
    heads, key_heads, value_heads = a.query.shape[1], a.key.shape[1], a.value.shape[1]
    if a.grouped and grouped:
        return (not same or key_heads == value_heads) and heads % key_heads == 0 and heads % value_heads == 0
    return heads == key_heads == value_heads or (device.version >= (2, 14) and key_heads == value_heads == 1)


def additive_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return an additive mask, minus infinity where a boolean mask is False (convert_boolean_attn_mask)."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero, infinity = (torch.full((), v, dtype=dtype, device=mask.device) for v in (0.0, -math.inf))
    return torch.where(mask, zero, infinity)


def math_attention(a: Attention) -> Tensor:
    """Run attention as in attention.cpp, _scaled_dot_product_attention_math.

    Halves are computed in float32. The mask is added in place. A boolean mask is first converted to the query's dtype.
    """
    dtype = a.query.dtype
    query, key, value = (t.float() if dtype in _HALVES else t for t in (a.query, a.key, a.value))
    half_scale = math.sqrt(a.scale if a.scale is not None else 1 / math.sqrt(query.shape[-1]))
    scaled = query * half_scale
    mask = additive_mask(a.mask, dtype)
    if a.is_causal:
        lower = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = additive_mask(lower, scaled.dtype)
        del lower
    if a.grouped and not query.shape[-3] == key.shape[-3] == value.shape[-3]:  # pre_process_group_query_attention_input
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    weights = torch.matmul(scaled, key.transpose(-2, -1) * half_scale)
    if mask is not None:
        weights.add_(mask)
    weights = torch._safe_softmax(weights, -1)
    if a.dropout > 0:
        weights = torch.dropout(weights, a.dropout, True)
    second = weights.to(dtype)  # of the returned pair; compilers evaluate it first, and it stays alive to the end
    first = torch.matmul(weights, value).to(dtype)
    del second
    return first

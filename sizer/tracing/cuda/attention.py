"""Scaled dot product attention on CUDA: the backends' calls, and their results where meta kernels return others.

Source: aten/src/ATen/native/transformers/attention.cpp and cuda/attention.cu, PyTorch 2.6 and 2.11 to 2.15. Which backend is
chosen is in `attention_backend`, what they hold inside in `attention_workspaces`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sizer.base.versions import Version, version_followed
from sizer.tracing.cuda.attention_backend import choose, reason
from sizer.tracing.device import Device
from sizer.tracing.meta.attention import Attention, additive_mask, attention_kernel, math_attention
from sizer.tracing.meta.dtypes import check_bias
from sizer.tracing.tables import Results

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
    """normalize_unbatched_input: a batch of one before query, key and value of three dimensions."""
    mask = a.mask
    while mask is not None and mask.dim() < 4:
        mask = mask.unsqueeze(0)
    query, key, value = (t.unsqueeze(0) for t in (a.query, a.key, a.value))
    return replace(a, query=query, key=key, value=value, mask=mask)


@attention_kernel
def scaled_dot_product_attention(device: Device, given: Attention) -> Tensor:
    """aten.scaled_dot_product_attention as CUDA runs it; the choice is noted for the report."""
    unbatched = device.version >= (2, 14) and given.query.dim() == given.key.dim() == given.value.dim() == 3
    batched = _with_batch(given) if unbatched else given
    backend = choose(device, batched)
    device.note_choice("attention", backend, reason(device, batched, backend))
    if unbatched and backend != "math":
        return _BACKENDS[backend](batched).squeeze(0)
    return _BACKENDS[backend](given)


def _seeds_on_host(args: tuple, out: tuple) -> tuple:
    """_scaled_dot_product_efficient_attention: (output, log sums, seed, offset), the last two on the host outside of graph
    capture (Note [Seed and Offset Device] in cuda/attention.cu)."""
    if torch.cuda.is_current_stream_capturing():
        return out
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


def results(version: Version) -> Results:
    """Corrections of attention's meta kernels, by PyTorch's version."""
    seeds = _seeds_on_host_with_dropout if version >= (2, 15) else _seeds_on_host
    flash = {_aten._scaled_dot_product_flash_attention.default: _flash_seeds_on_host}
    return {
        **(flash if version_followed(version) < (2, 11) else {}),
        _aten._scaled_dot_product_efficient_attention.default: seeds,
        _aten._scaled_dot_product_efficient_attention_backward.default: _gradients_like_inputs,
        _aten._scaled_dot_product_cudnn_attention.default: _log_sums_if_asked,
    }


KERNELS = {_aten.scaled_dot_product_attention.default: scaled_dot_product_attention}

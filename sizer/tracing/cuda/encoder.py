"""Fast path of nn.MultiheadAttention and nn.TransformerEncoderLayer in evaluation, which saves nothing for backward.

Source: torch/nn/modules/activation.py and transformer.py (conditions of the fast path),
aten/src/ATen/native/transformers/cuda/attention.cu (native_multi_head_attention_cuda, the same in 2.6) and transformer.cpp
(transformer_encoder_layer_forward), PyTorch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from sizer.tracing.cuda.attention import choose
from sizer.tracing.device import Device
from sizer.tracing.meta.attention import Attention
from sizer.tracing.values.libraries import modes_unseen

_aten = torch.ops.aten


@contextmanager
def fast_path_on(kind: str) -> Iterator[None]:
    """Open the fast path for tensors on meta within the context, if they represent CUDA tensors.

    The modules compare the device's type with a short list that includes the name of PyTorch's spare backend. They also check
    for tensors of other classes, and would count the mode of a trace as one. nn.TransformerEncoder continues without nested
    tensors, whatever its padding mask.
    """
    if kind != "cuda":
        yield
        return
    with (
        mock.patch.object(torch.utils.backend_registration, "_privateuse1_backend_name", "meta"),
        mock.patch.object(torch, "_nested_tensor_from_mask_left_aligned", lambda *args: False),
        modes_unseen(),
    ):
        yield


def multi_head_attention(device: Device, query, key, value, embed_dim, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias,
                         mask=None, need_weights=True, average_attn_weights=True, mask_type=None):  # fmt: skip
    """Run aten._native_multi_head_attention with the same tensor as query, key and value.

    Returns the output [batch, tokens, embed_dim], and the weights if they are requested.
    """
    head = embed_dim // num_head
    rows = query.shape[0]

    def split(t: Tensor) -> Tensor:
        return t.view(rows, -1, num_head, head).transpose(1, 2)

    fused = query is key and key is value and head % 8 == 0 and not need_weights and mask is None
    if fused:
        q = split(query)
        call = Attention(query=q, key=q, value=q, mask=None, dropout=0.0, is_causal=False, scale=None, grouped=False)
        fused = choose(device, call) in ("flash", "efficient", "cudnn")
    device.note_choice(
        "multi-head attention",
        "fast path",
        f"evaluation, {str(query.dtype)[6:]}, {'fused' if fused else 'with its scores'}",
    )
    if fused:
        q, k, v = map(split, _aten.linear.default(query, qkv_weight, qkv_bias).chunk(3, -1))
        out = _aten.scaled_dot_product_attention.default(q, k, v).transpose(1, 2).reshape(rows, -1, embed_dim)
        return _aten.linear.default(out, proj_weight, proj_bias), query.new_empty(0)
    return _with_scores(query, num_head, head, qkv_weight, proj_weight, proj_bias, need_weights, average_attn_weights)


def _with_scores(query, heads, head, qkv_weight, proj_weight, proj_bias, need_weights, average):
    """Return the result of the remaining path, which materializes the scores [batch, heads, tokens, tokens]."""
    rows, tokens, width = query.shape
    projected = torch.matmul(query, qkv_weight.t())
    q, k, v = projected.new_empty(3, rows, heads, tokens, head).unbind(0)  # _transform_bias_rescale_qkv
    del projected

    def pairs(t: Tensor) -> Tensor:
        return t.reshape(rows * heads, tokens, head)

    scores = torch.bmm(pairs(q), pairs(k).transpose(1, 2))
    scores = _aten._softmax.default(scores.view(rows, heads, tokens, tokens), -1, False)
    _aten.bmm.out(scores.view(rows * heads, tokens, tokens), pairs(v), out=pairs(q))
    weights = scores if need_weights else query.new_empty(0)
    del scores
    context = q.transpose(1, 2).reshape(rows * tokens, width)
    out = _aten.addmm.default(proj_bias, context, proj_weight.t()).view(rows, tokens, -1)
    if need_weights and average:
        weights = weights.sum(1).div_(heads)
    return out, weights


def encoder_layer(device: Device, src, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, use_gelu, norm_first,
                  eps, norm_weight_1, norm_bias_1, norm_weight_2, norm_bias_2, ffn_weight_1, ffn_bias_1, ffn_weight_2,
                  ffn_bias_2, mask=None, mask_type=None) -> Tensor:  # fmt: skip
    """Run aten._transformer_encoder_layer_fwd (transformer.cpp).

    Attention, residual in place, feed-forward with a fused activation, residual in place. Each of the two norms comes before or
    after its part (`norm_first`).
    """

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.layer_norm(x, (embed_dim,), weight, bias, eps)

    x = norm(src, norm_weight_1, norm_bias_1) if norm_first else src
    x = multi_head_attention(device, x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask,
                             False, True, mask_type)[0]  # fmt: skip
    x = x.add_(src)
    if not norm_first:
        x = norm(x, norm_weight_1, norm_bias_1)
    residual = x
    if norm_first:
        x = norm(x, norm_weight_2, norm_bias_2)
    rows = x.reshape(-1, embed_dim)
    hidden = _aten._addmm_activation.default(ffn_bias_1, rows, ffn_weight_1.t(), use_gelu=use_gelu)
    x = _aten.addmm.default(ffn_bias_2, hidden, ffn_weight_2.t()).view(residual.shape)
    del hidden, rows
    x = x.add_(residual)
    return x if norm_first else norm(x, norm_weight_2, norm_bias_2)


KERNELS = {
    _aten._native_multi_head_attention.default: multi_head_attention,
    _aten._transformer_encoder_layer_fwd.default: encoder_layer,
}

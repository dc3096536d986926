"""Results of normalization and dropout without their meta kernels, most of which are Python: see `shortcuts.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def like(tensor: Tensor) -> Tensor:
    """An empty contiguous meta tensor of the same shape and dtype."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _vector(length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(length, dtype=dtype, device="meta")


def plain_floats(*tensors: Tensor) -> bool:
    """Whether all are contiguous floating-point meta tensors."""
    return all(t.device.type == "meta" and t.dtype.is_floating_point and t.is_contiguous() for t in tensors)


def like_first(args: tuple) -> Any:
    """A tensor like the contiguous floating-point first argument; other tensors do not matter."""
    return like(args[0]) if plain_floats(args[0]) else NotImplemented


def cudnn_batch_norm(args: tuple) -> Any:
    """(output like input [N, C, ..], mean [C], inverse deviation [C], reserve [0]); in evaluation no statistics."""
    input, channels = args[0], args[0].shape[1] if args[5] else 0
    if not plain_floats(input) or args[1].dtype != torch.float32:
        return NotImplemented
    return like(input), _vector(channels), _vector(channels), _vector(0, torch.uint8)


def cudnn_batch_norm_backward(args: tuple) -> Any:
    """(gradient of input, of weight [C], of bias [C]); arguments (input, gradient, weight, ..)."""
    if not plain_floats(args[0], args[1]):
        return NotImplemented
    return like(args[0]), like(args[2]), like(args[2])


def native_batch_norm(args: tuple) -> Any:
    """(output like input [N, C, ..], mean [C], inverse deviation [C]), the statistics in float32."""
    if not plain_floats(args[0]) or args[0].dtype == torch.float64:
        return NotImplemented
    return like(args[0]), _vector(args[0].shape[1]), _vector(args[0].shape[1])


def native_batch_norm_backward(args: tuple) -> Any:
    """(gradient of input, of weight, of bias), each None where the mask does not want it."""
    grad, input, weight, wanted = args[0], args[1], args[2], args[9]
    if not plain_floats(grad, input):
        return NotImplemented
    dtype = input.dtype if weight is None else weight.dtype
    channels = [_vector(input.shape[1], dtype) if w else None for w in wanted[1:]]
    return (like(input) if wanted[0] else None, *channels)


def native_layer_norm(args: tuple) -> Any:
    """(output like input [.., N], mean [.., 1], inverse deviation [.., 1]), the statistics in float32."""
    input, normalized = args[0], len(args[1])
    if not plain_floats(input) or input.dtype == torch.float64:
        return NotImplemented
    rows = [*input.shape[: input.dim() - normalized], *[1] * normalized]
    statistics = [torch.empty(rows, dtype=torch.float32, device="meta") for _ in range(2)]
    return like(input), *statistics


def native_layer_norm_backward(args: tuple) -> Any:
    """(gradient of input, of weight, of bias), each None where the mask does not want it."""
    grad, input, weight, bias, wanted = args[0], args[1], args[5], args[6], args[7]
    if not plain_floats(grad, input):
        return NotImplemented
    return tuple(like(t) if w and t is not None else None for t, w in zip((input, weight, bias), wanted, strict=True))


def native_dropout(args: tuple) -> Any:
    """(output like input, mask of 1 byte an element)."""
    input = args[0]
    if not plain_floats(input) or not args[2]:
        return NotImplemented
    return like(input), torch.empty(input.shape, dtype=torch.bool, device="meta")


SHORTCUTS = {
    _aten.cudnn_batch_norm.default: cudnn_batch_norm,
    _aten.cudnn_batch_norm_backward.default: cudnn_batch_norm_backward,
    _aten.native_batch_norm.default: native_batch_norm,
    _aten._native_batch_norm_legit.default: native_batch_norm,
    _aten.native_batch_norm_backward.default: native_batch_norm_backward,
    _aten.native_layer_norm.default: native_layer_norm,
    _aten.native_layer_norm_backward.default: native_layer_norm_backward,
    _aten.native_dropout.default: native_dropout,
    _aten.native_dropout_backward.default: like_first,
}

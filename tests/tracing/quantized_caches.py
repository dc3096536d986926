"""A quantized cache without a package: transformers' own QuantizedLayer, with 4 bits by operators of PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from transformers.cache_utils import QuantizedLayer

GROUP, RESIDUAL = 64, 20  # weights that share a scale; tokens after which all is quantized anew


class FourBitLayer(QuantizedLayer):
    """Takes the place of QuantoQuantizedLayer."""

    __module__ = QuantizedLayer.__module__  # where a cache's tensors are looked for

    def __init__(self, *told: int) -> None:  # transformers 5.17 names all its defaults
        super().__init__(q_group_size=GROUP, residual_length=RESIDUAL)

    def _quantize(self, tensor: Tensor, axis: int) -> tuple[Tensor, Tensor, Tensor, torch.Size]:
        groups = tensor.reshape(-1, GROUP)
        least = groups.amin(dim=1, keepdim=True)
        scale = (groups.amax(dim=1, keepdim=True) - least) / 15
        codes = ((groups - least) / scale).round().to(torch.uint8)
        return codes[:, ::2] | codes[:, 1::2] << 4, scale, least, tensor.shape

    def _dequantize(self, quantized: tuple[Tensor, Tensor, Tensor, torch.Size]) -> Tensor:
        packed, scale, least, shape = quantized
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).reshape(-1, GROUP)
        return (codes * scale + least).reshape(shape)


@contextmanager
def four_bit_caches() -> Iterator[None]:
    """Within the context `cache=quantized` is held by FourBitLayer."""
    with mock.patch("transformers.cache_utils.QuantoQuantizedLayer", FourBitLayer):
        yield

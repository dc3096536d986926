"""Layers of transformers' caches that lie on the host but for the one that is at work, on meta tensors.

transformers/cache_utils.py (Cache.update, CacheLayerMixin.offload and .prefetch, 5.23) copies the layer that was at work to the
host, and the next one to the device, on a second stream. A copy on the host is a meta tensor that no trace has seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from transformers.cache_utils import CacheLayerMixin


def is_on_host(tensor: Tensor) -> bool:
    """Whether a tensor of a cache is on the host."""
    return getattr(tensor, "is_on_host", False)


@contextmanager
def layers_offloaded() -> Iterator[None]:
    """Within the context the layers of an offloaded cache go to the host and come back."""
    with mock.patch.multiple(CacheLayerMixin, offload=_offload, prefetch=_prefetch):
        yield


def _offload(layer: CacheLayerMixin) -> None:
    if layer.is_initialized:
        layer.keys, layer.values = _to_host(layer.keys), _to_host(layer.values)


def _prefetch(layer: CacheLayerMixin) -> None:
    if layer.is_initialized and is_on_host(layer.keys):
        layer.keys = torch.empty_like(layer.keys)
        layer.values = torch.empty_like(layer.values)


def _to_host(tensor: Tensor) -> Tensor:
    with _disable_current_modes():
        out = torch.empty_like(tensor)
    out.is_on_host = True
    return out

"""Products of FP8 weights in blocks, by transformers' kernels: each makes its result and nothing beside it.

The kernels (kernels-community/finegrained-fp8: `matmul_2d`, `matmul_batched`, `matmul_grouped`) are fetched from the hub where a
GPU is. They quantise the activations as they read them, in the same kernel (transformers/integrations/finegrained_fp8.py, 5.23).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

_MODULE = "transformers.integrations.finegrained_fp8"


def _product(
    input: Tensor, weight: Tensor, scales: Tensor, block_size: Any = None, dtype: Any = None, **others: Any
) -> Tensor:
    """`input [.., K]` by `weight [.., N, K]`: [.., N]."""
    return torch.empty((*input.shape[:-1], weight.shape[-2]), dtype=dtype or input.dtype, device=input.device)


@contextmanager
def fp8_products(device_kind: str) -> Iterator[None]:
    """Within the context FP8 weights are multiplied on meta tensors as on CUDA, where transformers has loaded its FP8 layers."""
    module = sys.modules.get(_MODULE)
    if device_kind != "cuda" or module is None:
        yield
        return
    kernels = module.FineGrainedFP8(matmul=_product, batched_matmul=_product, grouped_matmul=_product)
    with (
        mock.patch.object(module, "_FINEGRAINED_FP8", kernels),
        mock.patch.object(module, "is_deepgemm_loadable", lambda: False),
    ):
        yield

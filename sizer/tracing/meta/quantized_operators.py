"""Operators of quantised weights by other packages: optimum-quanto's own, and transformers' products of FP8 weights in blocks.

optimum-quanto's own operators: what they do in Python is traced, what it compiles for a device is done as its source has it.

Within optimum/quanto/library/ (0.2.7).

Products of FP8 weights in blocks, by transformers' kernels: each makes its result and nothing beside it.

The kernels (kernels-community/finegrained-fp8: `matmul_2d`, `matmul_batched`, `matmul_grouped`) are fetched from the hub where a
GPU is. They quantise the activations as they read them, in the same kernel (transformers/integrations/finegrained_fp8.py, 5.23).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from sizer.tracing.values.handler import Handler, HandlerContext


def _quantize_affine(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Tensor:
    """`base [..]` in groups, to bytes of `bits` each [groups, group_size]: in Python, which a mode sees as one operator
    (quantize.py)."""
    group = importlib.import_module(
        "optimum.quanto.tensor.grouped"
    ).group  # requirements.txt does not ask for the package
    given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
    base, scale, shift = given["base"], given["scale"], given["shift"]
    with recorder:
        if given["group_size"] is not None:
            base = group(base, axis=given["axis"], group_size=given["group_size"])
        data = torch.round((base + shift) / scale) if shift.is_floating_point() else torch.round(base / scale) + shift
        return torch.clamp(data, min=0, max=2 ** given["bits"] - 1).to(torch.uint8)


def _unpack(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Tensor:
    """`packed [rows, ..]` of bytes, each of several values of `bits`: [rows * values, ..]. On CUDA one kernel writes the result
    (extensions/cuda/unpack.cu, allocate_output), on the CPU there is one of the values after the other (extensions/cpp/unpack.cpp).
    """
    packed, bits = args
    with recorder:
        if recorder.device.kind != "cpu":
            return packed.new_empty((packed.shape[0] * 8 // bits, *packed.shape[1:]))
        masked = [packed & (2**bits - 1) << shift for shift in range(0, 8, bits)]
        return torch.cat([masked[0], *(one >> bits * place for place, one in enumerate(masked[1:], 1))])


HANDLERS: dict[str, Handler] = {
    "quanto.unpack.default": _unpack,
    "quanto.quantize_affine.default": _quantize_affine,
}


# ----------------------------------------------------------------------------------------------------------------- fp8


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

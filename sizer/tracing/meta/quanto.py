"""optimum-quanto's own operators: what they do in Python is traced, what it compiles for a device is done as its source has it.

Within optimum/quanto/library/ (0.2.7).
"""

from __future__ import annotations

import importlib
from typing import Any

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

"""Operators of quantised weights by packages: bitsandbytes, optimum-quanto, and transformers' blockwise FP8 products.

bitsandbytes: the package's own functions run on meta tensors, with a library that computes nothing. The installed package's
bitsandbytes/backends/<device>/ops.py (0.50) defines the allocations of each operator in Python; only the functions that it
calls are compiled. Such a file cannot be imported without a library for that device. So it runs here with a replacement of the
library, and its registered functions are kept.

optimum-quanto: Python code of its operators is traced; compiled code follows its source. Read in optimum/quanto/library/
(0.2.7).

Blockwise FP8 products by transformers' kernels: each makes its result only. The kernels (kernels-community/finegrained-fp8:
`matmul_2d`, `matmul_batched`, `matmul_grouped`) are downloaded from the hub on machines with a GPU. They quantise the
activations as they read them, in the same kernel (transformers/integrations/finegrained_fp8.py, 5.23).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from sizer.architecture.compile_later import compiled_when_called
from sizer.tracing.values.handler import Handler, HandlerContext

PACKAGE = "bitsandbytes"
# Operators of the package that a step calls.
OPERATORS = (
    "gemm_4bit", "gemv_4bit", "dequantize_4bit", "dequantize_blockwise", "quantize_4bit", "quantize_blockwise",
    "int8_linear_matmul", "int8_mm_dequant", "int8_vectorwise_quant", "int8_double_quant", "int8_mixed_scaled_mm",
    "int8_scaled_mm", "optimizer_update_32bit", "optimizer_update_8bit_blockwise",
)  # fmt: skip
OUT_OPERATORS = ("int8_linear_matmul", "dequantize_blockwise")  # with an overload "out", too

Kernels = dict[str, Callable[..., Any]]
"""Functions of the package by operator ("bitsandbytes.quantize_4bit.default")."""


class NoLibrary:
    """Replacement of the package's compiled library and its handle.

    Every function exists, computes nothing and reports no error.
    """

    def __getattr__(self, name: str) -> NoLibrary:
        made = NoLibrary()
        setattr(self, name, made)
        return made

    def __call__(self, *args: Any) -> NoLibrary:
        return self

    def __bool__(self) -> bool:
        return False


def run_backend(name: str, found: Kernels) -> ModuleType:
    """Run a backend's file ("default", "cuda", "cpu"), and add its registered functions to `found`."""
    import bitsandbytes

    def keep(operator: str, kinds: object) -> Callable[[Callable], Callable]:
        def kept(function: Callable) -> Callable:
            packet, _, overload = operator.removeprefix(f"{PACKAGE}::").partition(".")
            found[f"{PACKAGE}.{packet}.{overload or 'default'}"] = function
            return function

        return kept

    file = Path(bitsandbytes.__file__).parent / "backends" / name / "ops.py"
    spec = importlib.util.spec_from_file_location(f"{PACKAGE}.backends.{name}.on_meta", file)
    assert spec is not None and spec.loader is not None, "it is a file of Python"
    module = importlib.util.module_from_spec(spec)
    logging.getLogger(spec.name).setLevel(logging.ERROR)  # about optional packages
    with (
        compiled_when_called(),
        mock.patch(f"{PACKAGE}._ops.register_kernel", keep),
        mock.patch(f"{PACKAGE}.cextension.lib", NoLibrary()),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, create=True),
    ):
        spec.loader.exec_module(module)
    return module


def runner(kernels: Callable[[], Kernels]) -> Callable[[HandlerContext, Any, tuple, dict], Any]:
    """Return a handler that runs the package's own function for an operator, one of `kernels`."""

    def run(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
        with recorder:
            return kernels()[str(func)](*args, **kwargs)

    return run


# ------------------------------------------------------------------------------------------------- quantized operators


def _quantize_affine(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Tensor:
    """Return `base [..]` in groups as bytes of `bits` each [groups, group_size] (quantize.py).

    The package does this in Python, which a mode sees as one operator.
    """
    group = importlib.import_module(
        "optimum.quanto.tensor.grouped"
    ).group  # optional: not in requirements.txt
    given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
    base, scale, shift = given["base"], given["scale"], given["shift"]
    with recorder:
        if given["group_size"] is not None:
            base = group(base, axis=given["axis"], group_size=given["group_size"])
        data = torch.round((base + shift) / scale) if shift.is_floating_point() else torch.round(base / scale) + shift
        return torch.clamp(data, min=0, max=2 ** given["bits"] - 1).to(torch.uint8)


def _unpack(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Tensor:
    """Return the values [rows * values, ..] of `packed [rows, ..]`, bytes of several values of `bits` each.

    On CUDA one kernel writes the result (extensions/cuda/unpack.cu, allocate_output). On the CPU the values are unpacked one
    after another (extensions/cpp/unpack.cpp).
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
    """Return the product [.., N] of `input [.., K]` and `weight [.., N, K]`."""
    return torch.empty((*input.shape[:-1], weight.shape[-2]), dtype=dtype or input.dtype, device=input.device)


@contextmanager
def fp8_products(device_kind: str) -> Iterator[None]:
    """Multiply FP8 weights on meta tensors as on CUDA within the context, if transformers has loaded its FP8 layers."""
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

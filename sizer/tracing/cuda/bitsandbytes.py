"""bitsandbytes on CUDA: its own functions run on meta tensors, with a library beneath that computes nothing.

The installed package's bitsandbytes/backends/cuda/ops.py (0.50) says what each operator allocates, in Python; only what it then
calls is compiled. That file cannot be imported where its library is none for CUDA, so it is run here with a stand-in, and what it
registers is kept. One thing goes by the GPU's multiprocessors: whether a product of 4-bit weights dequantises them first, which is
a size query (sizer.memory.size_queries) of the kind GEMM_4BIT.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from sizer.catalogue.hardware import HARDWARE
from sizer.tracing.log import DeferredSize
from sizer.tracing.values.handler import Handler, HandlerContext

GEMM_4BIT = "product of 4-bit weights on CUDA"
_PACKAGE = "bitsandbytes"
# Operators of the package that a step calls: those that the CUDA backend registers, and two that it leaves to the default one.
_OPERATORS = (
    "gemm_4bit", "dequantize_4bit", "dequantize_blockwise", "quantize_4bit", "quantize_blockwise", "int8_linear_matmul",
    "int8_mm_dequant", "int8_vectorwise_quant", "int8_double_quant", "int8_mixed_scaled_mm", "int8_scaled_mm",
    "optimizer_update_32bit", "optimizer_update_8bit_blockwise",
)  # fmt: skip


class _NoLibrary:
    """Stands for the package's compiled library and its handle: every function is there, computes nothing and tells of no error."""

    def __getattr__(self, name: str) -> _NoLibrary:
        made = _NoLibrary()
        setattr(self, name, made)
        return made

    def __call__(self, *args: Any) -> _NoLibrary:
        return self

    def __bool__(self) -> bool:
        return False


@cache
def _kernels() -> tuple[dict[str, Callable[..., Any]], ModuleType]:
    """The functions that the installed package registers for CUDA, by operator, and the module that holds them."""
    found: dict[str, Callable[..., Any]] = {}
    _run_backend("default", found)
    module = _run_backend("cuda", found)
    module._get_raw_stream, module.CUBLAS_Context = (lambda index: 0), _NoLibrary()
    return found, module


def _run_backend(name: str, found: dict[str, Callable[..., Any]]) -> ModuleType:
    """Run a backend's file, which adds to `found` what it registers."""
    import bitsandbytes

    def keep(operator: str, kinds: object) -> Callable[[Callable], Callable]:
        def kept(function: Callable) -> Callable:
            packet, _, overload = operator.removeprefix(f"{_PACKAGE}::").partition(".")
            found[f"{_PACKAGE}.{packet}.{overload or 'default'}"] = function
            return function

        return kept

    file = Path(bitsandbytes.__file__).parent / "backends" / name / "ops.py"
    spec = importlib.util.spec_from_file_location(f"{_PACKAGE}.backends.{name}.on_meta", file)
    module = importlib.util.module_from_spec(spec)
    with (
        mock.patch(f"{_PACKAGE}._ops.register_kernel", keep),
        mock.patch(f"{_PACKAGE}.cextension.lib", _NoLibrary()),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, create=True),
    ):
        spec.loader.exec_module(module)
    return module


def run(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """What an operator of bitsandbytes does on CUDA, by the package's own function."""
    if recorder.device.kind != "cuda":
        return NotImplemented
    kernels, _ = _kernels()
    with recorder:
        return kernels[str(func)](*args, **kwargs)


def gemm_4bit(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """`gemm_4bit(A [.., K], B, [N, K], absmax, blocksize, ...)`: dequantised and multiplied, or all in one kernel.

    The former is traced. Its blocks are deferred: where the kernel runs there are none.
    """
    activations, (outputs, inner), blocksize = args[0], args[2], args[4]
    rows, dtype = activations.numel() // inner, str(activations.dtype).removeprefix("torch.")
    _, module = _kernels()
    asked = (rows, outputs, inner, blocksize)
    with recorder, recorder.deferring(lambda size: DeferredSize(size, GEMM_4BIT, (dtype,), (size, *asked))):
        return module._dequant_linear_fallback(*args, **kwargs)


def resolve(key: str, words: tuple[str, ...], numbers: tuple[int, ...]) -> int:
    """The bytes of a block on a GPU: none where one kernel does all."""
    (dtype,), (size, *asked) = words, numbers
    return 0 if _in_one_kernel(key, dtype, *asked) else size


def _in_one_kernel(key: str, dtype: str, rows: int, outputs: int, inner: int, blocksize: int) -> bool:
    """Whether a GPU multiplies without dequantising first (ops.py, the kernel of "bitsandbytes::gemm_4bit")."""
    _, module = _kernels()
    if rows > module._gemm_4bit_custom_max_m or inner % blocksize:
        return False
    hardware = HARDWARE[key]
    facts = (hardware.processors, *hardware.capability)
    with mock.patch.object(module, "_gpu_dispatch_props", lambda index: facts):
        return module._gemm_4bit_use_custom_cuda(facts, getattr(torch, dtype), rows, outputs, inner)


HANDLERS: dict[str, Handler] = {
    **{f"{_PACKAGE}.{name}.default": run for name in _OPERATORS},
    f"{_PACKAGE}.gemm_4bit.default": gemm_4bit,
    f"{_PACKAGE}.int8_linear_matmul.out": run,
    f"{_PACKAGE}.dequantize_blockwise.out": run,
}

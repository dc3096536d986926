"""bitsandbytes on meta tensors: the package's own functions, with a library beneath that computes nothing.

The installed package's bitsandbytes/backends/<device>/ops.py (0.50) says what each operator allocates, in Python; only what it then
calls is compiled. Such a file cannot be imported where its library is none for that device, so it is run here with a stand-in, and
what it registers is kept.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from sizer.architecture.compile_later import compiled_when_called
from sizer.tracing.values.handler import HandlerContext

PACKAGE = "bitsandbytes"
# Operators of the package that a step calls.
OPERATORS = (
    "gemm_4bit", "gemv_4bit", "dequantize_4bit", "dequantize_blockwise", "quantize_4bit", "quantize_blockwise",
    "int8_linear_matmul", "int8_mm_dequant", "int8_vectorwise_quant", "int8_double_quant", "int8_mixed_scaled_mm",
    "int8_scaled_mm", "optimizer_update_32bit", "optimizer_update_8bit_blockwise",
)  # fmt: skip
OUT_OPERATORS = ("int8_linear_matmul", "dequantize_blockwise")  # that have an overload "out", too

Kernels = dict[str, Callable[..., Any]]
"""Functions of the package by operator ("bitsandbytes.quantize_4bit.default")."""


class NoLibrary:
    """Stands for the package's compiled library and its handle: every function is there, computes nothing and tells of no error."""

    def __getattr__(self, name: str) -> NoLibrary:
        made = NoLibrary()
        setattr(self, name, made)
        return made

    def __call__(self, *args: Any) -> NoLibrary:
        return self

    def __bool__(self) -> bool:
        return False


def run_backend(name: str, found: Kernels) -> ModuleType:
    """Run a backend's file ("default", "cuda", "cpu"), which adds to `found` what it registers."""
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
    logging.getLogger(spec.name).setLevel(logging.ERROR)  # of the packages that it would like to find
    with (
        compiled_when_called(),
        mock.patch(f"{PACKAGE}._ops.register_kernel", keep),
        mock.patch(f"{PACKAGE}.cextension.lib", NoLibrary()),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, create=True),
    ):
        spec.loader.exec_module(module)
    return module


def runner(kernels: Callable[[], Kernels]) -> Callable[[HandlerContext, Any, tuple, dict], Any]:
    """The handler that does what an operator does by the package's own function, one of `kernels`."""

    def run(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
        with recorder:
            return kernels()[str(func)](*args, **kwargs)

    return run

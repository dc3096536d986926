"""Rules of bitsandbytes on CUDA: see sizer.tracing.meta.quantized_operators.

One choice depends on the GPU's multiprocessors: whether a product of 4-bit weights dequantizes them first. It is a size query
(sizer.tape.size_queries) of the kind GEMM_4BIT.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from sizer.catalogue.hardware import HARDWARE
from sizer.tracing.cuda.by_capability import handle_workspace
from sizer.tracing.cuda.by_hardware import GEMM_4BIT
from sizer.tracing.log import DeferredSize
from sizer.tracing.meta.quantized_operators import (
    OPERATORS,
    OUT_OPERATORS,
    PACKAGE,
    Kernels,
    NoLibrary,
    run_backend,
    runner,
)
from sizer.tracing.values.handler import Handler, HandlerContext


@cache
def _kernels() -> tuple[Kernels, ModuleType]:
    """Return the functions that the installed package registers for CUDA, by operator, and their module."""
    found: Kernels = {}
    run_backend("default", found)
    module: Any = run_backend("cuda", found)
    module._get_raw_stream, module.CUBLAS_Context = (lambda index: 0), NoLibrary()
    return found, module


def gemm_4bit(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run `gemm_4bit`: dequantization and a product, or a single kernel.

    Arguments: A [.., K], B, [N, K], absmax, blocksize, ... Dequantization and product are traced. Their blocks are deferred
    sizes: 0 if the single kernel runs.
    """
    activations, (outputs, inner), blocksize = args[0], args[2], args[4]
    rows, dtype = activations.numel() // inner, str(activations.dtype).removeprefix("torch.")
    _, module = _kernels()
    asked = (rows, outputs, inner, blocksize)
    # cuBLAS's workspace is part of such a query, too: compare capabilities, so that the trace serves those with the same
    # workspace.
    handle_workspace(recorder.device.capability, recorder.device.version)
    with recorder, recorder.deferring(lambda size: DeferredSize(size, GEMM_4BIT, (dtype,), (size, *asked))):
        return module._dequant_linear_fallback(*args, **kwargs)


def resolve(key: str, words: tuple[str, ...], numbers: tuple[int, ...]) -> int:
    """Return the bytes of a block on a GPU; 0 if a single kernel does all the work."""
    (dtype,), (size, *asked) = words, numbers
    return 0 if _in_one_kernel(key, dtype, *asked) else size


def _in_one_kernel(key: str, dtype: str, rows: int, outputs: int, inner: int, blocksize: int) -> bool:
    """Return whether a GPU multiplies without dequantizing first (ops.py, the kernel of "bitsandbytes::gemm_4bit")."""
    _, module = _kernels()
    if rows > module._gemm_4bit_custom_max_m or inner % blocksize:
        return False
    hardware = HARDWARE[key]
    facts = (hardware.processors, *hardware.capability)
    with mock.patch.object(module, "_gpu_dispatch_props", lambda index: facts):
        return module._gemm_4bit_use_custom_cuda(facts, getattr(torch, dtype), rows, outputs, inner)


_run = runner(lambda: _kernels()[0])
HANDLERS: dict[str, Handler] = {
    **{f"{PACKAGE}.{name}.default": _run for name in OPERATORS},
    **{f"{PACKAGE}.{name}.out": _run for name in OUT_OPERATORS},
    f"{PACKAGE}.gemm_4bit.default": gemm_4bit,
}

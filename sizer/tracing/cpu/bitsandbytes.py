"""Rules of bitsandbytes on the CPU: see sizer.tracing.meta.quantized_operators.

Its layers check whether a tensor is on the CPU; `bitsandbytes_on_cpu` makes meta tensors pass this check. If the processor
multiplies bfloat16 (AVX-512 BF16), a layer of 4-bit weights packs them in another order in its first pass of inference,
permanently.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from sizer.tracing.meta.quantized_operators import OPERATORS, OUT_OPERATORS, PACKAGE, Kernels, run_backend, runner
from sizer.tracing.values.handler import Handler


@cache
def _kernels() -> tuple[Kernels, ModuleType]:
    """Return the functions that the installed package runs on the CPU, by operator, and the module with most of them."""
    found: Kernels = {}
    module = run_backend("default", found)
    run_backend("cpu", found)
    return found, module


@contextmanager
def bitsandbytes_on_cpu() -> Iterator[None]:
    """Make layers of bitsandbytes treat meta tensors as CPU tensors within the context, as in a new process.

    The package's cached tables are dropped first. Weights that were repacked are restored at the end.
    """
    if PACKAGE not in sys.modules:
        yield
        return
    import bitsandbytes
    from bitsandbytes.autograd import _functions as products
    from bitsandbytes.backends import utils
    from bitsandbytes.nn import Linear4bit

    _kernels()[1]._get_4bit_quantize_bounds.cache_clear()
    for key in [key for key in utils._code_4bit_cache if key[1].type == "meta"]:
        del utils._code_4bit_cache[key]
    restore: list[Callable[[], None]] = []
    forward, multiply_4bit = Linear4bit.forward, products.matmul_4bit

    def forward_packed(layer: nn.Module, x: Tensor) -> Tensor:
        if layer.support_avx512bf16_for_cpu and not layer.training and not x.requires_grad and not _is_packed(layer):
            restore.append(_restorer(layer))
            _pack(layer)
        return forward(layer, x)

    def matmul_4bit(
        A: Tensor, B: Tensor, quant_state: Any, out: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        if not getattr(quant_state, "packing_format_for_cpu", False):
            return multiply_4bit(A, B, quant_state, out=out, bias=bias)
        result = bitsandbytes.functional.gemv_4bit(A, B, out=out, state=quant_state)
        return result if bias is None else result.add_(bias)

    def matmul(
        A: Tensor, B: Tensor, out: Tensor | None = None, state: Any = None, threshold: float = 0.0, bias: Any = None
    ) -> Tensor:
        if threshold > 0:
            state.threshold = threshold
        product = products.MatMul8bitFp if state.is_training else products.MatMul8bitLt
        return product.apply(A, B, out, bias, state)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Linear4bit, "forward", forward_packed))
        stack.enter_context(mock.patch.object(bitsandbytes, "matmul_4bit", matmul_4bit))
        stack.enter_context(mock.patch.object(bitsandbytes, "matmul", matmul))
        try:
            yield
        finally:
            for one in restore:
                one()


def _is_packed(layer: nn.Module) -> bool:
    return getattr(layer.weight.quant_state, "packing_format_for_cpu", False)


def _pack(layer: nn.Module) -> None:
    from bitsandbytes.functional import _convert_weight_packed_for_cpu

    layer.weight.data, _ = _convert_weight_packed_for_cpu(layer.weight.data, layer.weight.quant_state)


def _restorer(layer: nn.Module) -> Callable[[], None]:
    """Return a function that restores a layer's weights and scales as new tensors of the current shapes and dtypes.

    The function holds none of the tensors.
    """
    weight, state = layer.weight, layer.weight.quant_state
    form, values = _form(weight), _forms(state)
    second = None if state.state2 is None else _forms(state.state2)
    kind: Any = type(state)

    def restore() -> None:
        weight.data = torch.empty(form.shape, dtype=form.dtype, device="meta")
        vars(state).clear()
        vars(state).update(_made(values))
        if second is not None:
            state.state2 = kind.__new__(kind)
            vars(state.state2).update(_made(second))

    return restore


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    shape: torch.Size
    dtype: torch.dtype


def _form(tensor: Tensor) -> _Form:
    return _Form(shape=tensor.shape, dtype=tensor.dtype)


def _forms(state: object) -> dict[str, object]:
    """Return the values of a state; for tensors, their forms."""
    return {
        name: _form(value) if isinstance(value, Tensor) else value
        for name, value in vars(state).items()
        if name != "state2" or value is None
    }


def _made(values: dict[str, object]) -> dict[str, object]:
    return {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, _Form) else value
        for name, value in values.items()
    }


_run = runner(lambda: _kernels()[0])
HANDLERS: dict[str, Handler] = {
    **{f"{PACKAGE}.{name}.default": _run for name in OPERATORS},
    **{f"{PACKAGE}.{name}.out": _run for name in OUT_OPERATORS},
}

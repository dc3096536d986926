"""Python functions of PyTorch that are replaced while a trace runs: constructors from data, and the generator's state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors

from sizer.tracing.meta.accelerators import OnMeta
from sizer.tracing.values.known import KnownValues


@contextmanager
def values_from_data(
    values: KnownValues, place: Callable[[torch.device | None], AbstractContextManager] = nullcontext
) -> Iterator[None]:
    """Keep the data of `torch.tensor(data)` and similar calls on meta as known values within the context.

    f-strings show them. `place` returns the context for a call: its argument is the device that the call names, else that of the
    code's own `with torch.device(…)`, or None. On a meta device the constructor drops the data before any dispatch
    (torch/csrc/utils/tensor_new.cpp), so the tensor is built on the CPU first and moved, which the recorder sees.
    """
    _device_constructors()  # PyTorch caches the list at its first use: it must not contain the temporary functions below
    tensor, as_tensor, new_tensor = torch.tensor, torch.as_tensor, torch.Tensor.new_tensor
    write = torch.Tensor.__format__

    def moved(real: torch.Tensor, requires_grad: bool = False) -> torch.Tensor:
        return real.to("meta").requires_grad_(requires_grad)

    def tensor_(
        data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False, **rest: Any
    ) -> torch.Tensor:
        target = _target(device)
        if isinstance(data, torch.Tensor) and (target.type != "meta" or data.device.type == "meta"):
            return tensor(data, dtype=dtype, device=device, requires_grad=requires_grad, **rest)
        if target.type != "meta":  # a list of numbers that are on the device
            return tensor(_without_meta(data, values), dtype=dtype, device=device, requires_grad=requires_grad, **rest)
        with place(_context_device(own=True) if device is None else device):
            return moved(tensor(_without_meta(data, values), dtype=dtype, device="cpu"), requires_grad)

    def as_tensor_(data: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
        target = _target(device)
        if target.type != "meta" or isinstance(data, torch.Tensor):
            return as_tensor(data, dtype=dtype, device=device)
        with place(_context_device(own=True) if device is None else device):
            return moved(as_tensor(_without_meta(data, values), dtype=dtype, device="cpu"))

    def new_tensor_(
        self: torch.Tensor, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False
    ):
        target = torch.device(device) if device is not None else self.device
        if target.type != "meta":
            return new_tensor(self, data, dtype=dtype, device=device, requires_grad=requires_grad)
        return tensor_(data, dtype=dtype or self.dtype, device=target, requires_grad=requires_grad)

    def format_(self: torch.Tensor, spec: str) -> str:
        return format(self.item(), spec) if self.device.type == "meta" and self.dim() == 0 else write(self, spec)

    originals, find = {id(tensor_): tensor, id(as_tensor_): as_tensor}, torch.jit._builtins._find_builtin

    def find_builtin(function: Any) -> str | None:
        """Tell TorchScript that these are constructors: modules compile code when they are imported (torch.distributed.optim)."""
        with mock.patch.multiple(torch, tensor=tensor, as_tensor=as_tensor):  # it lists torch's functions at its first use
            return find(originals.get(id(function), function))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.jit._builtins, "_find_builtin", find_builtin))
        stack.enter_context(mock.patch.object(torch.Tensor, "__format__", format_))
        stack.enter_context(mock.patch.object(torch, "tensor", tensor_))
        stack.enter_context(mock.patch.object(torch, "as_tensor", as_tensor_))
        stack.enter_context(mock.patch.object(torch.Tensor, "new_tensor", new_tensor_))
        yield


def _target(device: Any) -> torch.device:
    """Return the device that a constructor would use (torch.get_default_device itself may call torch.tensor)."""
    return torch.device(device) if device is not None else _context_device() or torch.device("cpu")


def _context_device(*, own: bool = False) -> torch.device | None:
    """Return the device of the innermost `with torch.device(…)`, None outside of one.

    With `own`, the context has to be of the code itself: the trace's own context is outside of its mode `OnMeta`.
    """
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return mode.device
        if own and isinstance(mode, OnMeta):
            break
    return None


def _without_meta(data: Any, values: KnownValues) -> Any:
    """Return the data with meta tensors inside lists replaced by their known values."""
    if isinstance(data, torch.Tensor) and data.device.type == "meta":
        return data.item() if data.numel() == 1 else data.tolist()
    if isinstance(data, (list, tuple)):
        return type(data)(_without_meta(d, values) for d in data)
    return data


@contextmanager
def random_states_seen(see: Callable[[torch.Tensor, str], None]) -> Iterator[None]:
    """Call `see` with each copy of the CPU generator's state (5,056 bytes) that Python requests within the context.

    Checkpointing keeps one per block to repeat its dropout (torch/utils/checkpoint.py). It is made in C++ below any dispatch,
    and lives in host memory on every device: only the CPU counts it.
    """
    get = torch.random.get_rng_state

    def get_rng_state() -> torch.Tensor:
        state = get()
        see(state, "torch.get_rng_state")
        return state

    with (
        mock.patch.object(torch.random, "get_rng_state", get_rng_state),
        mock.patch.object(torch, "get_rng_state", get_rng_state),
    ):
        yield

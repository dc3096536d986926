"""A mode that watches a forward pass for what only Python shows: devices that are named in the code, results that are dropped.

It goes with `sizer.placement.placement_mode`, to which it tells what it finds.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sizer.placement import mistakes
from sizer.placement.frames import drops_result, is_hidden, line_of
from sizer.placement.placement_mode import ACCELERATORS, Lookout
from sizer.tracing.values.known import tensors_of

_MOVERS = {
    Tensor.to: "to", Tensor.cuda: "cuda", Tensor.cpu: "cpu", Tensor.xpu: "xpu", Tensor.float: "float", Tensor.half: "half",
    Tensor.bfloat16: "bfloat16", Tensor.double: "double", Tensor.type: "type", Tensor.type_as: "type_as",
}  # fmt: skip
_BY_NAME = {Tensor.cuda: "cuda", Tensor.xpu: "xpu"}
_IS_CUDA = Tensor.is_cuda.__get__


class Functions(TorchFunctionMode):
    """Sees devices that are named in the code, and results that are dropped."""

    def __init__(self, lookout: Lookout):
        super().__init__()
        self._lookout = lookout
        self._asks = False  # code that asks whether a tensor is on CUDA may name CUDA

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, caller = kwargs or {}, sys._getframe(1)
        if func in _MOVERS and not is_hidden(caller) and drops_result(caller):
            self._lookout.note(mistakes.dropped_result(_MOVERS[func], line_of(caller) or "the model"))
        if func == _IS_CUDA and args[0].device.type == "meta":
            self._asks = True
            return self._lookout.home.type in ("cuda", "cpu", "meta")  # what will be on CUDA counts as there
        if func in _BY_NAME:
            self._name(_BY_NAME[func], caller)
            return args[0].to("meta")
        if func is torch.nn.functional.scaled_dot_product_attention:  # compares devices before any operator is called
            tensors = tensors_of(args) + tensors_of(kwargs.values())
            if odd := self._lookout.odd_ones(tensors):
                self._lookout.report(torch.ops.aten.scaled_dot_product_attention.default, odd)
                args, kwargs = self._lookout.move_home(args, kwargs)
        args = tuple(self._redirect(arg, caller) for arg in args)
        return func(*args, **{key: self._redirect(value, caller) for key, value in kwargs.items()})

    def _redirect(self, value: Any, caller: FrameType) -> Any:
        """Meta in the place of an accelerator."""
        named = isinstance(value, str) and value.partition(":")[0] in ACCELERATORS
        if not named and not (isinstance(value, torch.device) and value.type in ACCELERATORS):
            return value
        self._name(str(value), caller)
        return torch.device("meta")

    def _name(self, device: str, caller: FrameType) -> None:
        home = self._lookout.home
        if device.partition(":")[0] != home.type and not self._asks:
            self._lookout.note(mistakes.device_in_the_code(device, str(home), line_of(caller) or "the model"))

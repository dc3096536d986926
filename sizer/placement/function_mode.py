"""A function mode that finds in a forward pass what only Python shows: devices named in the code, and dropped results.

It adds its findings to `sizer.placement.placement_mode`.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sizer.placement import findings
from sizer.placement.call_site import drops_result, is_hidden, line_of
from sizer.placement.placement_mode import ACCELERATORS, PlacementMode
from sizer.tracing.values.known import tensors_of

_MOVERS = {
    Tensor.to: "to", Tensor.cuda: "cuda", Tensor.cpu: "cpu", Tensor.xpu: "xpu", Tensor.float: "float", Tensor.half: "half",
    Tensor.bfloat16: "bfloat16", Tensor.double: "double", Tensor.type: "type", Tensor.type_as: "type_as",
}  # fmt: skip
_BY_NAME = {Tensor.cuda: "cuda", Tensor.xpu: "xpu"}
_IS_CUDA = Tensor.is_cuda.__get__


class PlacementFunctionMode(TorchFunctionMode):
    """Function mode that adds findings to `mode` that only it can see: devices named in the code, and dropped results."""

    def __init__(self, mode: PlacementMode):
        super().__init__()
        self._mode = mode
        self._asks = False  # code that checks whether a tensor is on CUDA may name CUDA

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, caller = kwargs or {}, sys._getframe(1)
        if func in _MOVERS and not is_hidden(caller) and drops_result(caller):
            self._mode.add(findings.DROPPED.at(line_of(caller) or "the model", method=_MOVERS[func]))
        if func == _IS_CUDA and args[0].device.type == "meta":
            self._asks = True
            return self._mode.device.type in ("cuda", "cpu", "meta")  # tensors that will be on CUDA count as on CUDA
        if func in _BY_NAME:
            self._name(_BY_NAME[func], caller)
            return args[0].to("meta")
        if func is torch.nn.functional.scaled_dot_product_attention:  # compares devices before any operator is called
            tensors = tensors_of(args) + tensors_of(kwargs.values())
            if misplaced := self._mode.misplaced(tensors):
                self._mode.add_misplaced(torch.ops.aten.scaled_dot_product_attention.default, misplaced)
                args, kwargs = self._mode.move_to_meta(args, kwargs)
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
        device_of_weights = self._mode.device
        if device.partition(":")[0] != device_of_weights.type and not self._asks:
            where = line_of(caller) or "the model"
            self._mode.add(findings.HARD_CODED.at(where, device=device, weights=device_of_weights))

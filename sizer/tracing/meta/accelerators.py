"""Accelerators that code asks for by name, and gets meta tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from sizer.tracing.meta.deferred import Deferred

_ACCELERATOR = torch.device("cuda")


class OnMeta(TorchFunctionMode):
    """Sends to meta what asks for an accelerator by name: `.cuda()`, `.to("cuda:0")`, `device="mps"`.

    `deferred` is told of it, and of what asks for meta by name.
    """

    def __init__(self, deferred: Deferred | None = None) -> None:
        super().__init__()
        self._deferred = deferred

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in (torch.Tensor.cuda, torch.Tensor.xpu):
            return args[0].to("meta")
        if (
            not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor)
        ):  # an attribute of a tensor, say: the most calls
            return func(*args)
        kwargs = kwargs or {}
        if isinstance(kwargs.get("device"), int):  # a GPU by its number
            kwargs = kwargs | {"device": _ACCELERATOR}
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], int):
            args = (args[0], _ACCELERATOR, *args[2:])
        deferred = self._deferred
        if deferred is None:
            return self._run(func, args, kwargs)
        if func is torch.device and args and deferred.names(args[0]):
            return deferred.name(func(*args, **kwargs))
        if deferred.names(kwargs.get("device")):
            with deferred.told(True):
                return func(*args, **kwargs)
        if any(_on_meta(value) is not value for value in (*args, *kwargs.values())):
            with deferred.told(False):
                return self._run(func, args, kwargs)
        return func(*args, **kwargs)

    def _run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if kwargs.get("device") == "meta" and isinstance(kwargs["device"], str):
            with _disable_current_modes():  # meta by name: on no device
                return func(*args, **kwargs)
        return func(*map(_on_meta, args), **{name: _on_meta(value) for name, value in kwargs.items()})


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type in ("cuda", "mps", "xpu"):
        return torch.device("meta")
    if isinstance(value, str) and value.partition(":")[0] in ("cuda", "mps", "xpu"):
        return "meta"
    return value

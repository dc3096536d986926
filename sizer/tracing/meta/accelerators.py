"""Accelerators that code asks for by name, and gets meta tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes


class OnMeta(TorchFunctionMode):
    """Sends to meta what asks for an accelerator by name: `.cuda()`, `.to("cuda:0")`, `device="mps"`."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in (torch.Tensor.cuda, torch.Tensor.xpu):
            return args[0].to("meta")
        if kwargs and kwargs.get("device") == "meta" and isinstance(kwargs["device"], str):
            with _disable_current_modes():  # meta by name: on no device
                return func(*args, **kwargs)
        kwargs = {name: _on_meta(value) for name, value in (kwargs or {}).items()}
        return func(*map(_on_meta, args), **kwargs)


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type in ("cuda", "mps", "xpu"):
        return torch.device("meta")
    if isinstance(value, str) and value.partition(":")[0] in ("cuda", "mps", "xpu"):
        return "meta"
    return value

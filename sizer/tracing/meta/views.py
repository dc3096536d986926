"""Views hidden from dispatch modes: they create no block and no values, and are half of the operators of a model.

The dispatcher skips its key `Python`, which calls modes and tensor subclasses, for operators that have a fallthrough kernel
there (aten/src/ATen/core/dispatch/Dispatcher.cpp and torch/library.py, 2.15). The kernel is global to the process: it is
removed as soon as a tensor of a subclass with its own dispatch is created, which must see its views.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

_aten = torch.ops.aten
VIEWS = (
    *(_aten.view.default, _aten._unsafe_view.default, _aten.expand.default, _aten.as_strided.default),
    *(_aten.transpose.int, _aten.t.default, _aten.permute.default, _aten.select.int, _aten.slice.Tensor),
    *(_aten.unsqueeze.default, _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims),
    *(_aten.split.Tensor, _aten.split_with_sizes.default, _aten.unbind.int, _aten.diagonal.default),
    _aten.alias.default,
)
# Functions that make tensors of another class, which is one of the arguments; some versions lack some functions
_MAKE = ("_make_wrapper_subclass", "_make_subclass", "_make_dtensor", "as_subclass")
_MAKERS = tuple(name for name in _MAKE if hasattr(Tensor, name))


def dispatches(kind: type[Tensor]) -> bool:
    """Return True if tensors of a class handle operators themselves."""
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


@contextmanager
def views_unseen(module: nn.Module, is_plain: Callable[[Any], bool]) -> Iterator[None]:
    """Hide views from modes within the context, except views for which `is_plain` is False.

    All views become visible when a tensor of a subclass with its own dispatch is created. If the module has such tensors, modes
    see all views.
    """
    if any(dispatches(type(tensor)) for tensor in (*module.parameters(), *module.buffers())):
        yield
        return
    hidden: list[torch.library.Library] = [torch.library.Library("aten", "IMPL", "Python")]

    def show() -> None:
        while hidden:
            hidden.pop()._destroy()

    def watched(make: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(one, type) and issubclass(one, Tensor) and dispatches(one) for one in (*args, *kwargs.values())):
                show()
            return make(*args, **kwargs)

        return run

    for func in VIEWS:
        if is_plain(func) and not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "Python"):
            hidden[0].impl(func.name().removeprefix("aten::"), torch.library.fallthrough_kernel, "Python")
    with ExitStack() as stack:
        stack.callback(show)
        for name in _MAKERS:
            stack.enter_context(mock.patch.object(Tensor, name, watched(getattr(Tensor, name))))
        yield

"""Calls of DeepSpeed that one process without a GPU answers in another way. Read in DeepSpeed 0.19.

DeepSpeed compiles its fused optimizers at their first use, for which it needs a CUDA compiler (deepspeed/ops/op_builder/builder.py,
`OpBuilder.load`). Their kernels change their arguments and allocate nothing (csrc/adam/multi_tensor_adam.cu,
csrc/lion/multi_tensor_lion.cu): a stand-in launches nothing. ZeRO-3 compares lists with those of rank 0, which is not there.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

_FUNCTIONS = {"fused_adam": ("multi_tensor_adam",), "fused_lion": ("multi_tensor_lion",)}  # of the extensions


def _launch_nothing(*arguments: Any) -> None:
    """Take the arguments of a kernel that works in place."""


def _stand_in(builder: ModuleType, stack: ExitStack) -> None:
    own = builder.OpBuilder.load

    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.name in _FUNCTIONS:
            return SimpleNamespace(**dict.fromkeys(_FUNCTIONS[self.name], _launch_nothing))
        return own(self, *args, **kwargs)

    stack.enter_context(mock.patch.object(builder.OpBuilder, "load", load))


def _agree(utils: ModuleType, stack: ExitStack) -> None:
    own = utils.assert_ints_same_as_other_ranks

    def agree(ints: list[int]) -> None:
        with mock.patch.object(utils.dist, "get_rank", lambda *_: 0):  # what it sends is what it receives
            own(ints)

    stack.enter_context(mock.patch.object(utils, "assert_ints_same_as_other_ranks", agree))


_CHANGES: dict[str, Callable[[ModuleType, ExitStack], None]] = {
    "deepspeed.ops.op_builder.builder": _stand_in,
    "deepspeed.runtime.zero.utils": _agree,
}


class _Finder:
    """Finds these modules as the other finders do, and changes them once they have run."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._within = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _CHANGES or self._within:
            return None
        self._within = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._within = False
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _CHANGES[name](module, self._stack)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@contextmanager
def deepspeed_answered() -> Iterator[None]:
    """Within the context DeepSpeed's calls are answered, also if it is imported there."""
    with ExitStack() as stack:
        finder = _Finder(stack)
        for name, change in _CHANGES.items():
            if name in sys.modules:
                change(sys.modules[name], stack)
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)
        yield

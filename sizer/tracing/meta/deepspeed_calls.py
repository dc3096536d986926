"""Calls of DeepSpeed that need a different answer in one process without a GPU. Read in DeepSpeed 0.19.

DeepSpeed compiles its fused optimizers at their first use, which requires a CUDA compiler (deepspeed/ops/op_builder/builder.py,
`OpBuilder.load`). Their kernels change their arguments and allocate nothing (csrc/adam/multi_tensor_adam.cu,
csrc/lion/multi_tensor_lion.cu): the replacement launches nothing. ZeRO-3 compares lists with those of rank 0, which does not
exist.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from sizer.tracing.values.libraries import entered_once_imported

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
        with mock.patch.object(utils.dist, "get_rank", lambda *_: 0):  # rank 0 receives its own data
            own(ints)

    stack.enter_context(mock.patch.object(utils, "assert_ints_same_as_other_ranks", agree))


_CHANGES: dict[str, Callable[[ModuleType, ExitStack], None]] = {
    "deepspeed.ops.op_builder.builder": _stand_in,
    "deepspeed.runtime.zero.utils": _agree,
}


@contextmanager
def _changed(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        _CHANGES[name](sys.modules[name], stack)
        yield


@contextmanager
def deepspeed_answered() -> Iterator[None]:
    """Answer DeepSpeed's calls within the context, also if it is imported there."""
    with entered_once_imported({name: partial(_changed, name) for name in _CHANGES}):
        yield

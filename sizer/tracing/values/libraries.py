"""Functions of libraries with results that determine sizes; they get values once the library is imported."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from sizer.tracing.values.boxes import DETECTION, Limited, boxes_assumed
from sizer.tracing.values.known import Assume
from sizer.tracing.values.lengths import PREDICTED, lengths_assumed


@contextmanager
def library_values_assumed(counting: Limited, assume: Assume) -> Iterator[None]:
    """Make detectors and models that predict lengths continue with assumed values within the context."""
    contexts: dict[str, Callable[[], AbstractContextManager]] = {DETECTION: partial(boxes_assumed, counting, assume)}
    contexts |= {name: partial(lengths_assumed, name, assume) for name in PREDICTED}
    with entered_once_imported(contexts):
        yield


@contextmanager
def modes_unseen() -> Iterator[None]:
    """Hide modes from modules that check for other tensor classes before they use a fast path, within the context."""
    plain = torch._C._disabled_torch_function_impl

    def holds_other_classes(arguments: Iterable[Any]) -> bool:
        kinds = {type(argument) for argument in arguments} - {torch.Tensor, torch.nn.Parameter}
        return any(getattr(kind, "__torch_function__", plain) is not plain for kind in kinds)

    with mock.patch.object(torch.overrides, "has_torch_function", holds_other_classes):
        yield


@contextmanager
def entered_once_imported(contexts: dict[str, Callable[[], AbstractContextManager]]) -> Iterator[None]:
    """Enter other contexts that change modules, by name: at once if a module is imported, else when it is imported."""
    with ExitStack() as stack:

        def enter(name: str) -> None:
            stack.enter_context(contexts.pop(name)())

        for name in [name for name in contexts if name in sys.modules]:
            enter(name)
        watcher: Any = _Watcher(contexts, enter)
        sys.meta_path.insert(0, watcher)
        try:
            yield
        finally:
            sys.meta_path.remove(watcher)


class _Watcher:
    """Finds modules as the other finders do, and reports the import of some names."""

    def __init__(self, names: Any, imported: Callable[[str], None]) -> None:
        self._names, self._imported, self._within = names, imported, False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._within or name not in self._names:
            return None
        self._within = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._within = False
        if spec is not None and hasattr(spec.loader, "exec_module"):
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._imported(name)

            loader.exec_module = exec_module
        return spec

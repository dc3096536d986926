"""Modules that are imported in the midst of a trace, which must not be part of it: only the first trace of a process has them.

PyTorch imports lazily: the first meta kernel that is written in Python may import all of `torch._dynamo` (torch/_compile.py,
_disable_dynamo). Two things of such an import would stay:
- the frames of whoever imports: `torch.fx.wrap` (torch/fx/_symbolic_trace.py; PyTorch 2.11, not 2.15) has its own frame in a local
  variable, a cycle that holds every frame below it, and their tensors, until the garbage collector comes, which is off in a trace;
- tensors that a module makes: under the modes of the trace they would be on meta, for this process for ever, and logged.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from sizer.base.frozen import is_frozen


class _Loader:
    """A loader whose modules run outside of the trace; the module keeps the loader it would have had."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        with self._finder.apart():
            self._loader.exec_module(module)


class _Finder:
    """Finds modules as the other finders do, and has them loaded outside of the trace."""

    def __init__(self) -> None:
        self._within = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._within:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not self else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    loader: Any = _Loader(spec.loader, self)
                    spec.loader = loader
                return spec
        return None

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within the context no mode of PyTorch is on; at its end the cycles that were made within it are gone, no others."""
        self._within = True
        thaw = not is_frozen()  # what a process has frozen for itself stays so
        gc.freeze()
        try:
            # torch.utils._python_dispatch._disable_current_modes imports by itself, so it cannot be used here.
            with (
                torch._C._DisableTorchDispatch(),
                torch._C.DisableTorchFunction(),
                torch.inference_mode(False),
                torch.enable_grad(),
            ):
                yield
        finally:
            gc.collect()
            if thaw:
                gc.unfreeze()
            self._within = False


@contextmanager
def untraced_imports() -> Iterator[None]:
    """Within the context, modules that are imported for the first time leave no trace."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@contextmanager
def usual_imports() -> Iterator[None]:
    """Within the context, which is outside of the trace, modules are imported as usual."""
    ours = [finder for finder in sys.meta_path if isinstance(finder, _Finder)]
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in ours]
    try:
        yield
    finally:
        sys.meta_path[:0] = ours

"""Modules imported during a trace. They must not be part of it, as only the first trace of a process imports them.

PyTorch imports lazily: the first meta kernel that is written in Python may import all of `torch._dynamo` (torch/_compile.py,
_disable_dynamo). Two effects of such an import would stay:

- the frames of the importing code: `torch.fx.wrap` (torch/fx/_symbolic_trace.py; PyTorch 2.11, not 2.15) stores its own frame
  in a local variable. The cycle keeps every frame below it, and their tensors, until garbage collection, which is off in a
  trace;
- tensors that a module creates: under the modes of the trace they would be logged, and stay on meta for the rest of the
  process.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from sizer.base.frozen import is_frozen

# PyTorch 2.11 to 2.14 compile these optimizers with TorchScript, and with them functions that a trace replaces.
_SCRIPTED = "torch.distributed.optim"


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Let `torch.jit.script` return what it is given, within the context."""
    state = torch.jit._state._enabled
    before, state.enabled = state.enabled, False
    try:
        yield
    finally:
        state.enabled = before


class _Loader:
    """Loader that runs modules outside of the trace; the module keeps its original loader."""

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
        with self._finder.apart(), _uncompiled() if module.__name__.startswith(_SCRIPTED) else nullcontext():
            self._loader.exec_module(module)


class _Finder:
    """Finds modules as the other finders do, and loads them outside of the trace."""

    def __init__(self) -> None:
        self._within = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._within and not name.startswith(_SCRIPTED):
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
        """Disable all modes of PyTorch within the context; at its end, collect the cycles created in it, and no others."""
        if self._within:
            yield
            return
        self._within = True
        thaw = not is_frozen()  # objects that the process has frozen itself stay frozen
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
    """Keep first imports of modules out of the trace within the context."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@contextmanager
def usual_imports() -> Iterator[None]:
    """Import modules as usual within the context, which is outside of the trace."""
    ours = [finder for finder in sys.meta_path if isinstance(finder, _Finder)]
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in ours]
    try:
        yield
    finally:
        sys.meta_path[:0] = ours

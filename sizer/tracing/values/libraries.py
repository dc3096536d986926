"""Functions of libraries with results that determine sizes; they get values once the library is imported.

Some models of transformers predict from their weights the lengths of later tensors: bytes of a patch of text, frames of a phoneme.
The functions themselves run. Their predictions get values, so that all later tensors have a size. Both values are typical of
ordinary data.
"""

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
from torch import Tensor

from sizer.tracing.values.boxes import DETECTION, Limited, boxes_assumed
from sizer.tracing.values.known import Assume

FRAMES = 2  # of a phoneme or a blank: VITS' tokenizers put a blank between all letters, about 30 tokens in 62 frames a second
PATCHES = "the bytes of a text were taken to fall into patches of {}, the size in the config"
DURATIONS = f"every token was taken to last {FRAMES} frames"

Wrap = Callable[[Assume, Callable[..., Any]], Callable[..., Any]]


@contextmanager
def lengths_assumed(module: str, assume: Assume) -> Iterator[None]:
    """Give the lengths that models of an imported module predict (`PREDICTED`) values within the context."""
    with ExitStack() as stack:
        for name, method, wrap in PREDICTED[module]:
            cls = getattr(sys.modules[module], name)
            function = wrap(assume, getattr(cls, method))
            static = isinstance(vars(cls).get(method), staticmethod)
            stack.enter_context(mock.patch.object(cls, method, staticmethod(function) if static else function))
        yield


def _even_patches(assume: Assume, cut: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return BLT's `cut` with entropies [samples, bytes] that start patches of equal size.

    A patch begins where the next byte's entropy is above the threshold.
    """

    def lengths(entropies: Tensor, sequence_length: int, patch_size: int, threshold: float) -> Tensor:
        place = torch.arange(entropies.shape[1], device="cpu")
        real = torch.where(place % patch_size == 0, threshold + 1, threshold - 1).to(entropies.dtype)
        assume(entropies, real.expand(entropies.shape), PATCHES.format(patch_size))
        return cut(entropies, sequence_length, patch_size=patch_size, threshold=threshold)

    return lengths


def _even_durations(assume: Assume, predict: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return VITS' `predict` with assumed logarithms of durations [samples, 1, tokens].

    `VitsModel.forward` rounds the durations up (modeling_vits.py).
    """

    def durations(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        out = predict(self, *args, **kwargs)
        assume(out, torch.full(out.shape, FRAMES - 0.5, device="cpu").log().to(out.dtype), DURATIONS)
        return out

    return durations


def _whole_durations(assume: Assume, predict: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return FastSpeech 2's `predict` with assumed durations in frames [samples, tokens].

    In training they are logarithms, on which no length depends.
    """

    def durations(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        out = predict(self, *args, **kwargs)
        if not out.is_floating_point():
            assume(out, torch.full(out.shape, FRAMES, device="cpu"), DURATIONS)
        return out

    return durations


PREDICTED: dict[str, tuple[tuple[str, str, Wrap], ...]] = {
    "transformers.models.blt.modeling_blt": (("BltPatcher", "patch_lengths_from_entropies", _even_patches),),
    "transformers.models.fastspeech2_conformer.modeling_fastspeech2_conformer": (
        ("FastSpeech2ConformerDurationPredictor", "forward", _whole_durations),
    ),
    "transformers.models.vits.modeling_vits": (
        ("VitsStochasticDurationPredictor", "forward", _even_durations),
        ("VitsDurationPredictor", "forward", _even_durations),
    ),
}


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

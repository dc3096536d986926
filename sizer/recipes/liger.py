"""Liger's layers in a model of transformers, as `use_liger_kernel=True` of transformers' and TRL's trainers puts them there.

liger_kernel's own functions change the model (liger_kernel/transformers/monkey_patch.py, 0.8), without its loss, as TRL's trainers
pass `fused_linear_cross_entropy=False`. They also change modules of transformers and PyTorch, which are put back.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from sizer.architecture.peft_adapters import base_of
from sizer.base.errors import BuildError, Refusal, RequestError, suggest

PACKAGE, MODULE = "liger-kernel", "liger_kernel"
_CHANGED = ("transformers.models.", "transformers.loss.")  # prefixes of modules with functions and classes that Liger replaces
_LOSS = {"fused_linear_cross_entropy": False}
_ABSENT = object()


@cache
def _types() -> tuple[str, ...]:
    """Return the model types for which the installed Liger has layers, none if it is not installed.

    The table is read as text, because Liger's imports query the device.
    """
    if (spec := find_spec(MODULE)) is None:
        return ()
    folder = Path(next(iter(spec.submodule_search_locations or ()), ""))
    source = (folder / "transformers" / "monkey_patch.py").read_text(encoding="utf-8")
    return tuple(re.findall(r'^    "(\w+)": apply_liger_kernel_to_\w+,$', source, re.MULTILINE))


def has_layers(module: nn.Module) -> bool:
    """Return True if the installed Liger has layers for the type of a model, which may have an adapter."""
    return getattr(getattr(base_of(module), "config", None), "model_type", None) in _types()


def check_liger(asked: bool, module: nn.Module) -> None:
    """Check that a model supports Liger's layers here, if they are requested.

    Raises:
        BuildError: liger-kernel is not installed.
        RequestError: Liger has no layers for the type of the model.
    """
    if not asked or has_layers(module):
        return
    if find_spec(MODULE) is None:
        raise BuildError(f"{PACKAGE} is not installed", given="liger=1", todo=f"pip install {PACKAGE}")
    kind = getattr(getattr(base_of(module), "config", None), "model_type", type(base_of(module)).__name__)
    raise RequestError(
        f"liger: the installed {PACKAGE} has no layers for the type {kind}",
        given="1",
        allowed="model types that it supports, such as llama",
        todo=suggest(kind, _types()) or "remove it",
    )


@contextmanager
def _explained(kind: str) -> Iterator[None]:
    """Turn a failure of Liger to change a type of model into a RequestError: its table has types of other transformers, too."""
    try:
        yield
    except (ImportError, AttributeError, TypeError, ValueError, NotImplementedError) as error:
        why = str(error).partition(" (/")[0]  # without the path of a module
        refusal = Refusal(
            key="liger",
            given=f"1 with a model of the type {kind}",
            allowed=f"types that {PACKAGE} {version(PACKAGE)} can change in transformers {version('transformers')}: {why}",
            todo="remove it, or install versions that fit",
        )
        raise RequestError(refusals=[refusal]) from error


def _check_adapted(model: nn.Module, changed: list[tuple[dict[str, Any], str, object]]) -> None:
    """Raise RequestError if Liger has replaced the forward function of a PEFT layer around the model's own layer.

    Liger's function reads attributes of the model's layer, which PEFT's layer does not have.
    """
    places = {id(place) for place, name, _ in changed if name == "forward"}
    for path, part in model.named_modules():
        if id(vars(part)) in places and hasattr(part, "base_layer"):
            refusal = Refusal(
                key="liger",
                given=f"1 with an adapter around {path}",
                allowed="1 with an adapter of other layers: Liger and PEFT both replace how this one computes, and the step fails",
                todo="ask for targets=attention, or remove liger",
            )
            raise RequestError(refusals=[refusal])


@contextmanager
def liger_layers(module: nn.Module) -> Iterator[None]:
    """Give a model, which may have an adapter, Liger's layers within the context.

    Raises:
        RequestError: Liger cannot change the model, or replaces a layer inside an adapter.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance

    model = base_of(module)
    function = MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type]
    switches = [name for name, one in inspect.signature(function).parameters.items() if isinstance(one.default, bool)]
    with _explained(model.config.model_type):
        function(**dict.fromkeys(switches, False))  # changes nothing, but imports the modules that it would change
    changed = [nn, nn.functional, *(one for name, one in sys.modules.items() if name.startswith(_CHANGED))]
    places = [*map(vars, changed), *(place for one in model.modules() for place in (vars(one), one._modules))]
    before = [dict(place) for place in places]
    undo: list[tuple[dict[str, Any], str, object]] = []
    # warnings about other backends that are not installed; their errors keep the tensors of their calls alive
    log = logging.getLogger(MODULE)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        try:
            with _explained(model.config.model_type):
                _apply_liger_kernel_to_instance(model, **_LOSS)
        finally:
            for place, old in zip(places, before, strict=True):
                undo += [(place, name, old.get(name, _ABSENT)) for name in place if place[name] is not old.get(name, _ABSENT)]
        _check_adapted(model, undo)
        yield
    finally:
        log.setLevel(level)
        for place, name, value in undo:
            if value is _ABSENT:
                place.pop(name, None)
            else:
                place[name] = value

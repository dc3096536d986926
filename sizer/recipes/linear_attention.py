"""Linear attention of transformers' models by flash-linear-attention, which transformers calls where the package is installed.

A model's file chooses when it is imported (transformers/integrations/hub_kernels.py, use_kernel_func_from_hub_with_fallback, 5.24):
the package's function, or the function of PyTorch's operators that the file has itself. An answer must not depend on installed
packages, so the file is imported without them, and the choice is made anew for each step.

*Known limitation*: the packages causal-conv1d and mamba-ssm have kernels in C++, which need a device. Their functions are always
transformers' own.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import warnings
from collections.abc import Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec, module_from_spec
from types import FunctionType, ModuleType
from typing import Any, NoReturn
from unittest import mock

from torch import nn

from sizer.architecture.compile_later import compiled_when_called
from sizer.base.errors import BuildError, RequestError
from sizer.catalogue.linear_attention import MODULE, NEEDED, PACKAGE

_OTHERS = ("causal_conv1d", "mamba_ssm")
_OF_MODELS, _FAMILIES = "transformers.models.", f"{MODULE}.ops"
_WITHOUT = (
    "linear attention runs in transformers' own loop over chunks, as without flash-linear-attention; the package is faster and "
    "takes less memory (fla=1)"
)
_WITH = "linear attention runs in flash-linear-attention's kernels; its convolutions are PyTorch's, as without causal-conv1d"
_LOADED: dict[Hashable, dict[str, ModuleType]] = {}  # the package's modules, by the GPU for which it was imported


@contextmanager
def kernel_packages_hidden() -> Iterator[None]:
    """Import modules within the context as if the packages with kernels were not installed."""
    names = (MODULE, *_OTHERS)
    before = {name: sys.modules[name] for name in names if name in sys.modules}  # other code may have imported them
    hidden: dict[str, Any] = dict.fromkeys(names)  # None: `import` raises ModuleNotFoundError
    sys.modules.update(hidden)
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)


def has_linear_attention(module: nn.Module) -> bool:
    """Return True if flash-linear-attention has functions for a model of transformers."""
    return any(True for _ in _functions_of(module))


def check_linear_attention(asked: bool, model: nn.Module) -> None:
    """Check that flash-linear-attention can run a model's linear attention here, if it is requested.

    Raises:
        BuildError: A package is not installed.
        RequestError: It has no functions for the model.
    """
    if not asked:
        return
    if not has_linear_attention(model):
        raise RequestError(
            f"fla: {type(model).__name__} has no linear attention that {PACKAGE} computes",
            given="1",
            allowed="models that call it, such as Qwen3-Next, Qwen3.5 and Kimi Linear",
            todo="remove it",
        )
    missing = [name for name, module in NEEDED.items() if find_spec(module) is None]
    if missing:
        raise BuildError(f"{missing[0]} is not installed", given="fla=1", todo=f"pip install {' '.join(missing)}")


def notes_on(asked: bool, module: nn.Module) -> Iterator[str]:
    """Yield a note on the code that runs a model's linear attention, if it has any."""
    if has_linear_attention(module):
        yield _WITH if asked else _WITHOUT


@contextmanager
def linear_attention(module: nn.Module, *, by_package: bool) -> Iterator[None]:
    """Make a model's linear attention run by flash-linear-attention, or by transformers' own code, within the context.

    Raises:
        BuildError: The package cannot be imported. transformers would use its own code.
    """
    with ExitStack() as stack:
        for place, name, function in _functions_of(module):
            if by_package or _facts_of(function)["is_new_implementation"]:
                stack.enter_context(mock.patch.object(place, name, _chosen(function, by_package=by_package)))
        yield


def _chosen(function: FunctionType, *, by_package: bool) -> FunctionType:
    """Return what transformers makes of a function with the package, or without it."""
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

    facts = _facts_of(function)
    packages = compiled_when_called() if by_package else kernel_packages_hidden()
    with packages, warnings.catch_warnings(action="ignore"):
        if by_package:
            with suppress(Exception):  # transformers takes any for a missing package
                _import_families_later()
        made = use_kernel_func_from_hub_with_fallback(facts["func_name"], MODULE)(facts["torch_function"])
    if by_package and not _facts_of(made)["is_new_implementation"]:
        _explain_import(facts["func_name"])
    return made


def _import_families_later() -> None:
    """Import the package without its families of functions: transformers imports its own, all others take a second."""
    package: Any = importlib.import_module(MODULE)
    if _FAMILIES not in sys.modules and (spec := find_spec(_FAMILIES)) is not None:
        sys.modules[_FAMILIES] = package.ops = module_from_spec(spec)


def _explain_import(function: str) -> NoReturn:
    """Raise BuildError with the reason for which transformers found no function of the package."""
    reason = f"it has no {function}"
    _take_modules()
    try:
        importlib.import_module(_FAMILIES)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    raise BuildError(f"{PACKAGE} cannot be used: {reason}", given="fla=1", todo="install another version")


def _facts_of(function: FunctionType) -> Mapping[str, Any]:
    return inspect.getclosurevars(function).nonlocals


@contextmanager
def imported_for(gpu: Hashable) -> Iterator[None]:
    """Import the package for a GPU within the context: its import asks for the device (fla/utils/hardware.py, 0.6)."""
    before = _take_modules()
    sys.modules.update(_LOADED.get(gpu, {}))
    try:
        with mock.patch.dict(os.environ):  # it sets TRITON_F32_DEFAULT on some devices
            yield
    finally:
        _LOADED[gpu] = _take_modules()
        sys.modules.update(before)


def _take_modules() -> dict[str, ModuleType]:
    """Remove the package's modules, and return them by name."""
    names = [name for name in sys.modules if name == MODULE or name.startswith(f"{MODULE}.")]
    return {name: sys.modules.pop(name) for name in names}


def _functions_of(module: nn.Module) -> Iterator[tuple[ModuleType, str, FunctionType]]:
    """Yield the functions of a model's files that transformers takes from the package where it is installed, with their places."""
    kinds = dict.fromkeys(kind for part in module.modules() for kind in type(part).__mro__)  # FSDP2 changes the class of a part
    files = dict.fromkeys(kind.__module__ for kind in kinds if kind.__module__.startswith(_OF_MODELS))
    for place in map(sys.modules.__getitem__, files):
        for name, function in list(vars(place).items()):
            is_wrapped = isinstance(function, FunctionType) and hasattr(function, "__wrapped__")
            if is_wrapped and _facts_of(function).get("package") == MODULE:
                yield place, name, function

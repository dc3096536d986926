"""Placeholders for modules with a long import time of which eager code uses only one or two functions.

| module | seconds | who imports it (torchvision 0.26, PyTorch 2.15) |
|---|---|---|
| torch._dynamo | 1.1 | torchvision/ops/roi_align.py; torch/_compile.py; torch/optim/optimizer.py; transformers/masking_utils.py |
| torch.fx.experimental.symbolic_shapes | 0.1 | `torch._check`, and meta kernels that compare shapes |
| sympy | 0.2 | torch/_prims_common/__init__.py, `elementwise_dtypes` |
| scipy.optimize | 0.3 | transformers/loss/loss_for_object_detection.py, 5.24 |
| scipy.stats | 0.5 | diffusers/schedulers, 0.42, for the schedule `beta` |
| scipy.integrate | 0.2 | diffusers/schedulers/scheduling_lms_discrete.py, 0.42 |
| torchvision | 0.14 | transformers/image_utils.py; losses and validators of configs read one or two of its names |
| torch.export | 0.14 | torch/__init__.py; torch/onnx/_internal/exporter/_dynamic_shapes.py |
| torchvision.datasets | 0.03 | torchvision/__init__.py |
| torch.onnx | 0.03 | torchvision/ops/_register_onnx_ops.py, so that convolutions of boxes can be exported |

A placeholder implements the functions that are used with plain numbers. Any other attribute, submodule or kind of value loads
the real module, which then replaces the placeholder.

*Known limitations*: a function that was wrapped by the placeholder's `disable` is not hidden from code that is compiled later.
For questions with compiled code the worker imports the real modules that Dynamo reads.
"""

from __future__ import annotations

import functools
import importlib
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any, Unpack

DYNAMO, SHAPES, SYMPY = "torch._dynamo", "torch.fx.experimental.symbolic_shapes", "sympy"
OPTIMIZE, STATS, INTEGRATE = "scipy.optimize", "scipy.stats", "scipy.integrate"
EXPORT, DATASETS = "torch.export", "torchvision.datasets"
_ONNX, _IMAGES = "torchvision.ops._register_onnx_ops", "transformers.image_utils"
_TRANSFORMS, _VIDEOS = "transformers.image_transforms", "transformers.video_utils"
_PROCESSORS = "transformers.processing_utils"
_UTILS, _MASKS = f"{DYNAMO}.utils", f"{DYNAMO}._trace_wrapped_higher_order_op"
_PARTS = (DYNAMO, _UTILS, _MASKS)
_PACKAGES = (DYNAMO, SYMPY, OPTIMIZE, STATS, INTEGRATE, EXPORT, DATASETS)


class _Placeholder(ModuleType):
    """A module that is imported when an attribute is read that it does not have."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in ("__all__", "__version__"):
            raise AttributeError(name)  # names that the import system and inspect look up, and that may be missing
        return getattr(load_real(self.__name__), name)


class _EvalFrame:
    """Replacement of `torch._dynamo.eval_frame`, an attribute: libraries check whether a module is one that was compiled."""

    OptimizedModule = type("OptimizedModule", (), {})

    def __getattr__(self, name: str) -> Any:
        return getattr(load_real(DYNAMO).eval_frame, name)


class _Loader:
    """Returns a module that importing its package has imported already."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _Finder:
    """Finds a submodule of a placeholder, after it has loaded the real package."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = next((one for one in _PACKAGES if name.startswith(f"{one}.")), None)
        if package is None or not isinstance(sys.modules.get(package), _Placeholder):
            return None
        real = load_real(package)
        if (known := sys.modules.get(name)) is not None:
            loader: Any = _Loader(known)
            return ModuleSpec(name, loader, is_package=hasattr(known, "__path__"))
        return PathFinder.find_spec(name, real.__path__)


def import_torch() -> None:
    """Import PyTorch without `torch.export` and NVIDIA's Python bindings, 0.04 s (torch/cuda/_utils.py, 2.15)."""
    if "torch" not in sys.modules:
        _put_missing({EXPORT: {}})
        with hidden("cuda.bindings"):
            importlib.import_module("torch")


def install_unrelated() -> None:
    """Replace modules that also a compiler does not need by placeholders, if not imported yet."""
    _put_missing(
        {
            OPTIMIZE: {"linear_sum_assignment": _deferred(OPTIMIZE, "linear_sum_assignment")},
            STATS: {},
            INTEGRATE: {},
            DATASETS: {},
            _ONNX: {"_register_custom_op": lambda: None},
        }
    )


def install() -> None:
    """Replace modules that are not imported yet by placeholders. PyTorch is imported here."""
    import_torch()
    import torch
    import torch.fx.experimental._config  # the real module of shapes imports it, and its users read it

    wanted: dict[str, dict[str, Any]] = {
        DYNAMO: {
            "disable": _disable,
            "graph_break": lambda msg="": None,
            "allow_in_graph": _as_it_is,
            "assume_constant_result": _as_it_is,
            "eval_frame": _EvalFrame(),
        },
        _UTILS: {"is_compile_supported": lambda device_type: load_real(_UTILS).is_compile_supported(device_type)},
        _MASKS: {"TransformGetItemToIndex": lambda: _load_alone(_MASKS).TransformGetItemToIndex()},
        SHAPES: {name: _of_numbers(name, function) for name, function in _SHAPE_FUNCTIONS.items()}
        | {"GuardOnDataDependentSymNode": type("GuardOnDataDependentSymNode", (RuntimeError,), {})},
        SYMPY: {"Basic": type("Basic", (), {})},
    }
    _put_missing(wanted)
    install_unrelated()
    if isinstance(torch.__dict__.get("_dynamo", sys.modules[DYNAMO]), _Placeholder):
        torch._dynamo = sys.modules[DYNAMO]
        sys.modules[DYNAMO].__dict__["utils"] = sys.modules[_UTILS]


def install_transformers() -> None:
    """Replace transformers' modules for images by placeholders, if not imported yet: most models do not use them."""
    if find_spec("PIL") is None:
        return  # transformers then works without it, too
    from PIL.Image import Resampling

    corners = "center_to_corners_format"
    _put_missing(
        {
            _IMAGES: {"PILImageResampling": Resampling},
            _TRANSFORMS: {corners: _deferred(_TRANSFORMS, corners)},
            _VIDEOS: {"VideoMetadataType": Any},  # used only in annotations, as the next one
            _PROCESSORS: {"Unpack": Unpack},
        }
    )


def import_undistributed() -> None:
    """Import transformers as with a PyTorch that was built without `torch.distributed`, for work on one device.

    It then skips its multi-device modules and the PyTorch modules that they import, 0.25 s (transformers/distributed, 5.24).
    """
    import torch
    from transformers.utils import import_utils

    found = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        import_utils.is_torch_distributed_available()  # transformers caches its answer
    finally:
        torch.distributed.is_available = found


@contextmanager
def hidden(name: str) -> Iterator[None]:
    """Prevent the import of a package that is not imported yet, within the context.

    Numba works without scipy, which takes 0.15 s.
    """
    hides = name not in sys.modules
    if hides:
        sys.modules[name] = None  # type: ignore[assignment] # documented: its import then fails
    try:
        yield
    finally:
        if hides:
            del sys.modules[name]


def load_real(name: str) -> ModuleType:
    """Return a real module, imported in place of its placeholder."""
    for one in _PARTS if name in _PARTS else (name,):
        if isinstance(sys.modules.get(one), _Placeholder):
            del sys.modules[one]
    torch = sys.modules["torch"]
    if name in _PARTS and isinstance(torch.__dict__.get("_dynamo"), _Placeholder):
        del torch._dynamo
    return importlib.import_module(name)


def _load_alone(name: str) -> ModuleType:
    """Return a submodule that needs nothing of its package, imported in the place of its placeholder, without the package."""
    package, _, _ = name.rpartition(".")
    if not isinstance(sys.modules.get(package), _Placeholder):
        return load_real(name)
    folders = sys.modules["torch"].__path__
    spec = PathFinder.find_spec(name, [os.path.join(folder, package.rpartition(".")[2]) for folder in folders])
    assert spec is not None and spec.loader is not None, f"{name} is a file"
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _put_missing(wanted: Mapping[str, Mapping[str, Any]]) -> None:
    for name, attributes in wanted.items():
        if name not in sys.modules:
            _put(name, attributes)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _put(name: str, attributes: Mapping[str, Any]) -> None:
    inner = name in _PARTS[1:]
    spec = None if inner else _find_spec(name)
    if spec is None and not inner:
        return  # it is not installed
    module = _Placeholder(name)
    module.__spec__ = spec
    if name in _PACKAGES:
        module.__path__ = []  # importing a submodule calls `_Finder`
    module.__dict__.update(attributes)
    sys.modules[name] = module


def _find_spec(name: str) -> ModuleSpec | None:
    """Return the location of a module, without importing its parent packages; None if it is not installed."""
    parent, _, _ = name.rpartition(".")
    if not parent:
        return PathFinder.find_spec(name)
    above = _find_spec(parent)
    return above and PathFinder.find_spec(name, above.submodule_search_locations)


def _of_numbers(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of numbers, booleans and lists of them, which calls the real one for anything else, such as symbols."""

    def answer(*values: Any, **options: Any) -> Any:
        known = all(map(_is_plain, values))
        return function(*values) if known else getattr(load_real(SHAPES), name)(*values, **options)

    return answer


def _is_plain(value: Any) -> bool:
    return type(value) in (int, bool) or (isinstance(value, (list, tuple)) and all(map(_is_plain, value)))


def _first(value: Any, *others: Any) -> Any:
    return value


# Return values of torch/fx/experimental/symbolic_shapes.py, 2.15, for numbers and booleans that are not symbols
_SHAPE_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        ("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious", "statically_known_true"), _first
    ),
    "guarding_hint_or_throw": _first,
    "has_free_unbacked_symbols": lambda value: False,
    "has_guarding_hint": lambda value: True,
    "is_nested_int": lambda value: False,
    "sym_and": lambda *values: functools.reduce(operator.and_, values),
    "sym_or": lambda *values: functools.reduce(operator.or_, values),
    "sym_eq": lambda left, right: (tuple(left) == tuple(right)) if isinstance(left, (list, tuple)) else left == right,
}


def _deferred(module: str, name: str) -> Callable[..., Any]:
    """Return a function that calls the real module's function."""
    return lambda *values, **options: getattr(load_real(module), name)(*values, **options)


def _disable(
    fn: Any = None, recursive: bool = True, *, reason: str | None = None, wrapping: bool = True
) -> Callable[..., Any]:
    """Return a function unchanged: nothing is compiled, so it needs no exclusion."""
    return (lambda function: function) if fn is None else fn


def _as_it_is(function: Any) -> Any:
    return function

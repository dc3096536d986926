"""flash-linear-attention, and the types of transformers' models that call it. Imports neither torch nor the package."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

PACKAGE, MODULE = "flash-linear-attention", "fla"
NEEDED = {PACKAGE: MODULE, "triton": "triton"}  # distributions, and the module of each


@cache
def is_installed() -> bool:
    """Return True if flash-linear-attention and Triton are installed."""
    return all(map(find_spec, NEEDED.values()))


@cache
def calls_package(model_type: str) -> bool:
    """Return True if the model type's file in transformers calls flash-linear-attention, as in `("chunk_kda", "fla")`."""
    if (spec := find_spec("transformers")) is None or not model_type.isidentifier():
        return False
    folder = Path(next(iter(spec.submodule_search_locations or ()), ""), "models", model_type)
    file = folder / f"modeling_{model_type}.py"
    return file.is_file() and f'", "{MODULE}")' in file.read_text(encoding="utf-8")

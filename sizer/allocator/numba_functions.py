"""Functions compiled by Numba, at import and for given types, and cached on disk if Numba finds a folder for them.

Without Numba they run unchanged.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from pathlib import Path

try:
    import numba
except ImportError:
    numba = None

COMPILED = numba is not None


def compiled(signature: str) -> Callable[[Callable], Callable]:
    """Return a decorator that compiles a function for these types; without Numba it returns the function itself."""

    def compile_it(function: Callable) -> Callable:
        if numba is None:
            return function
        function.__qualname__ += f"_{_stamp(Path(function.__code__.co_filename).parent):08x}"  # the name in the cache
        try:
            return numba.njit(signature, cache=True)(function)
        except RuntimeError:  # no folder for the cache is writable
            return numba.njit(signature)(function)

    return compile_it


def compiled_within(function: Callable) -> Callable:
    """Compile a function into each of the compiled ones that call it; return the function itself without Numba."""
    return function if numba is None else numba.njit(function)


@functools.cache
def _stamp(folder: Path) -> int:
    """Return a number that changes with any file in the folder or in this one.

    Numba only checks whether the file of a cached function has changed, not the files of functions that it calls.
    """
    files = {path for beside in (folder, Path(__file__).parent) for path in beside.glob("*.py")}
    return zlib.crc32(b"".join(path.read_bytes() for path in sorted(files)))

"""Functions compiled by Numba, at once and for given types, and kept on disk where it finds a folder for them.

Without Numba they are run as they stand.
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
    """A decorator that compiles a function of these types; it is the function itself where there is no Numba."""

    def compile_it(function: Callable) -> Callable:
        if numba is None:
            return function
        function.__qualname__ += f"_{_stamp(Path(function.__code__.co_filename).parent):08x}"  # which it is kept by
        try:
            return numba.njit(signature, cache=True)(function)
        except RuntimeError:  # no folder to keep it in can be written
            return numba.njit(signature)(function)

    return compile_it


def compiled_within(function: Callable) -> Callable:
    """Compile a function into each of the compiled ones that call it; it is the function itself where there is no Numba."""
    return function if numba is None else numba.njit(function)


@functools.cache
def _stamp(folder: Path) -> int:
    """A number that changes with any file beside a function or here: of what was kept Numba asks only whether the file of that
    very function has changed, not those of which it calls functions."""
    files = {path for beside in (folder, Path(__file__).parent) for path in beside.glob("*.py")}
    return zlib.crc32(b"".join(path.read_bytes() for path in sorted(files)))

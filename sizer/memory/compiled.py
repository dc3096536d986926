"""Functions compiled by Numba, at once and for given types, and kept on disk where it finds a folder for them.

Without Numba they are run as they stand.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

try:
    import numba
except ImportError:
    numba = None

COMPILED = numba is not None

# Of what was kept Numba asks only whether the file of that very function has changed, not those of which it calls functions
_STAMP = zlib.crc32(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))))


def compiled(signature: str) -> Callable[[Callable], Callable]:
    """A decorator that compiles a function of these types; it is the function itself where there is no Numba."""

    def compile_it(function: Callable) -> Callable:
        if numba is None:
            return function
        function.__qualname__ += f"_{_STAMP:08x}"  # which it is kept by
        try:
            return numba.njit(signature, cache=True)(function)
        except RuntimeError:  # no folder to keep it in can be written
            return numba.njit(signature)(function)

    return compile_it

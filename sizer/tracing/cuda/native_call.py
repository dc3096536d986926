"""Calls of a shared library's functions by their addresses, from compiled code; without Numba through ctypes."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from sizer.allocator.compiled import COMPILED

# Every argument is passed as 64 bits, which a function of fewer or narrower ones reads the beginning of: so it is where arguments
# are passed in registers (the calling conventions of Linux and macOS on x86-64 and AArch64).
_ARGUMENTS = 6

if COMPILED:
    from numba.core import types
    from numba.core.cgutils import ir
    from numba.extending import intrinsic

    @intrinsic
    def call(typing_context, address, a, b, c, d, e, f):
        """What the function at an address returns (int32) for six integers."""
        signature = types.int32(*[types.int64] * (1 + _ARGUMENTS))

        def generate(context: Any, builder: Any, signature: Any, arguments: list) -> Any:
            kind = ir.FunctionType(ir.IntType(32), [ir.IntType(64)] * _ARGUMENTS)
            return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

        return signature, generate

else:

    def call(address: int, a: int, b: int, c: int, d: int, e: int, f: int) -> int:
        """What the function at an address returns (int32) for six integers."""
        return _function(int(address))(*map(int, (a, b, c, d, e, f)))


@functools.cache
def _function(address: int) -> Callable[..., int]:
    return ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_int64] * _ARGUMENTS)(address)

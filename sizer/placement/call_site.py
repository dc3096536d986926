"""The line of a model's code that called an operator, and whether it kept the result, read from Python's own frames."""

from __future__ import annotations

import dis
import functools
import itertools
import os
from pathlib import Path
from types import CodeType, FrameType

import torch

_TORCH = str(Path(torch.__file__).parent) + os.sep
_ROOM = str(Path(__file__).parent) + os.sep
_TRACING = str(Path(__file__).parents[1] / "tracing") + os.sep


def is_hidden(frame: FrameType) -> bool:
    """Return whether a frame is PyTorch's or Sizer's tracing, not the model's."""
    return frame.f_code.co_filename.startswith((_TORCH, _TRACING, _ROOM))


def line_of(frame: FrameType | None) -> str | None:
    """Return "file:line in function" of the innermost frame of the model's code, from `frame` outwards; None without one."""
    while frame is not None and is_hidden(frame):
        frame = frame.f_back
    return frame and f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_qualname}"


def drops_result(frame: FrameType) -> bool:
    """Return whether the call of a frame is a separate statement: its next instruction drops the result.

    *Known limitations*: reads CPython's byte code; elsewhere nothing is found. Tried on 3.11.
    """
    return frame.f_lasti in _dropping_calls(frame.f_code)


@functools.lru_cache(maxsize=4096)
def _dropping_calls(code: CodeType) -> frozenset[int]:
    """Return the offsets of the calls in a code object with a result that the next instruction pops off the stack.

    A frame may be at the call or at one of the inline caches after it, which `dis` leaves out.
    """
    return frozenset(
        offset
        for call, then in itertools.pairwise(dis.get_instructions(code))
        if call.opname.startswith("CALL") and then.opname == "POP_TOP"
        for offset in range(call.offset, then.offset, 2)
    )


@functools.lru_cache(maxsize=4096)
def _short(filename: str) -> str:
    """Return a file's name from its package on, or from the current folder."""
    path = Path(filename)
    for folder in ("site-packages", "dist-packages"):
        if folder in path.parts:
            return Path(*path.parts[path.parts.index(folder) + 1 :]).as_posix()
    return path.relative_to(Path.cwd()).as_posix() if path.is_relative_to(Path.cwd()) else path.as_posix()

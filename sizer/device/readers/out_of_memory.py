"""What PyTorch's sentences about memory that was not there say, in bytes. No torch here."""

from __future__ import annotations

import re
from dataclasses import dataclass

# CUDACachingAllocator.cpp's format_size writes "2.00 GiB", MPSAllocator.mm's "2.00 GB" or, later, "2.00 GiB": powers of two
# both; alloc_cpu.cpp writes "you tried to allocate 123 bytes".
_UNITS = {"bytes": 1, **{f"{letter}{end}": 1024**n for n, letter in enumerate("KMGT", 1) for end in ("B", "iB")}}
_SIZE = r"([\d.]+)\s*(bytes|[KMGT]i?B)\b"
_SIGNS = (
    "out of memory",
    "status_alloc_failed",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "bad_alloc",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemoryMessage:
    """Bytes that a sentence names, to its three digits; None for what it leaves out."""

    requested_bytes: int | None
    free_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None


def says_out_of_memory(text: str) -> bool:
    """Whether an error's text is about memory that was not there."""
    return any(sign in text.lower() for sign in _SIGNS)


def parse_message(text: str) -> OutOfMemoryMessage:
    """What the text of a torch.OutOfMemoryError (CUDA) or of the RuntimeError of MPS says."""
    allocated = _find(rf"{_SIZE} is allocated by PyTorch", text) or _find(rf"MPS allocated: {_SIZE}", text)
    cached = _find(rf"{_SIZE} is reserved by PyTorch but unallocated", text)
    allowed, others = _find(rf"max allowed: {_SIZE}", text), _find(rf"other allocations: {_SIZE}", text)
    left = None if None in (allowed, others, allocated) else max(0, allowed - others - allocated)
    return OutOfMemoryMessage(
        requested_bytes=_find(rf"[Tt]ried to allocate {_SIZE}", text),
        free_bytes=left if left is not None else _find(rf"of which {_SIZE} is free", text),
        allocated_bytes=allocated,
        reserved_bytes=None if allocated is None or cached is None else allocated + cached,
    )


def _find(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return None if match is None else round(float(match[1]) * _UNITS[match[2]])

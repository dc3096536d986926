"""What PyTorch's errors about memory that was not there say, in bytes. No torch here."""

from __future__ import annotations

import re

from sizer.device.record.measurement import DeviceOutOfMemory

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


def read_error(
    error: BaseException, phase: str, *, always: type[BaseException] | None = None
) -> DeviceOutOfMemory | None:
    """What an error says about memory that was not there, in bytes to its three digits, None for what it leaves out; None where
    it is of another kind than `always` and its text is about something else.

    Reads the text of a torch.OutOfMemoryError (CUDA) and of the RuntimeError of MPS or the CPU.
    """
    text = " ".join(str(error).split())
    if not (always and isinstance(error, always)) and not any(sign in text.lower() for sign in _SIGNS):
        return None
    allocated = _find(rf"{_SIZE} is allocated by PyTorch", text) or _find(rf"MPS allocated: {_SIZE}", text)
    cached = _find(rf"{_SIZE} is reserved by PyTorch but unallocated", text)
    allowed, others = _find(rf"max allowed: {_SIZE}", text), _find(rf"other allocations: {_SIZE}", text)
    left = None
    if allowed is not None and others is not None and allocated is not None:
        left = max(0, allowed - others - allocated)
    return DeviceOutOfMemory(
        phase=phase,
        requested_bytes=_find(rf"[Tt]ried to allocate {_SIZE}", text),
        free_bytes=left if left is not None else _find(rf"of which {_SIZE} is free", text),
        allocated_bytes=allocated,
        reserved_bytes=None if allocated is None or cached is None else allocated + cached,
        message=text,
    )


def _find(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return None if match is None else round(float(match[1]) * _UNITS[match[2]])

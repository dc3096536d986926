"""Diagnosis of PyTorch's out-of-memory messages and memory summaries: bytes allocated, cached, outside PyTorch, free and requested.

Formats: c10/cuda/CUDACachingAllocator.cpp (1.7 to 2.15) and CUDAMallocAsyncAllocator.cpp, aten/src/ATen/mps/MPSAllocator.mm
(2.0 to 2.15).

Errors of CUDA, cuBLAS and cuDNN state no sizes: the request did not go through PyTorch's allocator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from sizer.base.errors import ConfigError, quote
from sizer.base.units import format_bytes

_UNITS = {"bytes": 1, **{f"{letter}{end}": 1024**n for n, letter in enumerate("KMGT", 1) for end in ("B", "iB")}}
_SIZE = r"([\d.]+)\s*(bytes|[KMGT]i?B)\b"
_BY_CUDA = re.compile(
    r"CUDA error: out of memory|cuda runtime error \(2\)|CU(?:BLAS|DNN|SPARSE|SOLVER)_STATUS_ALLOC_FAILED"
    r"|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|Cuda failure 2 'out of memory'"
)
_SIGN = re.compile(r"out of memory|tried to allocate", re.IGNORECASE)
_BY_OTHERS = re.compile(r"RESOURCE_EXHAUSTED|ResourceExhaustedError|\bjaxlib\b|\btensorflow\b", re.IGNORECASE)
_OF_HOST = re.compile(r"DefaultCPUAllocator")
# Rows of torch.cuda.memory_summary(): the current and the peak value (torch/cuda/memory.py, 2.15).
_SUMMARY = re.compile(r"PyTorch CUDA memory summary")
_IN_TABLE = r"\|\s*{}\s*\|\s*([\d.]+) ([KMGT]i)?B\s*\|\s*([\d.]+) ([KMGT]i)?B\s*\|"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Figures of a message in bytes, to its three digits; None for missing ones.

    `outside_bytes` are all outside of PyTorch's allocator, `others_bytes` those of other processes among them. `pools_bytes`
    are allocated in private pools. `error` is an error of CUDA or one of its libraries, which states no sizes. `place` is the
    memory that a message is about: of a CUDA device, of Metal, or of the host. The peaks are those of a summary.
    """

    requested_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    cached_bytes: int | None = None
    outside_bytes: int | None = None
    others_bytes: int | None = None
    pools_bytes: int | None = None
    error: str | None = None
    place: Literal["CUDA", "Metal", "host"] = "CUDA"
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None

    @property
    def reserved_bytes(self) -> int | None:
        """Return the allocator's reserved bytes: allocated and cached."""
        if self.allocated_bytes is None or self.cached_bytes is None:
            return None
        return self.allocated_bytes + self.cached_bytes

    @property
    def is_fragmented(self) -> bool:
        """Return True if the request was smaller than the cached memory: no cached block was large enough."""
        if self.requested_bytes is None or self.cached_bytes is None:
            return False
        return self.cached_bytes >= self.requested_bytes > 0

    def lines(self) -> Iterator[str]:
        """Yield the diagnosis in plain words."""
        if self.error is not None:
            yield f"{self.error}: CUDA itself had no memory left, for its context, a library's handle or a kernel."
            yield "The request did not go through PyTorch's allocator, so the message has no sizes."
            yield "torch.cuda.empty_cache() before the call leaves it more memory; so does set_per_process_memory_fraction(0.9)."
        if self.place == "host":
            yield "The host's memory was used up, not a device's."
        if self.peak_allocated_bytes is not None and self.peak_reserved_bytes is not None:
            peaks = map(format_bytes, (self.peak_allocated_bytes, self.peak_reserved_bytes))
            yield "Peaks of the summary: {} allocated, {} reserved.".format(*peaks)
        if self.requested_bytes is not None:
            free = f"; {format_bytes(self.free_bytes)} were free" if self.free_bytes is not None else ""
            yield f"The failed request was for {format_bytes(self.requested_bytes)}{free}."
        if self.allocated_bytes is not None:
            yield f"Live tensors used {format_bytes(self.allocated_bytes)}{self._share(self.allocated_bytes)}."
        if self.pools_bytes:
            yield f"{format_bytes(self.pools_bytes)} of them are in private pools, such as those of CUDA graphs."
        if self.cached_bytes is not None:
            yield f"The allocator had cached {format_bytes(self.cached_bytes)} more{self._share(self.cached_bytes)}."
        if self.outside_bytes is not None:
            outside = format_bytes(self.outside_bytes)
            whose = "other allocations of Metal" if self.place == "Metal" else "the CUDA context, libraries and other processes"
            yield f"{outside} were outside of PyTorch's allocator: {whose}."
        if self.others_bytes:
            yield f"Other processes used {format_bytes(self.others_bytes)}{self._share(self.others_bytes)}: nvidia-smi names them."
        if self.is_fragmented:
            yield (
                "Fragmentation: more was cached than requested, but no cached block was large enough. "
                "PYTORCH_ALLOC_CONF=expandable_segments:True can help."
            )
        elif self.requested_bytes is not None and self.cached_bytes is not None:
            yield "Fragmentation is not the cause: less was cached than requested."
        if self.requested_bytes is not None and self.allocated_bytes is not None and self.total_bytes is not None:
            short = self.allocated_bytes + self.requested_bytes + (self.outside_bytes or 0) - self.total_bytes
            if short > 0:
                yield f"Even without any cached memory, at least {format_bytes(short)} are missing for this request."

    def _share(self, size: int) -> str:
        return f" ({100 * size / self.total_bytes:.0f} % of the device)" if self.total_bytes else ""


def is_message(text: str) -> bool:
    """Return True if a text is about memory that was not there, or PyTorch's summary of memory."""
    if _SUMMARY.search(text) is not None:
        return True
    return _BY_CUDA.search(text) is not None or (_SIGN.search(text) is not None and re.search(_SIZE, text) is not None)


def read_message(text: str) -> Diagnosis:
    """Return the diagnosis of a message. Raises ConfigError for a text that states no size of a request."""
    if _SUMMARY.search(text) is not None:
        return _read_summary(text)
    words = " ".join(text.split())
    if _BY_OTHERS.search(words) is not None:
        raise ConfigError(
            "this message is not PyTorch's", given=quote(words, 120), todo="choose the model and the device for PyTorch's memory"
        )
    requested = _find(rf"(?:[Tt]ried to allocate|Requested\s*:) {_SIZE}", words)
    limit = rf"(?:total capaci?ty of|max allowed:|Device limit\s*:) {_SIZE}"  # "capacty" in 2.0 and 2.1
    total = _find(limit, words) or _find(rf"{_SIZE} total capacity", words)
    free = _find(rf"(?:of which|Free \(according to CUDA\)\s*:) {_SIZE}", words) or _find(rf"; {_SIZE} free", words)
    held = rf"(?:allocated memory|MPS allocated:|Currently allocated\s*:) {_SIZE}"
    allocated = _find(held, words) or _find(rf"{_SIZE} already allocated", words)
    cached = _find(rf"{_SIZE} is reserved by PyTorch but unallocated", words)
    if cached is None and allocated is not None and (reserved := _find(rf"{_SIZE} reserved in total", words)) is not None:
        cached = max(reserved - allocated, 0)
    if requested is None and allocated is None and (error := _BY_CUDA.search(words)) is not None:
        return Diagnosis(error=error[0])
    if requested is None and allocated is None:
        raise ConfigError("this message states no sizes", given=quote(words, 120), todo="paste the complete line of the error")
    outside = _find(rf"other allocations: {_SIZE}", words)
    if outside is None and total is not None and free is not None and allocated is not None and cached is not None:
        outside = max(total - free - allocated - cached, 0)
    others = [_bytes_of(found) for found in re.finditer(rf"Process \d+ has {_SIZE} memory in use", words)]
    if "this process has" not in words:  # which is one of those listed, and the largest if the job is alone
        others = []
    place: Literal["CUDA", "Metal", "host"] = "host" if _OF_HOST.search(words) else "Metal" if "MPS backend" in words else "CUDA"
    return Diagnosis(
        place=place,
        requested_bytes=requested,
        total_bytes=total,
        free_bytes=free,
        allocated_bytes=allocated,
        cached_bytes=cached,
        outside_bytes=outside,
        others_bytes=sum(others) or None,
        pools_bytes=_find(rf"with {_SIZE} allocated in private pools", words),
    )


def _read_summary(text: str) -> Diagnosis:
    """Return the diagnosis of torch.cuda.memory_summary(). Raises ConfigError if the rows of memory are missing."""
    allocated, reserved = (re.search(_IN_TABLE.format(row), text) for row in ("Allocated memory", "GPU reserved memory"))
    if allocated is None or reserved is None:
        raise ConfigError("this summary has no rows of memory", given="PyTorch CUDA memory summary", todo="paste the whole table")
    (now, peak), (held, most) = (
        tuple(round(float(row[at]) * _UNITS.get(f"{row[at + 1] or ''}B", 1)) for at in (1, 3)) for row in (allocated, reserved)
    )
    cached = max(held - now, 0)
    return Diagnosis(allocated_bytes=now, cached_bytes=cached, peak_allocated_bytes=peak, peak_reserved_bytes=most)


def _find(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return None if found is None else _bytes_of(found)


def _bytes_of(found: re.Match[str]) -> int:
    return round(float(found[1]) * _UNITS[found[2]])

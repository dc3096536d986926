"""What PyTorch's sentences about missing memory say in bytes. The texts are those of PyTorch 2.4 to 2.13."""

from __future__ import annotations

import pytest

from sizer.device.readers.reader import read_error
from sizer.device.record.measurement import DeviceOutOfMemory

GIB, MIB = 2**30, 2**20
CUDA = (
    "CUDA out of memory. Tried to allocate 15.00 GiB. GPU 0 has a total capacity of 14.56 GiB of which 6.91 GiB is free. "
    "Including non-PyTorch memory, this process has 7.65 GiB memory in use. Of the allocated memory 7.23 GiB is allocated by "
    "PyTorch, and 301.94 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
EMPTY = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 8.00 GiB of which 0 bytes is free."
)
MPS = (
    "MPS backend out of memory (MPS allocated: 1024.00 MiB, other allocations: 384.00 KiB, max allowed: 2.00 GiB). Tried to "
    "allocate 1.50 GiB on shared pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory allocations."
)
OLD_MPS = (
    "MPS backend out of memory (MPS allocated: 42.33 GB, other allocations: 3.00 GB, max allowed: 45.90 GB). Tried to "
    "allocate 3.00 GB on private pool."
)


def read(text: str) -> tuple[int | None, ...] | None:
    """What the error says was requested, free, allocated and reserved, in bytes."""
    found = read_error(RuntimeError(text), "forward")
    if found is None:
        return None
    assert (found.phase, found.message) == ("forward", text)
    return found.requested_bytes, found.free_bytes, found.allocated_bytes, found.reserved_bytes


def words(
    requested: float, free: float | None, allocated: float | None, reserved: float | None
) -> tuple[int | None, ...]:
    return tuple(None if value is None else round(value) for value in (requested, free, allocated, reserved))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CUDA, words(15 * GIB, 6.91 * GIB, 7.23 * GIB, round(7.23 * GIB) + round(301.94 * MIB))),
        (EMPTY, words(20 * MIB, 0, None, None)),
        # 2 GiB allowed, 1024 MiB and 384 KiB taken
        (MPS, words(1.5 * GIB, GIB - 384 * 2**10, GIB, None)),
        (OLD_MPS, words(3 * GIB, round(45.9 * GIB) - 3 * GIB - round(42.33 * GIB), 42.33 * GIB, None)),
    ],
)
def test_a_sentence_in_bytes(text: str, expected: tuple[int | None, ...]) -> None:
    assert read(text) == expected


@pytest.mark.parametrize(
    "text", ["CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"]
)
def test_a_library_that_got_no_memory(text: str) -> None:
    assert read(text) == (None, None, None, None)


def test_an_error_of_a_kind_that_says_nothing_else() -> None:
    assert read_error(MemoryError(), "load") is None
    assert read_error(MemoryError(), "load", always=MemoryError) == DeviceOutOfMemory(
        phase="load", requested_bytes=None, free_bytes=None, allocated_bytes=None, reserved_bytes=None, message=""
    )


@pytest.mark.parametrize(
    "text", ["CUDA error: an illegal memory access was encountered", "no kernel image is available"]
)
def test_other_failures(text: str) -> None:
    assert read(text) is None

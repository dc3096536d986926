"""Out-of-memory messages of several versions of PyTorch, as diagnoses."""

from __future__ import annotations

import pytest

from sizer.base.errors import ConfigError
from sizer.pasted.out_of_memory import is_message, read_message

GIB, MIB = 2**30, 2**20
NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB "
    "of which 1.00 GiB is free. Including non-PyTorch memory, this process has 22.50 GiB memory in use. Of the allocated "
    "memory 19.00 GiB is allocated by PyTorch, and 3.00 GiB is reserved by PyTorch but unallocated."
)
OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate 610.00 MiB (GPU 0; 3.81 GiB total capacity; 1.77 GiB already allocated; "
    "531.69 MiB free; 1.82 GiB reserved in total by PyTorch)"
)
MPS = (
    "RuntimeError: MPS backend out of memory (MPS allocated: 9.00 GB, other allocations: 512.00 MB, max allowed: 9.07 GB). "
    "Tried to allocate 256.00 MB on private pool."
)


def test_a_message_of_today():
    found = read_message(NEW)
    assert (found.requested_bytes, found.total_bytes, found.free_bytes) == (2 * GIB, 24 * GIB, GIB)
    assert (found.allocated_bytes, found.cached_bytes, found.reserved_bytes) == (19 * GIB, 3 * GIB, 22 * GIB)
    assert found.outside_bytes == GIB  # 24 - 1 - 19 - 3
    assert found.is_fragmented, "3 GiB are cached, 2 were asked for"
    assert any(line.startswith("Fragmentation: more was cached") for line in found.lines())


def test_an_old_message():
    found = read_message(OLD)
    assert found.requested_bytes == 610 * MIB
    assert found.total_bytes == round(3.81 * GIB)
    assert found.cached_bytes == round(1.82 * GIB) - round(1.77 * GIB)
    assert not found.is_fragmented
    assert "Fragmentation is not the cause: less was cached than requested." in list(found.lines())


def test_a_message_of_mps():
    found = read_message(MPS)
    assert (found.allocated_bytes, found.outside_bytes, found.requested_bytes) == (9 * GIB, 512 * MIB, 256 * MIB)
    assert found.cached_bytes is None
    # 9 + 0.25 + 0.5 - 9.07 = 0.68 GiB
    assert list(found.lines())[-1] == "Even without any cached memory, at least 696.32 MiB are missing for this request."


OTHERS = NEW.replace("is free. ", "is free. Process 7 has 512.00 MiB memory in use. ").replace("capacity", "capacty").replace(
    "by PyTorch, and", "by PyTorch, with 128.00 MiB allocated in private pools (e.g., CUDA Graphs), and"
)
ASYNC = """torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)
Currently allocated     : 22.00 GiB
Requested               : 108.00 MiB
Device limit            : 23.00 GiB
Free (according to CUDA): 20.00 MiB"""


def test_other_processes_and_private_pools():
    found = read_message(OTHERS)
    assert (found.total_bytes, found.others_bytes, found.pools_bytes) == (24 * GIB, 512 * MIB, 128 * MIB)
    assert "Other processes used 512.00 MiB (2 % of the device): nvidia-smi names them." in list(found.lines())
    assert read_message(NEW).others_bytes is None


def test_a_message_of_the_asynchronous_allocator():
    found = read_message(ASYNC)
    assert (found.requested_bytes, found.total_bytes, found.free_bytes) == (108 * MIB, 23 * GIB, 20 * MIB)
    assert found.allocated_bytes == 22 * GIB


@pytest.mark.parametrize(
    "text", ["RuntimeError: CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"]
)
def test_an_error_of_cuda_has_no_sizes(text):
    assert is_message(text)
    found = read_message(text)
    assert found.error is not None and found.error in text and found.requested_bytes is None
    assert not found.is_fragmented and len(list(found.lines())) == 3


def test_shares_of_the_device():
    assert list(read_message(NEW).lines())[1] == "Live tensors used 19.00 GiB (79 % of the device)."


@pytest.mark.parametrize("text", ["CUDA out of memory.", "all is well", "base_model: x"])
def test_what_states_no_sizes_is_refused(text):
    assert not is_message(text)
    with pytest.raises(ConfigError, match="this message states no sizes"):
        read_message(text)

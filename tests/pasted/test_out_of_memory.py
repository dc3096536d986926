"""Out-of-memory messages of several versions of PyTorch, as diagnoses."""

from __future__ import annotations

import pytest
import torch

from sizer.base.errors import ConfigError
from sizer.pasted.out_of_memory import is_message, read_message
from sizer.pasted.reading import read_question

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


SUMMARY = """
|===========================================================================|
|                  PyTorch CUDA memory summary, device ID 0                 |
|        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |
|---------------------------------------------------------------------------|
| Allocated memory      |   4524 MiB |  14524 MiB |  48234 MiB |  33710 MiB |
|       from large pool |   4500 MiB |  14500 MiB |  48200 MiB |  33700 MiB |
| GPU reserved memory   |  14810 MiB |  14810 MiB |  14810 MiB |      0 B   |
"""


def test_pytorchs_summary():
    assert is_message(SUMMARY)
    found = read_message(SUMMARY)
    assert (found.allocated_bytes, found.reserved_bytes) == (4524 * MIB, 14810 * MIB)
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == (14524 * MIB, 14810 * MIB)
    assert found.requested_bytes is None and not found.is_fragmented
    assert "14.18 GiB" in " ".join(found.lines())
    with pytest.raises(ConfigError, match="no rows of memory"):
        read_message(SUMMARY.replace("GPU reserved memory", "GPU other memory"))


def test_pytorchs_own_summary_is_read():
    """torch.cuda.memory_summary() itself, of counters that are all 3 MiB."""
    kinds = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes", "inactive_split_bytes")
    counts = ("allocation", "segment", "active", "inactive_split")
    names = [f"{kind}.{pool}" for kind in (*kinds, *counts) for pool in ("all", "large_pool", "small_pool")]
    names += ["oversize_allocations", "oversize_segments"]
    stats = {f"{name}.{when}": 3 * MIB for name in names for when in ("current", "peak", "allocated", "freed")}
    stats |= {"num_alloc_retries": 0, "num_ooms": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.memory, "memory_stats", lambda device=None: stats)
        patch.setattr(torch.cuda.memory, "_get_device_index", lambda device, optional: 0)
        found = read_message(torch.cuda.memory_summary())
    assert (found.allocated_bytes, found.peak_allocated_bytes, found.peak_reserved_bytes) == (3 * MIB, 3 * MIB, 3 * MIB)


def test_the_hosts_memory_is_named():
    text = "[enforce fail at alloc_cpu.cpp:114] data. DefaultCPUAllocator: not enough memory: you tried to allocate 1024 bytes."
    found = read_message(text)
    assert (found.place, found.requested_bytes) == ("host", 1024)
    assert read_message(MPS).place == "Metal"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.", "not PyTorch's"),
        ("ResourceExhaustedError: OOM when allocating tensor with shape[32,512,512]", "not PyTorch's"),
        ("Killed", "the system killed the process"),
        ("ChildFailedError: exitcode : -9 (pid: 1) Signal 9 (SIGKILL) received by PID 1", "the system killed the process"),
        ("OutOfResources: out of resource: shared memory, Required: 147456, Hardware limit: 101376.", "shared memory"),
        ("ValueError: Some modules are dispatched on the CPU or the disk. Make sure you have enough GPU RAM", "accelerate found"),
        ("torch.OutOfMemoryError: Allocation on device ", "no sizes"),
    ],
)
def test_other_messages_are_refused_by_what_they_are(text, what):
    with pytest.raises(ConfigError, match=what):
        read_message(text) if is_message(text) else read_question(text, None)

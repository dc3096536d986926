"""Memory of a CUDA process outside PyTorch's allocator: the driver's context, loaded kernels, library handles.

The amount is undocumented, but each of PyTorch's out-of-memory messages contains it: the process' bytes minus those that
PyTorch allocated and reserved. `tests/measured/published/outside.csv` holds such messages, `python -m
tests.benchmarks.bench_outside` prints their statistics, and a test compares the numbers here with them. Two parts explain the
amounts:

- The driver reserves 2 KiB for every thread that can be resident. Bare contexts: 426 MiB on an RTX 6000 Ada with 142 * 1,536
  threads (exactly 2 KiB each), 386 on an RTX 4090, 414 on an A100, 516 on an H100. An RTX 4060 therefore needs a quarter of an
  RTX 4090's context.
- Libraries and loaded kernels come on top: some 50 to 150 MiB in the median, depending on the architecture. Runs that load many
  kernels, or in which other libraries allocate memory, need hundreds of MiB.

Messages of torch 2.2 and newer, on Linux; kernels are loaded lazily there. With CUDA_MODULE_LOADING=EAGER it is over 1 GiB.

Much less is known about AMD's and Intel's devices: CONTEXTS_BY_MAKER.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median_low

MIB = 2**20
BYTES_PER_THREAD = 2048

# Threads that can be resident on a multiprocessor. CUDA C++ Programming Guide 12.9, "Technical Specifications per Compute
# Capability".
THREADS_PER_MULTIPROCESSOR = {
    (6, 0): 2048, (6, 1): 2048, (7, 0): 2048, (7, 5): 1024, (8, 0): 2048, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536,
    (9, 0): 2048, (10, 0): 2048, (10, 3): 2048, (12, 0): 1536, (12, 1): 1536,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Libraries:
    """MiB beyond the threads' share: the median of the messages from one architecture, and how many messages those were."""

    architecture: str
    median_mib: int
    messages: int


# By major version of the capability, Ada (8.9) and Turing (7.5) by both. tests/catalogue/test_context.py compares it with the
# data.
VOLTA = Libraries(architecture="Volta", median_mib=62, messages=12)
TURING = Libraries(architecture="Turing", median_mib=55, messages=27)
AMPERE = Libraries(architecture="Ampere", median_mib=76, messages=31)
ADA = Libraries(architecture="Ada", median_mib=81, messages=24)
HOPPER = Libraries(architecture="Hopper", median_mib=149, messages=15)
BLACKWELL = Libraries(architecture="Blackwell", median_mib=83, messages=14)
ANY = Libraries(architecture="all architectures together", median_mib=74, messages=123)

# Distance of a run from its architecture's median: covers 95 % of all messages, with equal numbers left out at both ends. The
# upper tail depends on the run (other libraries that the message does not mention), not on the GPU, so all GPUs share it.
BELOW_MIB, ABOVE_MIB = 153, 589


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Bytes of a process outside the allocator: the median, and the range of nineteen in twenty; `source` explains it."""

    low_bytes: int
    typical_bytes: int
    high_bytes: int
    source: str


def libraries_of(capability: tuple[int, int] | None) -> Libraries:
    """Return the libraries' share (MiB) on GPUs of a compute capability; the share over all GPUs if no message covers it."""
    if capability is None:
        return ANY
    by_both = {(7, 0): VOLTA, (7, 2): VOLTA, (7, 5): TURING, (8, 9): ADA}
    by_major = {8: AMPERE, 9: HOPPER, 10: BLACKWELL, 12: BLACKWELL}
    return by_both.get(capability) or by_major.get(capability[0], ANY)


def context_of(threads: int, capability: tuple[int, int] | None) -> Context:
    """Return the context (bytes) of a CUDA process on a GPU with this number of resident threads.

    The number is multiprocessors times threads on each.
    """
    libraries = libraries_of(capability)
    typical = threads * BYTES_PER_THREAD + libraries.median_mib * MIB
    return Context(
        low_bytes=max(0, typical - BELOW_MIB * MIB),
        typical_bytes=typical,
        high_bytes=typical + ABOVE_MIB * MIB,
        source=f"{libraries.messages} published messages, {libraries.architecture}",
    )


def context_between(contexts: Iterable[Context], source: str) -> Context:
    """Return the context (bytes) of a GPU that may be any of several: the median of all, from the smallest to the largest."""
    known = tuple(contexts)
    return Context(
        low_bytes=min(context.low_bytes for context in known),
        typical_bytes=median_low(context.typical_bytes for context in known),
        high_bytes=max(context.high_bytes for context in known),
        source=source,
    )


# Memory (MiB) outside of allocated, unallocated and free memory in seven messages of PyTorch on ROCm; GPUs of 24 to 288 GB. Other
# processes may hold some of it: the messages do not say. The range is half of the smallest to twice the largest, for each GPU.
_ROCM_MIB = (318, 342, 365, 461, 772, 838, 952)
CONTEXTS_BY_MAKER = {
    "AMD": Context(
        low_bytes=min(_ROCM_MIB) // 2 * MIB,
        typical_bytes=median_low(_ROCM_MIB) * MIB,
        high_bytes=2 * max(_ROCM_MIB) * MIB,
        source=f"hardly known, {len(_ROCM_MIB)} published messages on ROCm",
    ),
    "Intel": Context(
        low_bytes=0, typical_bytes=256 * MIB, high_bytes=1024 * MIB, source="not known, taken to be up to 1 GiB"
    ),
}

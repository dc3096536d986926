"""Memory of a CUDA process outside PyTorch's allocator: the driver's context, loaded kernels, library handles.

Nobody documents it, and everybody's out-of-memory message measures it: the process' bytes less those that PyTorch allocated
and reserved. `tests/measured/published/outside.csv` holds such messages, `python -m tests.benchmarks.bench_outside` prints what
they say, and a test holds the numbers here to theirs. Two things explain them:

- The driver sets aside 2 KiB for every thread that can be resident. Bare contexts: 426 MiB on an RTX 6000 Ada with 142 * 1,536
  threads (exactly 2 KiB each), 386 on an RTX 4090, 414 on an A100, 516 on an H100. That is why an RTX 4060 holds a quarter
  of what a 4090 does.
- Libraries and the kernels that a run loads come on top: some 50 to 150 MiB by architecture in the middle, hundreds where a run
  loads many or something else allocates for itself.

Messages of torch 2.2 and newer, on Linux; kernels are loaded lazily there. With CUDA_MODULE_LOADING=EAGER it is over 1 GiB.
Of AMD's and Intel's devices far less is known: CONTEXTS_BY_MAKER.
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


# By major version of the capability, Ada (8.9) and Turing (7.5) by both. Held to the data by tests/catalogue/test_context.py.
VOLTA = Libraries(architecture="Volta", median_mib=62, messages=12)
TURING = Libraries(architecture="Turing", median_mib=55, messages=27)
AMPERE = Libraries(architecture="Ampere", median_mib=76, messages=31)
ADA = Libraries(architecture="Ada", median_mib=81, messages=24)
HOPPER = Libraries(architecture="Hopper", median_mib=149, messages=15)
BLACKWELL = Libraries(architecture="Blackwell", median_mib=83, messages=14)
ANY = Libraries(architecture="all architectures together", median_mib=74, messages=123)

# How far a run is from its architecture's median: 95 % of all messages, as many left out at both ends. The upper tail is not the
# GPU's but the run's (libraries beside PyTorch that nobody mentioned), so it is one for all.
BELOW_MIB, ABOVE_MIB = 153, 589


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Bytes that a process holds outside the allocator: the middle, and the range of nineteen in twenty; `source` says why."""

    low_bytes: int
    typical_bytes: int
    high_bytes: int
    source: str


def libraries_of(capability: tuple[int, int] | None) -> Libraries:
    """The libraries' share (MiB) on GPUs of a compute capability; that of all together where no message came from its like."""
    if capability is None:
        return ANY
    by_both = {(7, 0): VOLTA, (7, 2): VOLTA, (7, 5): TURING, (8, 9): ADA}
    by_major = {8: AMPERE, 9: HOPPER, 10: BLACKWELL, 12: BLACKWELL}
    return by_both.get(capability) or by_major.get(capability[0], ANY)


def context_of(threads: int, capability: tuple[int, int] | None) -> Context:
    """The context (bytes) of a CUDA process on a GPU with so many resident threads: multiprocessors by threads on each."""
    libraries = libraries_of(capability)
    typical = threads * BYTES_PER_THREAD + libraries.median_mib * MIB
    return Context(
        low_bytes=max(0, typical - BELOW_MIB * MIB),
        typical_bytes=typical,
        high_bytes=typical + ABOVE_MIB * MIB,
        source=f"{libraries.messages} published messages, {libraries.architecture}",
    )


def context_between(contexts: Iterable[Context], source: str) -> Context:
    """The context (bytes) of a GPU that may be any of several: the middle one's, from the least to the most of all."""
    known = tuple(contexts)
    return Context(
        low_bytes=min(context.low_bytes for context in known),
        typical_bytes=median_low(context.typical_bytes for context in known),
        high_bytes=max(context.high_bytes for context in known),
        source=source,
    )


# What seven messages of PyTorch on ROCm leave beside allocated, unallocated and free memory (MiB); GPUs of 24 to 288 GB.
# They do not say whether other processes hold some of it. From half of the least to twice the most is said of any of them.
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

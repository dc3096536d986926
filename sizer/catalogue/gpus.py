"""The catalogue of devices: the memory that PyTorch sees on each, and the memory of a process outside the allocator.

The data is `gpus.csv` and `laptops.csv` in this folder, in display order, one device per row:

| column | content | |---|---|
| key, name, maker | the key in links, the name with its nominal memory, NVIDIA, AMD, Intel, Apple or Host |
| backend | the allocator rules that apply: cuda, mps or cpu |
| capability | NVIDIA's compute capability, or AMD's architecture ("gfx942") |
| total_mib | memory in MiB, as torch.cuda.get_device_properties(0) prints it |
| multiprocessors | NVIDIA's multiprocessors, AMD's compute units, Intel's Xe cores |
| unified | "unified" if the device shares the host's memory |
| driver_name, l2_kib, clock_mhz, memory_mhz | further properties that are passed to cuDNN (`sizer.catalogue.hardware`) |
| known, source | "seen": printed by real machines; or "believed": derived, and how |
| address | for seen values, a public page that prints the device's name and this total, or another total in `source` |

Seen values appear in published output, also as "has a total capacity of ... GiB" in an error message, or as the MiB that
llama.cpp and Ultralytics print of the same property. If several totals are known, a row has one of the smaller ones, of recent
Linux drivers.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sizer.catalogue.contexts import CONTEXTS_BY_MAKER, THREADS_PER_MULTIPROCESSOR, Context, context_of

Backend = Literal["cuda", "mps", "cpu"]
MIB = 2**20
DATA = Path(__file__).with_name("gpus.csv")
LAPTOPS = Path(__file__).with_name("laptops.csv")  # the same columns

# The capability whose kernels are used to model AMD's and Intel's devices: like them, an A100 has no flash attention by cuDNN,
# and supports flash and memory-efficient attention, bfloat16 and tensor cores.
STAND_IN = (8, 0)
_NOT_COUNTED = Context(low_bytes=0, typical_bytes=0, high_bytes=0, source="")
# AMD: c10/cuda/CUDACachingAllocator.cpp also serves ROCm. cuda/CublasHandlePool.cpp (2.12 to 2.14) takes 32 MiB for hipBLAS, 128
# on gfx94 and gfx95, and 76 for hipBLASLt. Intel: c10/xpu/XPUCachingAllocator.cpp, before it had expandable segments, has the
# same constants as CUDA's.
_UNLIKE_CUDA = {
    "AMD": (
        "PyTorch's caching allocator on ROCm is that of CUDA, replayed exactly; kernels and the workspaces of MIOpen and of "
        "hipBLAS and hipBLASLt (108 to 204 MiB there)"
    ),
    "Intel": (
        "PyTorch's caching allocator for Intel's devices has the rules of CUDA's; kernels and the workspaces of oneDNN and oneMKL"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device: its memory in bytes as PyTorch reports it, and the memory of a process outside the allocator, as a range.

    `total_bytes` is torch.cuda.get_device_properties(0).total_memory on CUDA and torch.mps.recommended_max_memory() on MPS. It
    differs by some 0.1 GiB with driver, ECC and board. `source` says whether this value was seen, with the address of a page
    that prints it, or is believed, and how the context was derived (`sizer.catalogue.contexts`). `backend` and `capability`
    choose the rules: AMD's and Intel's devices are estimated as CUDA devices of capability 8.0, as `cautions` says. `maker` is
    empty in records of versions that did not store it. `unified` says whether the device shares the host's memory.
    """

    key: str
    name: str
    total_bytes: int
    backend: Backend
    capability: tuple[int, int] | None
    context_low_bytes: int
    context_bytes: int
    context_high_bytes: int
    source: str
    maker: str = ""
    unified: bool = False

    @property
    def cautions(self) -> tuple[str, ...]:
        """Warnings about the figures of this device."""
        said = []
        if self.maker in _UNLIKE_CUDA:
            major, minor = STAND_IN
            said.append(f"{_UNLIKE_CUDA[self.maker]} are modelled as for CUDA capability {major}.{minor}")
        if self.unified and self.backend == "cuda":
            said.append(
                f"the {self.name} shares its memory with the host: memory of other programs is not counted"
            )
        return tuple(said)


def _gpu(row: Mapping[str, Any]) -> Gpu:
    """Return the device of one row."""
    capability, context = _rules(row)
    source = f"{row['known']}: {row['source']}" + (f", at {row['address']}" if row["address"] else "")
    return Gpu(
        key=row["key"],
        name=row["name"],
        total_bytes=int(row["total_mib"]) * MIB,
        backend=row["backend"],
        capability=capability,
        context_low_bytes=context.low_bytes,
        context_bytes=context.typical_bytes,
        context_high_bytes=context.high_bytes,
        source=f"{source}; outside PyTorch: {context.source}" if context.source else source,
        maker=row["maker"],
        unified=row["unified"] == "unified",
    )


def _rules(row: Mapping[str, str]) -> tuple[tuple[int, int] | None, Context]:
    """Return the capability and the context (bytes) of one row; without CUDA no context is counted."""
    if row["backend"] != "cuda":
        return None, _NOT_COUNTED
    if row["maker"] != "NVIDIA":
        return STAND_IN, CONTEXTS_BY_MAKER[row["maker"]]
    major, minor = map(int, row["capability"].split("."))
    threads = int(row["multiprocessors"]) * THREADS_PER_MULTIPROCESSOR[major, minor]
    return (major, minor), context_of(threads, (major, minor))


def read_rows() -> list[dict[str, str]]:
    """Return the rows of `gpus.csv` and `laptops.csv` as text, in display order, grouped by maker."""
    rows = [*_read(DATA), *_read(LAPTOPS)]
    makers = list(dict.fromkeys(row["maker"] for row in rows))
    return sorted(rows, key=lambda row: makers.index(row["maker"]))


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# Cost of tracing one device type (for CUDA, one generation), in units of the replays on one device.
TRACES_WORK = {"cuda": 20, "mps": 60, "cpu": 60}
GPUS: dict[str, Gpu] = {row["key"]: _gpu(row) for row in read_rows()}
# Devices from which a custom device's range is taken: rows of `laptops.csv` came later and do not change it.
RANGED: tuple[Gpu, ...] = tuple(GPUS[row["key"]] for row in _read(DATA))


def in_parts(parts: int) -> tuple[tuple[Gpu, ...], ...]:
    """Return the devices in this number of parts of similar work; devices with nearly the same rules share a part."""
    groups: dict[tuple[Backend, int, bool], list[Gpu]] = {}
    for gpu in GPUS.values():
        major, minor = gpu.capability or (0, 0)
        groups.setdefault((gpu.backend, major, minor > 0), []).append(gpu)
    work = {group: len(gpus) + TRACES_WORK[group[0]] for group, gpus in groups.items()}
    found: list[list[Gpu]] = [[] for _ in range(parts)]
    done = [0] * parts
    for group in sorted(groups, key=work.__getitem__, reverse=True):
        least = done.index(min(done))
        found[least] += groups[group]
        done[least] += work[group]
    return tuple(map(tuple, found))

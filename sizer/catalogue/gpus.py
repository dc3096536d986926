"""The catalogue of devices: how much memory PyTorch sees on each, and what a process holds outside the allocator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sizer.catalogue.contexts import THREADS_PER_MULTIPROCESSOR, context_of

Backend = Literal["cuda", "mps", "cpu"]
MIB = 2**20

_RECOMMENDED = "Metal's recommended maximum"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device: its memory in bytes as PyTorch reports it, and what a process holds outside the allocator, as a range.

    `total_bytes` is torch.cuda.get_device_properties(0).total_memory on CUDA and torch.mps.recommended_max_memory()
    on MPS. It differs by some 0.1 GiB with driver, ECC and board; `source` says whether this entry's number is known
    or believed, and what the context comes from (`sizer.catalogue.contexts`).
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


def _cuda(key: str, name: str, total_mib: int, capability: tuple[int, int], multiprocessors: int, source: str) -> Gpu:
    context = context_of(multiprocessors * THREADS_PER_MULTIPROCESSOR[capability], capability)
    return Gpu(
        key=key,
        name=name,
        total_bytes=total_mib * MIB,
        backend="cuda",
        capability=capability,
        context_low_bytes=context.low_bytes,
        context_bytes=context.typical_bytes,
        context_high_bytes=context.high_bytes,
        source=f"{source}; outside PyTorch: {context.source}",
    )


def _unified(key: str, name: str, total_mib: int, backend: Backend, source: str) -> Gpu:
    """A device that shares the host's memory: no context of its own is counted."""
    return Gpu(
        key=key,
        name=name,
        total_bytes=total_mib * MIB,
        backend=backend,
        capability=None,
        context_low_bytes=0,
        context_bytes=0,
        context_high_bytes=0,
        source=source,
    )


# Totals are MiB as printed by torch.cuda.get_device_properties(0), then the capability and the number of multiprocessors.
# "seen" means in the published output of a machine (also as "has a total capacity of ... GiB" in an error message),
# "believed" means remembered. Where several totals are known, a smaller one stands here: recent Linux drivers.
_ROWS = (
    _cuda("t4", "Tesla T4 (16 GB)", 14910, (7, 5), 40, "seen: 14,910 to 15,109 MiB"),
    _cuda("v100-16gb", "Tesla V100 (16 GB)", 16130, (7, 0), 80, "seen: 16,130 to 16,160 MiB (SXM2)"),
    _cuda("v100-32gb", "Tesla V100 (32 GB)", 32480, (7, 0), 80, "seen: 31.73 to 31.75 GiB"),
    _cuda("rtx-2080-ti", "GeForce RTX 2080 Ti (11 GB)", 11019, (7, 5), 68, "seen: 11,019 MiB"),
    _cuda("rtx-3060-12gb", "GeForce RTX 3060 (12 GB)", 11931, (8, 6), 28, "seen: 11,931 to 12,044 MiB"),
    _cuda("rtx-3080-10gb", "GeForce RTX 3080 (10 GB)", 9871, (8, 6), 68, "seen: 9.64 to 9.78 GiB"),
    _cuda("rtx-3090", "GeForce RTX 3090 (24 GB)", 24136, (8, 6), 82, "seen: 24,259 to 24,268 MiB; believed: 23.57 GiB"),
    _cuda(
        "rtx-4060-8gb", "GeForce RTX 4060 (8 GB)", 7813, (8, 9), 24, "believed: 7.63 GiB on Linux, 8,187 MiB on Windows"
    ),
    _cuda("rtx-4080", "GeForce RTX 4080 (16 GB)", 16049, (8, 9), 76, "seen: 16,049 MiB"),
    _cuda("rtx-4090", "GeForce RTX 4090 (24 GB)", 24084, (8, 9), 128, "seen: 23.52 to 23.65 GiB; Windows 24,563 MiB"),
    _cuda("rtx-5090", "GeForce RTX 5090 (32 GB)", 32112, (12, 0), 170, "seen: 31.36 to 31.37 GiB"),
    _cuda("rtx-a6000", "RTX A6000 (48 GB)", 48676, (8, 6), 84, "seen: 48,676 MiB"),
    _cuda("l4", "L4 (24 GB)", 22558, (8, 9), 58, "believed: 22.03 to 22.17 GiB"),
    _cuda("l40s", "L40S (48 GB)", 45455, (8, 9), 142, "seen: 44.39 GiB to 45,589 MiB"),
    _cuda("a10g", "A10G (24 GB)", 22587, (8, 6), 80, "seen: 22,587 MiB"),
    _cuda("a100-40gb", "A100 (40 GB)", 40326, (8, 0), 108, "seen: 39.38 GiB to 40,536 MiB (SXM4)"),
    _cuda("a100-80gb", "A100 (80 GB)", 81038, (8, 0), 108, "seen: 79.14 to 79.25 GiB"),
    _cuda("h100-80gb", "H100 SXM (80 GB)", 81082, (9, 0), 132, "seen: 81,082 to 81,090 MiB"),
    _cuda("h100-pcie", "H100 PCIe (80 GB)", 81008, (9, 0), 114, "seen: 81,008 MiB"),
    _cuda(
        "gh200", "GH200 (96 GB)", 96768, (9, 0), 132, "believed: 94.5 GiB; the host's memory beside it is not counted"
    ),
    _cuda("h200", "H200 (141 GB)", 143156, (9, 0), 132, "seen: 143,156 MiB"),
    _cuda("b200", "B200 (180 GB)", 182631, (10, 0), 148, "seen: 182,631 to 182,642 MiB"),
    _unified("m2-16gb", "Apple M2 (16 GB)", 10922, "mps", f"believed: {_RECOMMENDED} of two thirds"),
    _unified(
        "m2-ultra-64gb", "Apple M2 Ultra (64 GB)", 49152, "mps", f"seen on other 64 GB Macs: {_RECOMMENDED} of 48 GiB"
    ),
    _unified("m4-max-128gb", "Apple M4 Max (128 GB)", 98304, "mps", f"believed: {_RECOMMENDED} of three quarters"),
    _unified("m2-ultra-192gb", "Apple M2 Ultra (192 GB)", 147456, "mps", f"believed: {_RECOMMENDED} of three quarters"),
    _unified(
        "cpu", "CPU (a host with 64 GiB)", 65536, "cpu", "nominal: this catalogue does not know your host's memory"
    ),
)

GPUS: dict[str, Gpu] = {gpu.key: gpu for gpu in _ROWS}

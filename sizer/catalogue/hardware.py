"""Properties of CUDA devices, apart from their memory, by which cuDNN's heuristics choose engines and workspaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sizer.catalogue.contexts import THREADS_PER_MULTIPROCESSOR
from sizer.catalogue.gpus import GPUS, Gpu, read_rows

# Shared memory of a multiprocessor (CUDA C++ Programming Guide 12.9, "Technical Specifications per Compute Capability").
SHARED_KIB = {
    (7, 0): 96, (7, 5): 64, (8, 0): 164, (8, 6): 100, (8, 9): 100, (9, 0): 228, (10, 0): 228, (10, 3): 228, (12, 0): 100,
    (12, 1): 100,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One CUDA device: its name as the driver says it, then per multiprocessor its threads and shared memory in KiB.

    The L2 cache in KiB, the highest clocks of multiprocessors and memory in kHz.
    """

    gpu: Gpu
    name: str
    processors: int
    threads: int
    shared_kib: int
    l2_kib: int
    clock_khz: int
    memory_khz: int

    @property
    def capability(self) -> tuple[int, int]:
        """(major, minor)."""
        return self.gpu.capability or (0, 0)

    @property
    def reserved_kib(self) -> int:
        """Shared memory of a block that the system reserves, in KiB: 0 before capability 8.0 (CUDA C programming guide)."""
        return 1 if self.capability >= (8, 0) else 0

    @property
    def blocks(self) -> int:
        """Resident blocks per multiprocessor (CUDA C programming guide, table of technical specifications)."""
        return {(7, 5): 16, (8, 6): 16, (8, 9): 24, (12, 0): 24, (12, 1): 24}.get(self.capability, 32)

    def as_cudnn(self) -> dict[str, object]:
        """Return the device in the keys of cuDNN's device descriptor (CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, cuDNN 9.8 on)."""
        major, minor = self.capability
        return {
            "cudaDeviceId": 0, "deviceName": self.name, "deviceVer": major * 100 + minor * 10, "driverVer": 13000,
            "multiProcessorCount": self.processors, "smCountOrigin": 0, "totalGlobalMem": self.gpu.total_bytes,
            "maxGridSize": [2**31 - 1, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "maxThreadsPerBlock": 1024,
            "maxThreadsPerSM": self.threads, "maxCtasPerSM": self.blocks, "warpSize": 32,
            "regsPerBlock": 65536, "maxRegistersPerSM": 65536, "maxSharedMemoryPerBlock": 48 * 1024,
            "maxSharedMemoryPerBlockOptin": (self.shared_kib - self.reserved_kib) * 1024,
            "reservedSharedMemoryPerBlock": self.reserved_kib * 1024,
            "oversizedSharedMemoryPerBlock": 0, "pciDeviceId": 0, "isTccDriver": 0, "supportCoopLaunch": 1,
            "smClockRateKHz": self.clock_khz, "memClockRateKHz": self.memory_khz, "l2CacheSize": self.l2_kib * 1024,
        }  # fmt: skip


def _hardware(row: Mapping[str, str]) -> Hardware:
    """Return the hardware of one row of `gpus.csv`."""
    gpu = GPUS[row["key"]]
    assert gpu.capability is not None  # all rows are CUDA devices
    return Hardware(
        gpu=gpu,
        name=row["driver_name"],
        processors=int(row["multiprocessors"]),
        threads=THREADS_PER_MULTIPROCESSOR[gpu.capability],
        shared_kib=SHARED_KIB[gpu.capability],
        l2_kib=int(row["l2_kib"]),
        clock_khz=1000 * int(row["clock_mhz"]),
        memory_khz=1000 * int(row["memory_mhz"]),
    )


# NVIDIA's data sheets and architecture white papers. A row has no driver's name if cuDNN 9 does not know the device, or if its
# figures were not looked up.
HARDWARE: dict[str, Hardware] = {row["key"]: _hardware(row) for row in read_rows() if row["driver_name"]}

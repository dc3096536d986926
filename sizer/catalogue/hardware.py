"""What CUDA devices tell of themselves beside their memory: by this cuDNN's heuristics choose engines and workspaces."""

from __future__ import annotations

from dataclasses import dataclass

from sizer.catalogue.gpus import GPUS, Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One CUDA device: its name as the driver says it, then per multiprocessor its threads and shared memory in KiB;
    the L2 cache in KiB, the highest clocks of multiprocessors and memory in kHz."""

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
        """Shared memory of a block that the system keeps, in KiB: none before capability 8.0 (CUDA C programming guide)."""
        return 1 if self.capability >= (8, 0) else 0

    @property
    def blocks(self) -> int:
        """Resident blocks per multiprocessor (CUDA C programming guide, table of technical specifications)."""
        return {(7, 5): 16, (8, 6): 16, (8, 9): 24, (12, 0): 24}.get(self.capability, 32)

    def as_cudnn(self) -> dict[str, object]:
        """The device in the keys of cuDNN's device descriptor (CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, cuDNN 9.8 on)."""
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


def _hardware(key: str, name: str, *numbers: int) -> Hardware:
    columns = ("processors", "threads", "shared_kib", "l2_kib", "clock_khz", "memory_khz")
    return Hardware(gpu=GPUS[key], name=name, **dict(zip(columns, numbers, strict=True)))


# NVIDIA's data sheets and architecture white papers.
_ROWS = (
    _hardware("t4", "Tesla T4", 40, 1024, 64, 4096, 1590000, 5001000),
    _hardware("v100-16gb", "Tesla V100-SXM2-16GB", 80, 2048, 96, 6144, 1530000, 877000),
    _hardware("v100-32gb", "Tesla V100-SXM2-32GB", 80, 2048, 96, 6144, 1530000, 877000),
    _hardware("rtx-2080-ti", "NVIDIA GeForce RTX 2080 Ti", 68, 1024, 64, 5632, 1545000, 7000000),
    _hardware("rtx-3060-12gb", "NVIDIA GeForce RTX 3060", 28, 1536, 100, 3072, 1777000, 7501000),
    _hardware("rtx-3080-10gb", "NVIDIA GeForce RTX 3080", 68, 1536, 100, 5120, 1710000, 9501000),
    _hardware("rtx-3090", "NVIDIA GeForce RTX 3090", 82, 1536, 100, 6144, 1695000, 9751000),
    _hardware("rtx-4060-8gb", "NVIDIA GeForce RTX 4060", 24, 1536, 100, 24576, 2460000, 8501000),
    _hardware("rtx-4080", "NVIDIA GeForce RTX 4080", 76, 1536, 100, 65536, 2505000, 11201000),
    _hardware("rtx-4090", "NVIDIA GeForce RTX 4090", 128, 1536, 100, 73728, 2520000, 10501000),
    _hardware("rtx-5090", "NVIDIA GeForce RTX 5090", 170, 1536, 100, 98304, 2407000, 14001000),
    _hardware("rtx-a6000", "NVIDIA RTX A6000", 84, 1536, 100, 6144, 1800000, 8001000),
    _hardware("l4", "NVIDIA L4", 58, 1536, 100, 49152, 2040000, 6251000),
    _hardware("l40s", "NVIDIA L40S", 142, 1536, 100, 98304, 2520000, 9001000),
    _hardware("a10g", "NVIDIA A10G", 80, 1536, 100, 6144, 1710000, 6251000),
    _hardware("a100-40gb", "NVIDIA A100-SXM4-40GB", 108, 2048, 164, 40960, 1410000, 1215000),
    _hardware("a100-80gb", "NVIDIA A100-SXM4-80GB", 108, 2048, 164, 40960, 1410000, 1593000),
    _hardware("h100-80gb", "NVIDIA H100 80GB HBM3", 132, 2048, 228, 51200, 1980000, 2619000),
    _hardware("h100-pcie", "NVIDIA H100 PCIe", 114, 2048, 228, 51200, 1755000, 1593000),
    _hardware("gh200", "NVIDIA GH200 480GB", 132, 2048, 228, 61440, 1980000, 2619000),
    _hardware("h200", "NVIDIA H200", 132, 2048, 228, 61440, 1980000, 3201000),
    _hardware("b200", "NVIDIA B200", 148, 2048, 228, 129536, 1965000, 3996000),
)

HARDWARE: dict[str, Hardware] = {row.gpu.key: row for row in _ROWS}

"""Demonstration on a real device of allocated, reserved and the driver's figure while a tensor is made, used and freed.

`demonstrate` starts a separate process and imports no torch; this module, run as a program, is that process. Its devices are
passed the module torch.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sizer.base.codec import DecodeError, Document
from sizer.base.errors import DeviceError, JobError, quote
from sizer.base.units import GIB, KIB, MIB, format_bytes
from sizer.device.machine.computer import Host, open_nvml
from sizer.device.machine.inventory import take_inventory
from sizer.device.record.measurement import DeviceFacts, Spread
from sizer.processes.process import print_value, run_program


class AllocatorProbe:
    """One device: float32 tensors as blocks of memory, and three memory figures. Tests replace it.

    `driver` describes the third figure; `emptying` is the code that releases cached memory, None without a cache.
    """

    driver: str
    emptying: str | None = None
    remarks: tuple[str, ...] = ()

    def __init__(self, torch: Any, device: str):
        self._torch, self._device = torch, torch.device(device)

    def read(self) -> tuple[int, int | None, int | None]:
        """Return the bytes allocated, reserved, and taken from the system since the probe was made."""
        raise NotImplementedError

    def make(self, size_bytes: int) -> Any:
        """Return a block of `size_bytes` bytes; it is freed with its last reference."""
        return self._torch.empty(size_bytes // 4, dtype=self._torch.float32, device=self._device)

    def fill(self, block: Any) -> None:
        """Write to all of the block."""
        block.fill_(1)

    def double(self, block: Any) -> Any:
        """Return a new block with the sum of the block and itself."""
        return block + block

    def wait(self) -> None:
        """Wait until the device is idle: the CPU always is."""

    def empty_cache(self) -> None:
        """Release cached memory to the system, if there is a cache."""


class CachingAllocatorProbe(AllocatorProbe):
    """CUDA, ROCm and XPU: PyTorch's caching allocator, its counters, and the device's memory as the driver counts it."""

    def __init__(self, torch: Any, facts: DeviceFacts, used_bytes: Callable[[], int | None]):
        super().__init__(torch, facts.device)
        self._backend = getattr(torch, facts.kind)
        self._used_bytes = used_bytes
        before = used_bytes()
        self._backend.synchronize(self._device)  # makes the context
        self.emptying = f"torch.{facts.kind}.empty_cache()"
        self.driver = "used on the device according to the driver, minus the memory used before this process started"
        if before is None:
            self._used_bytes = self._used_by_runtime
            before = self._used_by_runtime()
            self.driver = (
                "used on the device according to the driver, minus the memory used at the beginning (context not counted)"
            )
        self._before = before

    def wait(self) -> None:
        self._backend.synchronize(self._device)

    def read(self) -> tuple[int, int | None, int | None]:
        used = self._used_bytes()
        driver = None if used is None else max(0, used - self._before)
        return self._backend.memory_allocated(self._device), self._backend.memory_reserved(self._device), driver

    def empty_cache(self) -> None:
        self._backend.empty_cache()

    def _used_by_runtime(self) -> int:
        free, total = self._backend.mem_get_info(self._device)
        return total - free


class MpsProbe(AllocatorProbe):
    """Apple's GPUs: PyTorch counts tensors, Metal counts the process; the difference is mostly cached heaps."""

    driver = "memory of this process according to Metal (torch.mps.driver_allocated_memory)"
    emptying = "torch.mps.empty_cache()"
    remarks = ("On MPS PyTorch has no counter of reserved memory; Metal's figure shows the cache instead.",)

    def wait(self) -> None:
        self._torch.mps.synchronize()

    def read(self) -> tuple[int, int | None, int | None]:
        return self._torch.mps.current_allocated_memory(), None, self._torch.mps.driver_allocated_memory()

    def empty_cache(self) -> None:
        self._torch.mps.empty_cache()


class CpuProbe(AllocatorProbe):
    """The CPU: no caching allocator and no counters; the tensors are counted here, the process by the operating system."""

    driver = "resident memory of the process, minus its initial value"
    remarks = (
        "The CPU has no caching allocator in PyTorch: freed memory goes back to the C library, which returns blocks of this "
        "size to the system at once. There is nothing reserved, and empty_cache() has nothing to do.",
        "The system allocates memory at the first write, so empty() alone takes almost none.",
        "PyTorch keeps no count on the CPU: allocated is the size of the tensors that are alive.",
    )

    def __init__(self, torch: Any, host: Host):
        super().__init__(torch, "cpu")
        self._host, self._alive = host, 0
        self._before = resident_bytes(host)

    def make(self, size_bytes: int) -> Any:
        return self._count(super().make(size_bytes))

    def double(self, block: Any) -> Any:
        return self._count(super().double(block))

    def read(self) -> tuple[int, int | None, int | None]:
        now = resident_bytes(self._host)
        return self._alive, None, None if now is None or self._before is None else max(0, now - self._before)

    def _count(self, tensor: Any) -> Any:
        size = tensor.untyped_storage().nbytes()
        self._alive += size
        weakref.finalize(tensor, self._release, size)
        return tensor

    def _release(self, size: int) -> None:
        self._alive -= size


def resident_bytes(host: Host) -> int | None:
    """Return the physical memory (bytes) of this process; None if the system does not report it (Windows)."""
    if pages := host.read("/proc/self/statm"):
        return int(pages.split()[1]) * os.sysconf("SC_PAGE_SIZE")
    listed = host.run("ps", "-o", "rss=", "-p", str(os.getpid()))  # in KiB
    return int(listed) * KIB if listed and listed.isdigit() else None


def open_probe(torch: Any, facts: DeviceFacts) -> AllocatorProbe:
    """Return the probe of an available device."""
    if facts.kind == "cpu":
        torch.set_num_threads(1)  # a pool of threads would show in the process's memory
        return CpuProbe(torch, Host())
    if facts.kind == "mps":
        return MpsProbe(torch, "mps")
    return CachingAllocatorProbe(torch, facts, _driver_bytes(torch, facts))


def _driver_bytes(torch: Any, facts: DeviceFacts) -> Callable[[], int | None]:
    """Return a function for the bytes used on a device by all processes, by NVML, without a context; None without NVML."""
    nvml = open_nvml() if facts.kind == "cuda" and torch.version.cuda else None
    if nvml is None:
        return lambda: None
    uuid = str(getattr(torch.cuda.get_device_properties(facts.device), "uuid", ""))
    return lambda: memory.used_bytes if (memory := nvml.memory(uuid)) else None


# -------------------------------------------------------------------------------------------------------- demonstration


SECONDS = 120.0
BLOCK_BYTES, SMALL_BLOCK_BYTES = 256 * MIB, 32 * MIB
ROOM = 8  # blocks that must be free for the large size
RUNS = 21
CACHED = "an allocation, served from the allocator's cache"
EMPTYING = "empty_cache() itself"
EMPTIED = "the same allocation after it, served by the driver"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One line of code and the bytes after it: in tensors, held by PyTorch's allocator, taken from the system.

    `reserved_bytes` is None without a caching allocator, `driver_bytes` if the system does not report it.
    """

    title: str
    code: str
    allocated_bytes: int
    reserved_bytes: int | None
    driver_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Duration of an operation."""

    what: str
    spread: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration(Document):
    """Result of a demonstration on a device.

    `driver` describes `driver_bytes`; `costs` is empty without a caching allocator.
    """

    device: str
    name: str
    block_bytes: int
    driver: str
    stages: tuple[Stage, ...]
    costs: tuple[Cost, ...] = ()
    remarks: tuple[str, ...] = ()


def demonstrate(device: str) -> Demonstration:
    """Return the demonstration on a device, run in a separate process that leaves nothing on the device.

    Raises DeviceError if there is no such device or it has not enough free memory, JobError if torch does not work.
    """
    what = "the demonstration could not be run"
    try:
        return Demonstration.from_dict(
            run_program("sizer.device.machine.demonstration", device, seconds=SECONDS, what=what)
        )
    except DecodeError as error:
        raise JobError(f"{what} ({quote(str(error), 200)})") from None


# ------------------------------------------------------------------------------------------- in the process on the device


def show(probe: AllocatorProbe, facts: DeviceFacts, *, now: Callable[[], float] = time.perf_counter) -> Demonstration:
    """Return all figures (bytes) after each line of code: allocate, use, free and empty the cache.

    On a device with a cache, also measure the seconds of an allocation with and without it. `now` can be replaced in tests.
    """
    free = facts.free_bytes
    block = BLOCK_BYTES if free is None or free >= ROOM * BLOCK_BYTES else SMALL_BLOCK_BYTES
    return Demonstration(
        device=facts.device,
        name=facts.name,
        block_bytes=block,
        driver=probe.driver,
        stages=tuple(_stages(probe, block)),
        costs=tuple(_costs(probe, block, now)) if probe.emptying else (),
        remarks=probe.remarks,
    )


def _stages(probe: AllocatorProbe, block: int) -> Iterator[Stage]:
    def stage(title: str, code: str) -> Stage:
        probe.wait()
        allocated, reserved, driver = probe.read()
        return Stage(title=title, code=code, allocated_bytes=allocated, reserved_bytes=reserved, driver_bytes=driver)

    yield stage("Before", "")
    x = probe.make(block)
    yield stage("Allocate", f"x = torch.empty({block // 4 // MIB} * 2**20)")
    probe.fill(x)
    yield stage("Write to it", "x.fill_(1)")
    y = probe.double(x)
    yield stage("Compute", "y = x + x")
    del y
    yield stage("Free one", "del y")
    y = probe.double(x)
    yield stage("Compute again", "y = x + x")
    del x, y
    yield stage("Free all", "del x, y")
    if probe.emptying:
        probe.empty_cache()
        yield stage("Give it back", probe.emptying)


def _costs(probe: AllocatorProbe, block: int, now: Callable[[], float]) -> Iterator[Cost]:
    def timed(work: Callable[[], object]) -> float:
        probe.wait()
        began = now()
        kept = work()
        probe.wait()
        ended = now()
        del kept
        return ended - began

    def make() -> object:
        return probe.make(block)

    make()  # fills the cache
    yield Cost(what=CACHED, spread=Spread.of([timed(make) for _ in range(RUNS)]))
    pairs = [(timed(probe.empty_cache), timed(make)) for _ in range(RUNS)]
    probe.empty_cache()
    yield Cost(what=EMPTYING, spread=Spread.of([emptying for emptying, _ in pairs]))
    yield Cost(what=EMPTIED, spread=Spread.of([making for _, making in pairs]))


def main(name: str) -> dict:
    """Return the demonstration on the device of this name, as plain values. Imports torch. Raises DeviceError."""
    facts = take_inventory().find(name)
    import torch

    try:
        return show(open_probe(torch, facts), facts).to_dict()
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _too_full(facts) from error
    except RuntimeError as error:
        if "out of memory" in str(error) or "can't allocate memory" in str(error):
            raise _too_full(facts) from error
        raise DeviceError(f"{facts.device} did not do it ({quote(str(error), 300)})", given=facts.name) from error


def _too_full(facts: DeviceFacts) -> DeviceError:
    free = "an unknown amount" if facts.free_bytes is None else format_bytes(facts.free_bytes)
    return DeviceError(
        f"{facts.device} has not enough free memory for the demonstration",
        given=f"{free} free",
        allowed=f"{format_bytes(2 * SMALL_BLOCK_BYTES)} or more, and {format_bytes(GIB // 2)} for a context",
        todo="end other programs on it",
    )


if __name__ == "__main__":
    print_value(lambda: main(sys.argv[1]))

"""What allocated, reserved and the driver's figure do while a tensor is made, used and freed: shown on a real device.

`demonstrate` asks a process of its own and imports no torch; run as a program this module is that process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sizer.base.codec import DecodeError, Document
from sizer.base.errors import DeviceError, JobError, quote
from sizer.base.units import GIB, MIB, format_bytes
from sizer.device.machine.allocator_probes import AllocatorProbe, open_probe
from sizer.device.machine.inventory import take_inventory
from sizer.device.record.measurement import DeviceFacts, Spread
from sizer.processes.program import print_value, run_program

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

    `reserved_bytes` is None where there is no caching allocator, `driver_bytes` where the system does not tell.
    """

    title: str
    code: str
    allocated_bytes: int
    reserved_bytes: int | None
    driver_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """How long something took."""

    what: str
    spread: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration(Document):
    """What a device showed. `driver` says what `driver_bytes` are on it; `costs` is empty without a caching allocator."""

    device: str
    name: str
    block_bytes: int
    driver: str
    stages: tuple[Stage, ...]
    costs: tuple[Cost, ...] = ()
    remarks: tuple[str, ...] = ()


def demonstrate(device: str) -> Demonstration:
    """What this device shows, from a process of its own that ends afterwards and leaves nothing on the device.

    Raises DeviceError where there is no such device or it has not enough free memory, JobError where torch does not work.
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
    """Allocates, uses, frees and empties the cache, and reads all figures (bytes) after each line of code.

    Then, on a device with a cache, the seconds of an allocation with and without it. `now` is a seam for tests.
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
    """The demonstration on the device of this name, as plain values. Imports torch. Raises DeviceError."""
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
        todo="end what else runs on it",
    )


if __name__ == "__main__":
    print_value(lambda: main(sys.argv[1]))

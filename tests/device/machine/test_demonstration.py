"""The demonstration on a scripted caching allocator, on scripted PyTorch devices, and for real on the CPU."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch

from sizer.base.errors import DeviceError, JobError
from sizer.base.units import GIB, MIB
from sizer.commands.lists import format_demonstration
from sizer.device.machine import demonstration
from sizer.device.machine.demonstration import (
    BLOCK_BYTES,
    CACHED,
    EMPTIED,
    EMPTYING,
    RUNS,
    SMALL_BLOCK_BYTES,
    CachingAllocatorProbe,
    CpuProbe,
    Demonstration,
    MpsProbe,
    demonstrate,
    open_probe,
    resident_bytes,
    show,
)
from sizer.device.machine.inventory import Inventory
from sizer.device.record.measurement import DeviceFacts
from tests.device.machine.scripted_torch import Scripted

H100 = DeviceFacts(device="cuda:0", name="NVIDIA H100", total_bytes=80 * GIB, free_bytes=70 * GIB)
CPU = DeviceFacts(device="cpu", name="A Fast One", total_bytes=64 * GIB, free_bytes=32 * GIB)
CODE = [
    "",
    "x = torch.empty(64 * 2**20)",
    "x.fill_(1)",
    "y = x + x",
    "del y",
    "y = x + x",
    "del x, y",
    "torch.cuda.empty_cache()",
]


class Block:
    """What a scripted device gives out."""


class ScriptedProbe:
    """A caching allocator: a block from the cache costs 1 second, one from the driver 10, giving back 4 for each."""

    driver, emptying, remarks = "as scripted", "torch.cuda.empty_cache()", ("a remark",)

    def __init__(self) -> None:
        self.clock, self.alive, self.cached, self.size = 0.0, 0, 0, 0

    def make(self, size_bytes: int) -> Block:
        self.size = size_bytes
        self.clock += 1 if self.cached else 10
        self.cached = max(0, self.cached - 1)
        self.alive += 1
        block = Block()
        weakref.finalize(block, self._free)
        return block

    def _free(self) -> None:
        self.alive, self.cached = self.alive - 1, self.cached + 1

    def fill(self, block: Block) -> None:
        assert self.alive

    def double(self, block: Block) -> Block:
        return self.make(self.size)

    def wait(self) -> None:
        pass

    def read(self) -> tuple[int, int, int]:
        reserved = (self.alive + self.cached) * self.size
        return self.alive * self.size, reserved, reserved + 500 * MIB

    def empty_cache(self) -> None:
        self.clock += 4 * self.cached
        self.cached = 0


def figures(shown: Demonstration) -> list[tuple]:
    return [(stage.allocated_bytes, stage.reserved_bytes, stage.driver_bytes) for stage in shown.stages]


def test_reserved_stays_until_it_is_given_back():
    probe = ScriptedProbe()
    shown = show(probe, H100, now=lambda: probe.clock)
    assert [stage.code for stage in shown.stages] == CODE
    b, context = BLOCK_BYTES, 500 * MIB
    assert figures(shown) == [
        (0, 0, context),
        (b, b, b + context),
        (b, b, b + context),
        (2 * b, 2 * b, 2 * b + context),
        (b, 2 * b, 2 * b + context),  # freed, and kept by the allocator
        (2 * b, 2 * b, 2 * b + context),  # taken from what it kept: the driver is not asked
        (0, 2 * b, 2 * b + context),
        (0, 0, context),
    ]
    assert (shown.block_bytes, shown.driver, shown.remarks) == (b, "as scripted", ("a remark",))
    assert probe.alive == probe.cached == 0, "nothing is left on the device"


def test_an_emptied_cache_costs_time():
    probe = ScriptedProbe()
    costs = {cost.what: cost.spread for cost in show(probe, H100, now=lambda: probe.clock).costs}
    assert {what: spread.median_seconds for what, spread in costs.items()} == {CACHED: 1, EMPTYING: 4, EMPTIED: 10}
    assert {spread.runs for spread in costs.values()} == {RUNS}


def test_a_crowded_device_gets_small_blocks():
    crowded = DeviceFacts(device="cuda:0", name="x", total_bytes=4 * GIB, free_bytes=GIB)
    assert show(ScriptedProbe(), crowded, now=lambda: 0.0).block_bytes == SMALL_BLOCK_BYTES
    unknown = DeviceFacts(device="mps", name="x", total_bytes=4 * GIB)
    assert show(ScriptedProbe(), unknown, now=lambda: 0.0).block_bytes == BLOCK_BYTES


def test_what_was_shown_travels_as_plain_values():
    probe = ScriptedProbe()
    shown = show(probe, H100, now=lambda: probe.clock)
    assert Demonstration.from_dict(shown.to_dict()) == shown
    lines = list(format_demonstration(shown))
    assert lines[0] == "cuda:0 (NVIDIA H100)"
    assert [line.split() for line in lines if line.startswith("del y")] == [
        ["del", "y", "256.00", "MiB", "512.00", "MiB", "1,012.00", "MiB"]
    ]
    assert f"{CACHED}: 1,000,000 µs (1,000,000 to 1,000,000)" in lines


# ------------------------------------------------------------------------------------------------------ PyTorch's devices


class Backend:
    """torch.cuda as far as a probe asks."""

    def __init__(self, allocated: int, reserved: int, free: list[int]):
        self.calls = []
        self.memory_allocated = lambda device: allocated
        self.memory_reserved = lambda device: reserved
        self.mem_get_info = lambda device: (free.pop(0), 80 * GIB)
        self.synchronize = lambda device: self.calls.append(f"synchronize {device}")
        self.empty_cache = lambda: self.calls.append("empty_cache")


def test_a_context_counts_where_the_driver_is_asked_before_it_is_made():
    used = [10 * GIB, 10 * GIB + 700 * MIB]
    backend = Backend(1, 2, [])
    probe = CachingAllocatorProbe(SimpleNamespace(cuda=backend, device=str), H100, lambda: used.pop(0))
    assert probe.read() == (1, 2, 700 * MIB)
    probe.empty_cache()
    assert backend.calls == ["synchronize cuda:0", "empty_cache"]
    assert probe.driver.endswith("before this process started")


def test_without_the_drivers_library_the_context_is_left_out():
    backend = Backend(1, 2, [70 * GIB, 69 * GIB])
    probe = CachingAllocatorProbe(SimpleNamespace(cuda=backend, device=str), H100, lambda: None)
    assert probe.read() == (1, 2, GIB)
    assert probe.driver.endswith("(context not counted)")


def test_apples_driver_says_what_is_reserved():
    calls = []
    mps = SimpleNamespace(
        current_allocated_memory=lambda: 3,
        driver_allocated_memory=lambda: 9,
        synchronize=lambda: calls.append("wait"),
        empty_cache=lambda: calls.append("empty"),
    )
    probe = MpsProbe(SimpleNamespace(mps=mps, device=str), "mps")
    probe.wait()
    probe.empty_cache()
    assert (probe.read(), calls) == ((3, None, 9), ["wait", "empty"])


def test_the_cpu_counts_the_tensors_that_are_alive():
    probe = CpuProbe(torch, Scripted(files={"/proc/self/statm": "900 100 50 1 0 60 0"}))
    x = probe.make(4000)
    y = probe.double(x)
    assert probe.read() == (8000, None, 0)
    del x
    assert probe.read()[0] == 4000
    assert y.shape == (1000,)


def test_resident_memory_where_there_is_no_proc():
    assert resident_bytes(Scripted(programs={"ps": "2048"})) == 2 * MIB
    assert resident_bytes(Scripted()) is None
    assert CpuProbe(torch, Scripted()).read() == (0, None, None)


def test_for_real_on_the_cpu():
    shown = demonstrate("cpu")
    block = shown.block_bytes
    assert [stage.code for stage in shown.stages][2:] == CODE[2:-1], "there is no cache to empty"
    assert [stage.allocated_bytes for stage in shown.stages] == [block * n for n in (0, 1, 1, 2, 1, 2, 0)]
    assert {stage.reserved_bytes for stage in shown.stages} == {None}
    resident = [stage.driver_bytes for stage in shown.stages]
    # empty() takes pages only when they are written to; what is freed goes back at once
    for found, expected in zip(resident, (0, 0, 1, 2, 1, 2, 0), strict=True):
        assert abs(found - expected * block) < block / 4, resident
    assert shown.costs == ()


# ----------------------------------------------------------------------------------------------------------- what goes wrong


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(DeviceError, match=r"this device is not here: given 'cuda:7', allowed cpu"):
        demonstrate("cuda:7")


@pytest.fixture
def broken(monkeypatch):
    """A function that puts a device in place whose probe raises this."""
    found = Inventory(devices=(CPU,), missing=(), line="", versions={})
    monkeypatch.setattr(demonstration, "take_inventory", lambda: found)

    def fail(error: Exception) -> None:
        def raise_it(torch: object, facts: DeviceFacts) -> None:
            raise error

        monkeypatch.setattr(demonstration, "open_probe", raise_it)

    return fail


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory."), MemoryError(), RuntimeError("MPS backend out of memory (MPS ...)")],
)
def test_a_device_that_is_full_is_no_crash(broken, error):
    broken(error)
    with pytest.raises(DeviceError, match=r"cpu has not enough free memory .* 32.00 GiB free.* end other programs"):
        demonstration.main("cpu")


def test_a_device_that_fails_is_quoted(broken):
    broken(RuntimeError("CUDA error: device-side assert triggered"))
    with pytest.raises(DeviceError, match=r"cpu did not do it \('CUDA error: device-side assert"):
        demonstration.main("cpu")


def test_an_answer_that_makes_no_sense_is_said(monkeypatch):
    monkeypatch.setattr(demonstration, "run_program", lambda module, device, **rest: [])
    with pytest.raises(JobError, match="the demonstration could not be run"):
        demonstrate("cpu")


def test_each_device_has_its_probe(monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    assert isinstance(open_probe(torch, CPU), CpuProbe)
    mps = DeviceFacts(device="mps", name="x", total_bytes=1)
    assert isinstance(open_probe(torch, mps), MpsProbe)
    backend = Backend(0, 0, [5, 5])
    xpu = SimpleNamespace(xpu=backend, device=str, version=SimpleNamespace(cuda=None))
    probe = open_probe(xpu, DeviceFacts(device="xpu:0", name="x", total_bytes=1))
    assert probe.emptying == "torch.xpu.empty_cache()"

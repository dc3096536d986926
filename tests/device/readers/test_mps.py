"""The MPS reader on a scripted device: sampled peaks where there is no counter, the counter where there is one."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from sizer.device.readers.mps_reader import MpsReader, MpsRuntime
from sizer.device.record.measurement import COUNTED, SAMPLED, DeviceFacts, PhaseReading
from tests.device.scripted_devices import ScriptedMps

FACTS = DeviceFacts(device="mps", name="GPU of a computer", total_bytes=10_000)


class Moving(nn.Module):
    """Its forward leaves the device at one level, after another in between."""

    def __init__(self, device: ScriptedMps, *levels: int) -> None:
        super().__init__()
        self.device, self.levels = device, levels
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for level in self.levels:
            self.device.allocated = level
        return x * self.weight


def test_peaks_are_sampled_between_modules() -> None:
    device = ScriptedMps(driver=4_000)
    reader = MpsReader(FACTS, device)
    reader.begin(record=True)
    module = nn.Sequential(Moving(device, 900), Moving(device, 300, 5_000, 300), Moving(device, 200))
    device.allocated = 100
    reader.watch(module)
    reader.mark("load")
    module(torch.ones(1))
    reader.mark("forward")
    reader.end()
    # 900 after the first module; the 5,000 inside the second one's forward are missed, as SAMPLED says
    assert reader.phases() == (
        PhaseReading(phase="load", allocated_bytes=100, peak_allocated_bytes=100, driver_bytes=4_000),
        PhaseReading(phase="forward", allocated_bytes=200, peak_allocated_bytes=900, driver_bytes=4_000),
    )
    assert reader.source == SAMPLED
    assert reader.recording(1) is None and reader.retries() is None and reader.doubts() == ()


def test_gradients_and_optimizer_steps_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    device = ScriptedMps()
    reader = MpsReader(FACTS, device)
    reader.begin(record=False)
    module = Moving(device, 100)
    reader.watch(module)
    loss = module(torch.ones(1)).sum()
    reader.mark("forward")
    module.weight.register_hook(lambda gradient: setattr(device, "allocated", 700))
    loss.backward()
    device.allocated = 200
    reader.mark("backward")
    optimizer = torch.optim.SGD([module.weight])
    device.allocated = 800
    optimizer.step()
    device.allocated = 300
    reader.mark("optimizer")
    reader.end()
    assert [reading.peak_allocated_bytes for reading in reader.phases()] == [100, 700, 800]
    device.allocated = 5_000
    module(torch.ones(1))
    assert not nn.modules.module._global_forward_hooks  # nothing is watched any more


def test_a_counter_of_peaks_is_used_where_there_is_one() -> None:
    device = ScriptedMps(peak=0)
    reader = MpsReader(FACTS, device)
    reader.begin(record=False)
    device.allocated, device.peak = 100, 650
    reader.mark("load")
    reader.mark("forward")
    reader.end()
    assert reader.source == COUNTED
    assert [reading.peak_allocated_bytes for reading in reader.phases()] == [650, 100]


def test_odd_values_are_doubted() -> None:
    device = ScriptedMps(allocated=64)
    reader = MpsReader(FACTS, device)
    reader.begin(record=False)
    device.allocated = device.driver = -1
    reader.mark("load")
    reader.end()
    assert reader.phases()[0].allocated_bytes == 0 and reader.phases()[0].driver_bytes is None
    assert reader.doubts() == (
        "64 B were allocated before the measurement began",
        "the counter current_allocated_memory was -1",
        "the counter driver_allocated_memory was -1",
    )


def test_out_of_memory_is_a_result() -> None:
    text = (
        "MPS backend out of memory (MPS allocated: 4.00 KiB, other allocations: 1.00 KiB, max allowed: 6.00 KiB). Tried to "
        "allocate 2.00 KiB on private pool."
    )
    reader = MpsReader(FACTS, ScriptedMps())
    found = reader.out_of_memory(RuntimeError(text), "backward")
    # 6 KiB allowed, 5 taken
    assert (found.requested_bytes, found.free_bytes, found.allocated_bytes) == (2048, 1024, 4096)
    assert (found.phase, found.reserved_bytes, found.message) == ("backward", None, text)
    assert (
        reader.out_of_memory(RuntimeError("Placeholder storage has not been allocated on MPS device!"), "load") is None
    )


def test_what_the_reader_asks_of_pytorch_is_there() -> None:
    asked = {name for name, _ in inspect.getmembers(MpsRuntime, inspect.isfunction) if not name.startswith("_")}
    assert asked <= set(dir(ScriptedMps))
    assert callable(torch.mps.current_allocated_memory) and callable(torch.mps.driver_allocated_memory)
    assert callable(torch.mps.synchronize) and callable(torch.accelerator.max_memory_allocated)

"""The CPU's counters are torch.profiler's memory events: bytes by hand, operators and modules by name."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from sizer.device.readers.cpu_reader import CpuReader
from sizer.device.record.measurement import DeviceFacts, PhaseReading
from sizer.tape.tape import CATEGORIES, Tape
from tests.device.blueprints import perceptron

FACTS = DeviceFacts(device="cpu", name="a computer", total_bytes=None)


@pytest.fixture
def reader() -> CpuReader:
    gc.collect()
    return CpuReader(FACTS, free_bytes=lambda: 12345)


def reading(phase: str, allocated: int, peak: int) -> PhaseReading:
    return PhaseReading(phase=phase, allocated_bytes=allocated, peak_allocated_bytes=peak)


def test_bytes_alive_and_their_peaks(reader: CpuReader) -> None:
    before = torch.ones(1000)
    reader.begin(record=False)
    weights = torch.ones(100)
    reader.mark("load")
    del before
    passing = torch.ones(50)
    kept = torch.ones(10)
    del passing
    reader.mark("forward")
    reader.mark("backward")
    del weights, kept
    reader.end()
    # 100 floats of 4 bytes; beside them 50 and 10 more; what was there before does not count, not when it goes either
    expected = (reading("load", 400, 400), reading("forward", 440, 640), reading("backward", 440, 440))
    assert reader.phases() == expected
    assert reader.recording(1) is None
    assert reader.retries() is None and reader.doubts() == () and reader.segments() == ()


def names(tape: Tape, size: int) -> set[tuple[str, str]]:
    """Operator and module of the blocks of a size."""
    blocks = [block for block, bytes_ in enumerate(tape.sizes) if bytes_ == size]
    return {(tape.op_names[tape.ops[block]], tape.module_names[tape.modules[block]]) for block in blocks}


def test_operators_and_modules_are_named_both_ways(reader: CpuReader) -> None:
    module, batch = perceptron(), torch.ones(5, 4, requires_grad=True)
    reader.begin(record=True)
    reader.watch(module)
    loss = module(batch).sum()
    reader.mark("forward")
    loss.backward()
    del loss
    reader.mark("backward", {p.grad.untyped_storage().data_ptr(): ("gradient", "?") for p in module.parameters()})
    reader.end()
    tape = reader.recording(5).validate()
    # outputs of 5*8 and 5*2 floats; backwards the second layer's input gets a gradient of 5*8, the first one's of 5*4
    assert names(tape, 160) == {("aten::addmm", "0"), ("aten::mm", "1")}
    assert names(tape, 40) >= {("aten::addmm", "1")}
    assert names(tape, 80) == {("aten::mm", "0")}
    # the weights' gradients: 8*4 and 2*8 floats
    assert names(tape, 128) == {("aten::mm", "0")}
    assert names(tape, 64) == {("aten::mm", "1")}
    assert [CATEGORIES[tape.categories[block]] for block, size in enumerate(tape.sizes) if size in (64, 128)] == [
        "gradient"
    ] * 2


class Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"no {x.sum()}")


def test_an_error_within_a_module_leaves_no_mark_behind(reader: CpuReader) -> None:
    module = nn.Sequential(nn.Linear(4, 8), Failing())
    reader.begin(record=True)
    reader.watch(module)
    with pytest.raises(RuntimeError, match="no"):
        module(torch.ones(5, 4))
    after = torch.ones(7)
    reader.mark("forward")
    reader.end()
    reader.end()
    assert names(reader.recording(1), 28) == {("aten::ones", "")}
    assert not nn.modules.module._global_forward_hooks and not nn.modules.module._global_forward_pre_hooks
    del after


def test_scratch_is_what_a_call_held_beyond_its_result(reader: CpuReader) -> None:
    values = torch.rand(1000, 3)
    reader.begin(record=True)
    ordered = values.argsort(dim=0)
    reader.end()
    scratch = reader.scratch()
    # sort makes the sorted values as well, 1000 * 3 * 4 bytes, which argsort drops
    assert scratch["aten::argsort"] >= 12_000
    assert scratch["aten::sort"] < scratch["aten::argsort"] + ordered.nbytes


TEXT = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "9437184 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("error", "requested"),
    [
        (RuntimeError(TEXT), 9437184),
        (RuntimeError("[enforce fail] . DefaultCPUAllocator: not enough memory: you tried to allocate 64 bytes."), 64),
        (MemoryError(), None),
        (MemoryError("std::bad_alloc"), None),
    ],
)
def test_out_of_memory_is_a_result(reader: CpuReader, error: Exception, requested: int | None) -> None:
    reader.begin(record=False)
    weights = torch.ones(100)
    reader.mark("load")
    torch.ones(50)
    reader.end()
    found = reader.out_of_memory(error, "forward")
    assert (found.phase, found.requested_bytes, found.free_bytes) == ("forward", requested, 12345)
    assert found.allocated_bytes == 600  # 100 and 50 floats, before the error let go of them
    assert found.reserved_bytes is None and found.message
    del weights


def test_other_errors_are_not_about_memory(reader: CpuReader) -> None:
    assert reader.out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "forward") is None

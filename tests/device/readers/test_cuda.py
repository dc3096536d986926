"""The CUDA reader on a scripted device: counters, the driver's figure, retries, memory that was not there, a lost device."""

from __future__ import annotations

import inspect
import typing

import pytest
import torch

from sizer.device.readers import cuda_reader
from sizer.device.readers.cuda_reader import CudaReader, CudaRuntime
from sizer.device.record.measurement import COUNTED, DeviceFacts, PhaseReading
from tests.device.scripted_devices import ScriptedCuda, counters

FACTS = DeviceFacts(device="cuda:0", name="a GPU", total_bytes=10_000, capability=(8, 0))


def begun(device: ScriptedCuda, *, record: bool = False) -> CudaReader:
    reader = CudaReader(FACTS, device)
    reader.begin(record=record)
    return reader


def test_counters_are_read_on_an_idle_device_and_peaks_start_anew() -> None:
    device = ScriptedCuda()
    reader = begun(device)
    device.calls.clear()
    device.stats_now = counters(512, 1024, 2048, 4096)
    reader.mark("load")
    assert device.calls == ["synchronize", "stats", "reset_peaks"]
    device.stats_now = counters(600, 700, 2048, 2048)
    reader.mark("forward")
    reader.end()
    # driver: 500 for the context and what is reserved, beyond the 100 that were there before the context
    assert reader.phases() == (
        PhaseReading(phase="load", allocated_bytes=512, peak_allocated_bytes=1024, reserved_bytes=2048, peak_reserved_bytes=4096,
                     driver_bytes=2548),
        PhaseReading(phase="forward", allocated_bytes=600, peak_allocated_bytes=700, reserved_bytes=2048,
                     peak_reserved_bytes=2048, driver_bytes=2548),
    )  # fmt: skip
    assert reader.source == COUNTED and reader.retries() == 0 and reader.doubts() == ()
    assert reader.recording(1) is None and reader.segments() == ()


def test_without_the_management_library_the_whole_device_is_read() -> None:
    reader = begun(ScriptedCuda(driver=False))
    reader.mark("load")
    assert reader.phases()[0].driver_bytes == 1_000  # 10,000 in all, 9,000 free
    assert reader.doubts() == ("the driver's figure is that of the whole device, other processes included",)


@pytest.mark.parametrize(("others", "doubts"), [(0, 0), (None, 0), (2, 1)])
def test_others_on_the_device_are_told(others: int | None, doubts: int) -> None:
    reader = begun(ScriptedCuda(others=others))
    assert len(reader.doubts()) == doubts
    assert all("2 other processes computed on the device" in doubt for doubt in reader.doubts())


def test_a_context_that_was_there_before_is_told() -> None:
    reader = begun(ScriptedCuda(context=500, others=1))  # the one process is this one
    reader.mark("load")
    assert reader.phases()[0].driver_bytes == 0
    assert reader.doubts() == ("this process had a context before the measurement: the driver's figure leaves it out",)


def test_what_is_taken_after_others_were_noted_is_part_of_the_process() -> None:
    device = ScriptedCuda()
    reader = CudaReader(FACTS, device)
    reader.note_others()
    device.open()  # as a rank does where it meets the others
    device.others = 1
    reader.begin(record=False)
    reader.mark("load")
    assert reader.phases()[0].driver_bytes == 500 and reader.doubts() == ()


def test_a_driver_figure_that_falls_below_its_beginning_is_none() -> None:
    device = ScriptedCuda()
    reader = begun(device)
    device.context = -50
    reader.mark("load")
    assert reader.phases()[0].driver_bytes is None
    assert "another process gave memory back" in reader.doubts()[0]


def test_retries_are_those_of_the_measurement_and_are_doubted() -> None:
    device = ScriptedCuda(counters(0, 0, 0, 0, retries=3))
    reader = begun(device)
    device.stats_now = counters(0, 0, 0, 0, retries=5)
    reader.end()
    assert reader.retries() == 2
    assert reader.doubts() == ("the allocator was out of memory and emptied its cache 2 times",)


def test_without_a_peak_counter_there_is_no_peak() -> None:
    device = ScriptedCuda({"allocated_bytes.all.current": 512})
    reader = begun(device)
    device.stats_now = {"allocated_bytes.all.current": 1024}
    reader.mark("load")
    reader.end()
    (reading,) = reader.phases()
    assert (reading.allocated_bytes, reading.peak_allocated_bytes, reading.peak_reserved_bytes) == (1024, None, None)
    assert reader.retries() is None
    assert "512 B were allocated before the measurement began" in reader.doubts()
    assert "the counter allocated_bytes.all.peak was missing" in reader.doubts()


def test_a_negative_counter_is_none_and_doubted() -> None:
    device = ScriptedCuda()
    reader = begun(device)
    device.stats_now = counters(-512, 1, 2, 3)
    reader.mark("load")
    assert reader.phases()[0].allocated_bytes == 0
    assert "the counter allocated_bytes.all.current was -512" in reader.doubts()


TEXT = (
    "CUDA out of memory. Tried to allocate 2.00 KiB. GPU 0 has a total capacity of 9.77 KiB of which 1.00 KiB is free. Of the "
    "allocated memory 7.00 KiB is allocated by PyTorch, and 1.00 KiB is reserved by PyTorch but unallocated."
)


def test_out_of_memory_is_exact_where_the_allocator_told() -> None:
    device = ScriptedCuda()
    reader = begun(device)
    device.stats_now = counters(7_100, 7_100, 8_200, 8_200, ooms=1)
    device.fail(2_050, 1_030)
    device.stats_now = counters(500, 7_100, 8_200, 8_200, ooms=1)  # the error has let go of the rest
    reader.end()
    found = reader.out_of_memory(torch.OutOfMemoryError(TEXT), "backward")
    assert (found.phase, found.requested_bytes, found.free_bytes) == ("backward", 2_050, 1_030)
    assert (found.allocated_bytes, found.reserved_bytes) == (7_100, 8_200)
    assert found.message == TEXT
    assert reader.doubts() == ()


def test_out_of_memory_by_its_words_alone() -> None:
    reader = begun(ScriptedCuda())
    reader.end()
    found = reader.out_of_memory(torch.OutOfMemoryError(TEXT), "load")
    assert (found.requested_bytes, found.free_bytes) == (2048, 1024)
    assert (found.allocated_bytes, found.reserved_bytes) == (7168, 8192)
    bare = reader.out_of_memory(RuntimeError("CUDA error: out of memory"), "load")
    assert (bare.requested_bytes, bare.free_bytes, bare.allocated_bytes, bare.reserved_bytes) == (None,) * 4


def test_an_allocation_that_failed_and_was_tried_smaller_is_doubted() -> None:
    device = ScriptedCuda()
    reader = begun(device)
    device.stats_now = counters(0, 0, 0, 0, ooms=1)
    device.fail(10**9, 5)
    reader.end()
    assert reader.doubts() == ("1 allocation failed; a kernel that can do with less was then given less",)


def test_a_lost_device_is_no_lack_of_memory_and_does_not_stop_the_end() -> None:
    device = ScriptedCuda()
    reader = begun(device, record=True)
    reader.mark("load")
    device.lost = True
    with pytest.raises(RuntimeError, match="CUDA error: unspecified launch failure"):
        reader.mark("forward")
    reader.end()
    reader.end()
    assert reader.out_of_memory(RuntimeError("CUDA error: unspecified launch failure"), "forward") is None
    assert [reading.phase for reading in reader.phases()] == ["load"]
    assert reader.retries() is None and reader.recording(1) is None
    assert reader.doubts() == (
        "the allocator's history could not be read at the end (RuntimeError)",
        "the counters of retries could not be read at the end (RuntimeError)",
    )


def entry(action: str, address: int, size: int) -> dict:
    return {"action": action, "addr": address, "size": size, "stream": 0}


def test_a_recording_is_the_history_cut_into_phases() -> None:
    device = ScriptedCuda()
    reader = begun(device, record=True)
    device.entries = [entry("segment_alloc", 0, 2**21), entry("alloc", 0, 100)]
    reader.mark("load", {0: ("parameter", "head.weight")})
    device.entries = [*device.entries, entry("alloc", 512, 40)]
    reader.mark("forward")
    device.entries = [*device.entries, entry("free_requested", 512, 40), entry("free_completed", 512, 40)]
    reader.end()
    tape = reader.recording(4).validate()
    assert (tape.batch, list(tape.order), list(tape.sizes)) == (4, [0, 1, ~1], [100, 40])
    assert tape.marks == ((1, "load"), (2, "forward"))
    assert [tape.module_names[module] for module in tape.modules] == ["head.weight", ""]
    (segment,) = reader.segments()
    assert (segment.position, segment.bytes) == (0, 2**21)
    assert device.calls[-3:] == ["history", "stop_history", "stats"]


def test_a_history_that_lost_its_beginning_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_reader, "ENTRIES", 2)
    device = ScriptedCuda()
    reader = begun(device, record=True)
    device.entries = [entry("alloc", 0, 100), entry("alloc", 512, 100)]
    reader.end()
    assert reader.recording(1) is None and reader.segments() == ()
    assert reader.doubts() == ("the allocator's history was full and is not kept",)


def test_what_the_reader_asks_of_pytorch_is_there() -> None:
    asked = {name for name, _ in inspect.getmembers(CudaRuntime, inspect.isfunction) if not name.startswith("_")}
    assert asked <= set(dir(ScriptedCuda))
    for name in ("synchronize", "memory_stats", "reset_peak_memory_stats", "mem_get_info", "set_device"):
        assert callable(getattr(torch.cuda, name))
    history = inspect.signature(torch.cuda.memory._record_memory_history_impl)
    history.bind("all", context=None, stacks="python", max_entries=10)
    inspect.signature(torch.cuda.memory._snapshot).bind(torch.device("cuda:0"))
    assert callable(torch._C._cuda_attach_out_of_memory_observer) and callable(torch._C._cuda_hasPrimaryContext)
    assert typing.get_type_hints(CudaRuntime.used_bytes)["return"] == int | None

"""What kernels hold inside: the log of calls, and the two ways to count a call's bytes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from sizer.base.codec import DecodeError
from sizer.base.errors import DeviceError
from sizer.device.record.measurement import DeviceFacts, KernelRecord
from sizer.device.suite import kernel_log
from sizer.device.suite.kernel_log import KernelLog, PeakCounter, ProfileCounter, describe, open_counter, record_kernels
from sizer.query.text import parse_query
from sizer.tracing.steps import Steps

KIB = 2**10


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rows_of(step, counter) -> dict[str, object]:
    log = KernelLog(counter)
    with counter.running(), log:
        step()
    return {row.op: row for row in log.rows()}


def test_calls_are_counted_by_their_arguments():
    a, b = torch.zeros(16, 16), torch.zeros(16, 16)

    def step():
        for _ in range(3):
            torch.mm(a, b)
        torch.mm(a[:8], b)

    counter = ProfileCounter()
    log = KernelLog(counter)
    with counter.running(), log:
        step()
    # 16 x 16 x 4 B = 1024 B kept, and 8 x 16 x 4 B = 512 B; the view a[:8] is a call that allocates nothing: no row
    rows = [(row.op, row.arguments, row.calls, row.kept_bytes) for row in log.rows()]
    assert rows == [
        ("aten.mm.default", ("float32[16,16]", "float32[16,16]"), 3, 1024),
        ("aten.mm.default", ("float32[8,16]", "float32[16,16]"), 1, 512),
    ]


def test_the_inside_of_a_kernel_is_seen_on_the_cpu():
    # sort returns values of 4 B and indices of 8 B
    values = torch.arange(4096, dtype=torch.float32).flip(0)
    rows = rows_of(lambda: torch.sort(values), ProfileCounter())
    assert rows["aten.sort.default"].kept_bytes == 4096 * (4 + 8)
    images, weight = torch.zeros(2, 8, 32, 32), torch.zeros(8, 8, 3, 3)
    row = rows_of(lambda: F.conv2d(images, weight, padding=1), ProfileCounter())["aten.convolution.default"]
    assert row.kept_bytes == 2 * 8 * 32 * 32 * 4
    assert row.inner_bytes > 0  # oneDNN's reordered weights and scratch


def test_nothing_that_ran_is_nothing_counted():
    assert rows_of(lambda: None, ProfileCounter()) == {}
    assert list(ProfileCounter().readings()) == []


class ScriptedMemory:
    """An accelerator's counters: `holds` is (kept, inside) of each call to come, in bytes."""

    def __init__(self, *holds: tuple[int, int]):
        self.holds, self.now, self.peak, self.resets = list(holds), 0, 0, 0

    def work(self):
        kept, inside = self.holds.pop(0)
        self.peak = max(self.peak, self.now + max(kept, 0) + inside)
        self.now += kept

    def reset_peak_memory_stats(self, device):
        self.peak, self.resets = self.now, self.resets + 1

    def memory_stats_as_nested_dict(self, device):
        return {"allocated_bytes": {"all": {"current": self.now, "peak": self.peak}}}


def test_an_accelerator_is_read_around_each_call(monkeypatch):
    memory = ScriptedMemory((1024, 4096), (1024, 512), (-512, 0), (0, 2048))
    monkeypatch.setattr(torch, "scripted", memory, raising=False)
    counter = PeakCounter(SimpleNamespace(type="scripted"))
    for kind in (0, 0, 1, 1):
        assert counter.count(kind, lambda: memory.work() or "result") == "result"
    # kept and inside as scripted; what a call frees is not kept
    assert list(counter.readings()) == [(0, 1024, 4096), (0, 1024, 512), (1, 0, 0), (1, 0, 2048)]
    assert memory.resets == 4


def test_rows_hold_the_least_and_the_most(monkeypatch):
    memory = ScriptedMemory((1024 + 8192, 0), (1024, 4096))
    monkeypatch.setattr(torch, "scripted", memory, raising=False)
    counter = PeakCounter(SimpleNamespace(type="scripted"))
    log = KernelLog(counter)
    tensor = torch.zeros(4)
    with counter.running(), log:
        for _ in range(2):
            monkeypatch.setattr(counter, "count", _counted(counter, memory))
            torch.neg(tensor)
    (row,) = log.rows()
    # the first call also made a workspace of 8192 B that stays
    assert (row.calls, row.kept_bytes, row.most_kept_bytes, row.inner_bytes) == (2, 1024, 9216, 4096)


def _counted(counter, memory):
    def count(kind, call):
        return PeakCounter.count(counter, kind, lambda: (call(), memory.work())[0])

    return count


def test_a_device_without_a_peak_counter_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "scripted", SimpleNamespace(), raising=False)
    with pytest.raises(DeviceError, match="this device has no peak counter"):
        open_counter(SimpleNamespace(type="scripted"))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.zeros(2, 3), "float32[2,3]"),
        (torch.zeros(2, 3, dtype=torch.int64).t(), "int64[3,2]/1,3"),
        ([torch.zeros(1), torch.zeros(2)], "[float32[1], float32[2]]"),
        ([torch.zeros(2)] * 9, "9 tensors of 18 elements of float32"),
        ([1, None], "[1, None]"),
        (0.1, "0.1"),
        (torch.float16, "torch.float16"),
    ],
    ids=str,
)
def test_arguments_as_text(value, text):
    assert describe(value) == text


class ScriptedReader:
    device = torch.device("cpu")

    def facts(self) -> DeviceFacts:
        return DeviceFacts(device="cpu", name="Some Processor", total_bytes=None)

    def synchronize(self) -> None:
        pass


def test_a_whole_step_is_recorded_and_goes_through_json(monkeypatch):
    monkeypatch.setattr(kernel_log, "open_reader", lambda device: ScriptedReader())
    query = "arch=torchvision:squeezenet1_1&dtype=float32&batch=2&image=32&optimizer=sgd"
    record = record_kernels(parse_query(query), "cpu")
    assert record.failure is None
    convolutions = [row for row in record.rows if row.op == "aten.convolution.default"]
    assert sum(row.calls for row in convolutions) == 2 * 26  # two steps; SqueezeNet has 26 convolutions
    assert {"aten.convolution_backward.default", "aten.relu_.default"} <= {row.op for row in record.rows}
    assert KernelRecord.from_dict(record.to_dict()) == record


def test_what_ends_a_step_is_written_beside_the_calls_until_then(monkeypatch):
    monkeypatch.setattr(kernel_log, "open_reader", lambda device: ScriptedReader())

    def full(*args, **kwargs):
        torch.zeros(4).neg()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore lines")

    monkeypatch.setattr(Steps, "run", full)
    record = record_kernels(parse_query("arch=torchvision:squeezenet1_1&dtype=float32&batch=1&image=32"), "cpu")
    assert record.failure == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert [row.op for row in record.rows][-2:] == ["aten.zeros.default", "aten.neg.default"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        *((data, "a record of kernels is an object with a list of rows") for data in (None, {}, {"rows": 3})),
        ({"rows": [["aten.mm.default"]]}, "allowed is the keys device, query, versions"),
    ],
)
def test_other_data_is_refused(data, message):
    with pytest.raises(DecodeError, match=message):
        KernelRecord.from_dict(data)

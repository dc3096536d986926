"""Times read from a scripted device: a queue that works while the host goes on, and a clock that moves only when told."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from sizer.architecture.blueprint import Example
from sizer.device.trial import timing
from sizer.device.trial.timing import EVENTS, SYNCHRONOUS, Timer, measure_timing, open_timer

CPU = torch.device("cpu")
GIVEN = Example(args=(torch.zeros(4, 2),), kwargs={"mask": [torch.ones(3, dtype=torch.int64)]}, targets=torch.zeros(2))
GIVEN_BYTES = 4 * 2 * 4 + 3 * 8 + 2 * 4


class Queue:
    """A host's clock and a device that is busy until some later time; seconds."""

    def __init__(self) -> None:
        self.host = self.busy = 0.0

    def launch(self, on_host: float, on_device: float) -> None:
        self.host += on_host
        self.busy = max(self.host, self.busy) + on_device

    def wait(self) -> None:
        self.host = max(self.host, self.busy)

    def timer(self, **options: object) -> Timer:
        return Timer(clock="scripted", now=lambda: self.host, wait=self.wait, **options)


class Mark:
    """An event that is reached when the queue before it is done."""

    def __init__(self, queue: Queue):
        self.queue, self.time = queue, 0.0

    def record(self) -> None:
        self.time = max(self.queue.host, self.queue.busy)

    def elapsed_time(self, end: Mark) -> float:
        return (end.time - self.time) * 1000


def test_a_host_clock_that_does_not_wait_reads_the_launch():
    queue = Queue()
    queue.launch(0, 100)  # busy with something else: waited for before the first run
    found = measure_timing(lambda: queue.launch(0.001, 0.010), Example(), CPU, timer=queue.timer())
    # 1 ms to launch, then 10 ms of work
    assert found.unsynchronized.median_seconds == pytest.approx(0.001)
    assert found.step.median_seconds == pytest.approx(0.011)
    assert (found.clock, found.warm_up, found.step.runs) == ("scripted", 2, 7)


def test_events_are_read_in_the_device_time():
    queue = Queue()
    timer = queue.timer(make_event=lambda: Mark(queue))
    found = measure_timing(lambda: queue.launch(0.5, 0.25), Example(), CPU, timer=timer)
    # the first event is reached at once, the second when the host has launched for 0.5 s and the device worked for 0.25 s
    assert found.step.median_seconds == pytest.approx(0.75)
    assert found.unsynchronized.median_seconds == pytest.approx(0.5)


def test_warm_up_is_left_out_and_quartiles_lie_between():
    queue, times = Queue(), iter([100, 200, 7, 1, 3, 2, 6, 4, 5])
    found = measure_timing(lambda: queue.launch(0, next(times)), Example(), CPU, timer=queue.timer())
    # 1 2 3 4 5 6 7: median 4, quartiles half-way between 2 and 3, 5 and 6
    assert (found.step.low_seconds, found.step.median_seconds, found.step.high_seconds) == pytest.approx((2.5, 4, 5.5))


def test_a_single_run_is_its_own_spread():
    queue = Queue()
    found = measure_timing(lambda: queue.launch(0, 3), Example(), CPU, warm_up=0, runs=1, timer=queue.timer())
    assert (found.step.low_seconds, found.step.median_seconds, found.step.high_seconds) == (3, 3, 3)


def test_a_step_runs_as_often_as_said():
    calls = count()
    measure_timing(lambda: next(calls), Example(), CPU, warm_up=3, runs=4, timer=Queue().timer())
    assert next(calls) == 7


def test_transfers_with_and_without_pinned_memory(monkeypatch):
    queue, pinned = Queue(), set()

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        pinned.add(copy.data_ptr())
        return copy

    def move(tensor: torch.Tensor, device: torch.device, *, non_blocking: bool) -> torch.Tensor:
        # from pinned memory 1 s for each tensor, from plain memory 2 s, in which the host takes part
        if tensor.data_ptr() not in pinned:
            queue.launch(2, 0)
        else:
            queue.launch(0.25, 1)
            if not non_blocking:
                queue.wait()
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "to", move)
    found = measure_timing(lambda: None, GIVEN, CPU, timer=queue.timer(pin=pin))
    rows = [
        (row.pinned, row.non_blocking, row.issued.median_seconds, row.done.median_seconds) for row in found.transfers
    ]
    # three tensors; non-blocking from pinned memory the copies queue up: the first at 0.25, then one each second
    assert rows == [
        (False, False, 6, 6),
        (False, True, 6, 6),
        (True, False, 3.75, 3.75),
        (True, True, 0.75, 3.25),
    ]
    assert {row.bytes for row in found.transfers} == {GIVEN_BYTES}
    assert {row.done.runs for row in found.transfers} == {7}


def test_a_device_that_cannot_pin_shows_plain_transfers():
    def pin(tensor: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("pin_memory")

    found = measure_timing(lambda: None, GIVEN, CPU, timer=Queue().timer(pin=pin))
    assert [(row.pinned, row.non_blocking) for row in found.transfers] == [(False, False), (False, True)]


def test_a_step_without_tensors_has_no_transfers():
    assert measure_timing(lambda: None, Example(), CPU, timer=Queue().timer(pin=torch.clone)).transfers == ()


def test_the_cpu_copies_nothing():
    calls = []
    found = measure_timing(lambda: calls.append(GIVEN.args[0].sum()), GIVEN, CPU, runs=3)
    assert (found.clock, found.transfers, len(calls)) == (SYNCHRONOUS, (), 5)
    assert 0 <= found.unsynchronized.median_seconds <= found.step.high_seconds


@pytest.mark.parametrize(("warm_up", "runs"), [(0, 0), (-1, 3)])
def test_senseless_counts_are_refused(warm_up, runs):
    with pytest.raises(ValueError, match="allowed are at least 1 and at least 0"):
        measure_timing(lambda: None, GIVEN, CPU, warm_up=warm_up, runs=runs)


def test_what_the_step_raises_comes_through():
    def step() -> None:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        measure_timing(step, GIVEN, CPU)


def test_each_device_has_its_timer(monkeypatch):
    cuda = open_timer(torch.device("cuda", 1))
    assert cuda.clock == EVENTS
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    cuda.wait()
    assert waited == [torch.device("cuda", 1)]
    mps = open_timer(torch.device("mps"))
    assert (mps.clock, mps.make_event, mps.wait) == (timing.SYNCHRONIZED, None, torch.mps.synchronize)


def test_cuda_events_are_recorded_on_the_device_that_was_asked_for(monkeypatch):
    class Event:
        def __init__(self, enable_timing: bool):
            self.streams = []

        def record(self, stream: object) -> None:
            self.streams.append(stream)

        def elapsed_time(self, end: Event) -> float:
            return 2.0 if self.streams == end.streams == ["stream of cuda:1"] else -1.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    found = measure_timing(lambda: None, Example(), torch.device("cuda", 1))
    assert found.step.median_seconds == pytest.approx(0.002)

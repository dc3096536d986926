"""The time of one step and of copying its batch to the device, measured twice: with and without waiting for the device.

Work on an accelerator is queued: the call returns when the kernel is in the queue, not when it has run. A host clock around the
call therefore reads the time to launch. Here each run starts on an idle device. CUDA's own events, which travel through the
same queue, or a clock read after synchronization measure the real duration.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from sizer.architecture.blueprint import Example
from sizer.device.record.measurement import Spread, Timing, Transfer

EVENTS = "CUDA events"
SYNCHRONIZED = "host clock, after synchronization"
SYNCHRONOUS = "host clock; the CPU runs each operation before it returns"


class Event(Protocol):
    """A mark in the device's queue."""

    def record(self) -> None:
        """Put the mark behind all that is queued now."""

    def elapsed_time(self, end: Self) -> float:
        """Return the milliseconds between this mark and `end`, both reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timer:
    """Clock of one device, which tests replace.

    `now` is the host's clock in seconds. `wait` returns when the device has finished all queued work. `make_event` makes a mark
    on devices with events (None: the host's clock after `wait` is read instead). `pin` copies a tensor of the host into
    page-locked memory; None if batches need no copy, because the device computes on the host's memory.
    """

    clock: str
    now: Callable[[], float] = time.perf_counter
    wait: Callable[[], None] = lambda: None
    make_event: Callable[[], Event] | None = None
    pin: Callable[[Tensor], Tensor] | None = None


def open_timer(device: torch.device) -> Timer:
    """Return the timer of an available device.

    It uses events on CUDA, synchronization on other accelerators, and the plain clock on the CPU.
    """
    if device.type == "cpu":
        return Timer(clock=SYNCHRONOUS)
    if device.type == "cuda":
        return Timer(
            clock=EVENTS,
            wait=lambda: torch.cuda.synchronize(device),
            make_event=lambda: _CudaEvent(device),
            pin=Tensor.pin_memory,
        )
    backend = torch.get_device_module(device)
    return Timer(clock=SYNCHRONIZED, wait=backend.synchronize, pin=Tensor.pin_memory)


def measure_timing(
    step: Callable[[], None],
    batch: Example,
    device: torch.device,
    *,
    warm_up: int = 2,
    runs: int = 7,
    timer: Timer | None = None,
) -> Timing:
    """Return the seconds of one step after `warm_up` steps, and of copying the batch from the host.

    They are medians with quartiles of `runs`.

    `step` does the whole step once and leaves the device as it found it. `batch` is copied to `device` from plain and from
    pinned memory, each with and without `non_blocking`; its tensors may be anywhere. Every run starts with an idle device. The
    CPU has no transfers: it computes where the batch is. `timer` is for tests.

    Raises ValueError if `runs` < 1 or `warm_up` < 0, and errors of the step; `torch.OutOfMemoryError` also if a second copy of
    the batch does not fit.

    *Known limitations*: the time without waiting is that of a step on an idle device; a loop that never waits only reads this
    time until the queue is full. If the device cannot pin host memory, only the plain transfers are measured.
    """
    if runs < 1 or warm_up < 0:
        raise ValueError(f"runs was {runs} and warm_up {warm_up}; allowed are at least 1 and at least 0")
    timer = timer or open_timer(device)
    done, issued = _repeat(timer, step, warm_up, runs, events=True)
    return Timing(
        clock=timer.clock,
        warm_up=warm_up,
        step=done,
        unsynchronized=issued,
        transfers=tuple(_transfers(timer, batch, device, runs)),
    )


def _repeat(
    timer: Timer, work: Callable[[], object], warm_up: int, runs: int, *, events: bool
) -> tuple[Spread, Spread]:
    """Return the times until the work was done, and until its call returned."""
    for _ in range(warm_up):
        _time(timer, work, events=events)
    times = [_time(timer, work, events=events) for _ in range(runs)]
    return Spread.of([done for done, _ in times]), Spread.of([issued for _, issued in times])


def _time(timer: Timer, work: Callable[[], object], *, events: bool) -> tuple[float, float]:
    marks = (timer.make_event(), timer.make_event()) if events and timer.make_event else None
    timer.wait()
    began = timer.now()
    if marks:
        marks[0].record()
    kept = work()  # the result lives until the device is done, so that nothing is freed within the time
    if marks:
        marks[1].record()
    issued = timer.now() - began
    timer.wait()
    done = marks[0].elapsed_time(marks[1]) / 1000 if marks else timer.now() - began
    del kept
    return done, issued


def _transfers(timer: Timer, batch: Example, device: torch.device, runs: int) -> Iterator[Transfer]:
    leaves = pytree.tree_leaves((batch.args, batch.kwargs, batch.targets))
    plain = [leaf.detach().cpu() for leaf in leaves if isinstance(leaf, Tensor)]
    pin = timer.pin
    if pin is None or not plain:
        return
    size = sum(tensor.numel() * tensor.element_size() for tensor in plain)
    for pinned in (False, True):
        tensors = _pin(pin, plain) if pinned else plain
        if tensors is None:
            return
        for non_blocking in (False, True):
            done, issued = _repeat(timer, _copy(tensors, device, non_blocking), 1, runs, events=False)
            yield Transfer(pinned=pinned, non_blocking=non_blocking, bytes=size, issued=issued, done=done)


def _pin(pin: Callable[[Tensor], Tensor], tensors: list[Tensor]) -> list[Tensor] | None:
    """Return copies in page-locked memory; None if this device cannot pin."""
    try:
        return [pin(tensor) for tensor in tensors]
    except (RuntimeError, NotImplementedError):
        return None


def _copy(tensors: list[Tensor], device: torch.device, non_blocking: bool) -> Callable[[], list[Tensor]]:
    return lambda: [tensor.to(device, non_blocking=non_blocking) for tensor in tensors]


class _CudaEvent:
    """A CUDA event on the current stream of one device, which need not be the current device."""

    def __init__(self, device: torch.device):
        self._event = torch.cuda.Event(enable_timing=True)
        self._device = device

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def elapsed_time(self, end: _CudaEvent) -> float:
        return self._event.elapsed_time(end._event)

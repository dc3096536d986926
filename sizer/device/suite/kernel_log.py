"""Record memory inside kernels on a real device, in a separate process: `python -m sizer.device.suite.kernel_log`.

It watches every operator of two steps. This changes some operators (autograd no longer uses in-place shortcuts), so total
memory is measured elsewhere, without it. The bytes of a single call do not change.
"""

from __future__ import annotations

import gc
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from sizer.architecture import make_blueprint
from sizer.base.errors import DeviceError
from sizer.catalogue.modes import MODES
from sizer.device.readers.open import open_reader
from sizer.device.record.measurement import KernelRecord, KernelRow
from sizer.device.trial.materialize import allocate_parameters, initialize_parameters, loaded_on, prepare
from sizer.device.trial.trial import generate_on
from sizer.estimating.work import work_of
from sizer.processes.process import print_value
from sizer.query.request import Request
from sizer.query.text import format_query, parse_query
from sizer.tracing.steps import Steps
from sizer.tracing.trace import repeatable

LONG_LIST = 8  # for a longer list of tensors only the sums are kept
_PLACES = ("device", "generator", "layout", "pin_memory")  # arguments that do not change what a kernel allocates
_RANGE = "kernel:"

Call = tuple[str, tuple[str, ...]]  # operator and arguments


class CallCounter(Protocol):
    """Counts the bytes of calls. `readings` is called once, at the end: (number of the call's kind, kept, held inside)."""

    def count(self, kind: int, call: Callable[[], Any]) -> Any:
        """Return the call's result."""

    def running(self) -> Any:
        """Return a context in which `count` counts."""

    def readings(self) -> Iterable[tuple[int, int, int]]:
        """Return the counted bytes, in the order of the calls."""


class KernelLog(TorchDispatchMode):
    """Counts every operator that runs under it, one row per distinct call."""

    def __init__(self, counter: CallCounter) -> None:
        super().__init__()
        self._counter = counter
        self._kinds: dict[Call, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if _only_views(func):
            return func(*args, **kwargs)
        named = {name: value for name, value in kwargs.items() if name not in _PLACES}
        texts = (*map(describe, args), *(f"{name}={describe(value)}" for name, value in named.items()))
        kind = self._kinds.setdefault((str(func), texts), len(self._kinds))
        return self._counter.count(kind, lambda: func(*args, **kwargs))

    def rows(self) -> tuple[KernelRow, ...]:
        """Return a row per distinct call (bytes), in the order of their first calls; the counter cannot be used afterwards."""
        found: dict[int, list[tuple[int, int]]] = {}
        for kind, kept, inner in self._counter.readings():
            found.setdefault(kind, []).append((kept, inner))
        calls = list(self._kinds)
        return tuple(
            KernelRow(
                op=calls[kind][0],
                arguments=calls[kind][1],
                calls=len(readings),
                kept_bytes=min(kept for kept, _ in readings),
                most_kept_bytes=max(kept for kept, _ in readings),
                inner_bytes=max(inner for _, inner in readings),
            )
            for kind, readings in sorted(found.items())
        )


def describe(value: object) -> str:
    """Return an argument as text: dtype and shape of a tensor (and strides, if it is not contiguous), else the value's repr."""
    if isinstance(value, Tensor):
        strides = "" if value.is_contiguous() else "/" + ",".join(map(str, value.stride()))
        return f"{str(value.dtype).removeprefix('torch.')}[{','.join(map(str, value.shape))}]{strides}"
    if isinstance(value, (list, tuple)):
        tensors = [item for item in value if isinstance(item, Tensor)]
        if len(tensors) > LONG_LIST:
            dtypes = "|".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))
            return f"{len(tensors)} tensors of {sum(tensor.numel() for tensor in tensors)} elements of {dtypes}"
        return f"[{', '.join(map(describe, value))}]"
    return repr(value)[:80]


class PeakCounter:
    """Counts with an accelerator's own counters, with the peak reset before each call."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._memory = device, getattr(torch, device.type)
        if not hasattr(self._memory, "memory_stats_as_nested_dict"):
            raise DeviceError(
                "this device has no peak counter: memory inside kernels cannot be recorded",
                given=str(device),
                todo="record on cuda:N or cpu",
            )
        self._readings: list[tuple[int, int, int]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Return a context without preparations."""
        yield

    def count(self, kind: int, call: Callable[[], Any]) -> Any:
        """Return the call's result. The allocator works when a kernel is queued, so no synchronization is needed."""
        self._memory.reset_peak_memory_stats(self._device)
        before, _ = self._read()
        result = call()
        after, peak = self._read()
        self._readings.append((kind, max(0, after - before), peak - max(before, after)))
        return result

    def _read(self) -> tuple[int, int]:
        """Return the bytes allocated now and at the peak; `memory_stats`, which sorts all of them, takes three times as long."""
        counter = self._memory.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]
        return counter["current"], counter["peak"]

    def readings(self) -> Iterable[tuple[int, int, int]]:
        """Return every counted call."""
        return self._readings


class ProfileCounter:
    """Counts the CPU's allocations by the profiler's memory events within each call's range."""

    def __init__(self) -> None:
        self._profile: profile | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Profile the code within the context; garbage is collected before and after, not during a call."""
        gc.collect()
        gc.disable()
        try:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as self._profile:
                yield
        finally:
            gc.enable()

    def count(self, kind: int, call: Callable[[], Any]) -> Any:
        """Return the call's result, run within a range that the profiler notes."""
        with torch._C._profiler._RecordFunctionFast(f"{_RANGE}{kind}"):
            return call()

    def readings(self) -> Iterable[tuple[int, int, int]]:
        """Yield every counted call; none if nothing ran."""
        if self._profile is None:
            return
        memory, ranges = [], []
        for event in self._profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                memory.append((event.start_ns(), event.nbytes()))
            elif event.name().startswith(_RANGE):
                ranges.append((event.start_ns(), event.end_ns(), int(event.name().removeprefix(_RANGE))))
        memory.sort(key=lambda event: event[0])
        times, levels = [time for time, _ in memory], [0]
        for _, size in memory:
            levels.append(levels[-1] + size)
        for start, end, kind in sorted(ranges):
            first, last = bisect_left(times, start), bisect_left(times, end)
            kept = levels[last] - levels[first]
            yield kind, max(0, kept), max(levels[first : last + 1]) - max(levels[first], levels[last])


def open_counter(device: torch.device) -> CallCounter:
    """Return the counter of a device. Raises DeviceError if it has no peak counter (mps)."""
    return ProfileCounter() if device.type == "cpu" else PeakCounter(device)


def record_kernels(request: Request, device_name: str) -> KernelRecord:
    """Return the kernels of two steps, or of a generation, of a request with one dtype and one batch, in bytes.

    An error that ends the steps early, running out of memory included, is the record's `failure`; earlier calls remain valid.
    Raises DeviceError for a device that is missing or cannot count, RequestError, ConfigError and BuildError for the question.
    """
    from sizer.estimating.cautions import versions

    reader = open_reader(device_name)
    facts, device = reader.facts(), reader.device
    log = KernelLog(counter := open_counter(device))
    work, failure = work_of(request, *request.dtypes), None
    blueprint = make_blueprint(request, loaded=loaded_on(request, facts))
    module, bring = prepare(blueprint, work.dtype, checkpointing=request.checkpointing)
    if device.type != "cpu" and blueprint.load_quantized is None:
        allocate_parameters(module)
    example = blueprint.example(request.batches[0], work.trains)
    with repeatable(), counter.running():
        try:
            module = bring(module, device)
            initialize_parameters(module)
            with log:
                if MODES[work.mode].generates:
                    generate_on(module, example, work, device, lambda *arguments: reader.synchronize())
                else:
                    for _ in Steps(blueprint, module, example, work, device=device).run():
                        reader.synchronize()
        except Exception as error:  # any kind of error, out of memory above all: the calls before it are recorded
            failure = _first_line(error)
    return KernelRecord(
        query=format_query(request, complete=True),
        device=facts,
        versions=versions(),
        rows=log.rows(),
        failure=failure,
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0][:500]}"


def _only_views(func: Any) -> bool:
    """Return whether an operator returns nothing but views of its arguments: it allocates nothing anywhere."""
    schema = getattr(func, "_schema", None)
    returns = schema.returns if schema is not None else ()
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


if __name__ == "__main__":
    query_text, device_text = sys.argv[1:]
    torch.set_num_threads(1)  # as in a measurement: with more threads, the CPU's kernels hold buffers for each
    print_value(lambda: record_kernels(parse_query(query_text), device_text).to_dict())

"""The measured truth on the CPU: the same recipe run for real under torch.profiler, its memory events summed."""

from __future__ import annotations

import gc
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from sizer.architecture.blueprint import Blueprint, Example
from sizer.memory.tape import Tape
from sizer.tracing.optimizers import build_optimizers
from sizer.tracing.recipes import Work, autocast, place, weight_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTruth:
    """Bytes alive at each phase's end and the peak within it, weights and inputs included.

    `saved_numbers` are the bytes of Python numbers that autograd saved: PyTorch wraps each in an 8-byte CPU tensor that no
    dispatch mode sees (and that is on the CPU on every device). `scratch` is per operator the most that one call held
    beyond what it found and what it left.
    """

    alive: dict[str, int]
    peaks: dict[str, int]
    saved_numbers: int
    scratch: dict[str, int]


def tape_bytes(tape: Tape) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes alive at each phase's end and the peak within it, by plain addition."""
    now, position, alive, peaks = 0, 0, {}, {}
    for end, phase in tape.marks:
        peak = now
        for event in tape.order[position:end]:
            now += tape.sizes[event] if event >= 0 else -tape.sizes[~event]
            peak = max(peak, now)
        position, alive[phase], peaks[phase] = end, now, peak
    return alive, peaks


def measure_on_cpu(blueprint: Blueprint, work: Work, batch: int) -> CpuTruth:
    """Runs the recipe of `sizer.tracing.recipes` for real and reads every allocation from the profiler."""
    dtype = weight_dtype(work.dtype)
    torch.manual_seed(0)
    module = blueprint.build().to(dtype)
    example = blueprint.example(batch, work.mode == "training")
    before = _bytes_of([*module.parameters(), *module.buffers()])
    numbers: list[int] = []
    torch.manual_seed(0)
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
            _run(blueprint, module, place(example, dtype, torch.clone), work, numbers)
    finally:
        gc.enable()
    return _read(profiler, before, sum(numbers))


def _bytes_of(tensors: list[torch.Tensor]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def _mark(phase: str) -> None:
    with record_function(f"phase:{phase}"):
        pass


def _run(blueprint: Blueprint, module: nn.Module, example: Example, work: Work, numbers: list[int]) -> None:
    cast = autocast("cpu", work.dtype)
    if work.mode == "inference":
        module.eval()
        for phase in ("forward", "step2"):
            with torch.no_grad(), cast():
                output = blueprint.predict(module, example)
            if phase == "forward":
                _mark(phase)
            del output
        _mark("step2")
        return
    module.train()
    optimizers = build_optimizers(work.optimizer, work.optimizer_impl, module)
    scaler = torch.amp.GradScaler("cpu", enabled=work.dtype == "amp-float16")
    for step in (1, 2):
        with cast():
            loss = blueprint.loss(module, example)
        if step == 1:
            _mark("forward")
            numbers.append(_saved_numbers(loss))
        scaler.scale(loss).backward()
        del loss
        if step == 1:
            _mark("backward")
        for optimizer in optimizers.optimizers:
            scaler.step(optimizer)
        if optimizers.optimizers:
            scaler.update()
        if step == 1:
            _mark("optimizer")
        module.zero_grad(set_to_none=True)
    _mark("step2")


def _saved_numbers(loss: torch.Tensor) -> int:
    """The bytes of wrapped Python numbers that the graph of `loss` saved."""
    seen, numbers, todo = set(), {}, [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [next_node for next_node, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_saved_"):
                value = getattr(node, name)
                if isinstance(value, torch.Tensor) and value.dim() == 0 and value.dtype in (torch.float64, torch.int64):
                    numbers[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
    return sum(numbers.values())


def _read(profiler: profile, before: int, numbers: int) -> CpuTruth:
    memory, marks, ops = [], [], []
    for event in profiler.profiler.kineto_results.events():
        name = event.name()
        if name == "[memory]":
            memory.append((event.start_ns(), event.nbytes()))
        elif name.startswith("phase:"):
            marks.append((event.start_ns(), name.removeprefix("phase:")))
        elif name.startswith("aten::"):
            ops.append((event.start_ns(), event.end_ns(), name))
    memory.sort(key=lambda event: event[0])
    levels = [before]
    for _, size in memory:
        levels.append(levels[-1] + size)
    times = [time for time, _ in memory]
    alive, peaks, position = {"load": before}, {}, 0
    for end, phase in sorted(marks):
        stop = _index(times, end)
        alive[phase], peaks[phase] = levels[stop], max(levels[position : stop + 1])
        position = stop
    scratch: dict[str, int] = defaultdict(int)
    for start, end, name in ops:
        first, last = _index(times, start), _index(times, end)
        inside = max(levels[first : last + 1]) - max(levels[first], levels[last])
        scratch[name] = max(scratch[name], inside)
    return CpuTruth(alive=alive, peaks=peaks, saved_numbers=numbers, scratch=dict(scratch))


def _index(times: list[int], time: int) -> int:
    from bisect import bisect_left

    return bisect_left(times, time)

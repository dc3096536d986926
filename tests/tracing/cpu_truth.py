"""The measured truth on the CPU: the same steps run for real under torch.profiler, its memory events summed."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

from sizer.architecture.blueprint import Blueprint
from sizer.device.readers.cpu_reader import CpuReader
from sizer.device.record.measurement import DeviceFacts
from sizer.device.trial.materialize import build_without_weights, initialize_parameters, load
from sizer.tape.tape import Tape
from sizer.tracing.steps import Steps, Work, weight_dtype
from sizer.tracing.trace import repeatable

CPU = DeviceFacts(device="cpu", name="this computer", total_bytes=None)


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


def measure_on_cpu(blueprint: Blueprint, work: Work, batch: int, *, checkpointing: bool = False) -> CpuTruth:
    """Does the work of `sizer.tracing.steps` for real and reads every allocation from the profiler."""
    example = blueprint.example(batch, work.mode == "training")
    module = build_without_weights(blueprint, weight_dtype(work.dtype), checkpointing=checkpointing)
    reader, numbers = CpuReader(CPU), 0
    gc.collect()
    with repeatable():
        reader.begin(record=True)
        load(module, reader.device)
        reader.mark("load")
        initialize_parameters(module)
        steps = Steps(blueprint, module, example, work, device=reader.device)
        for phase in steps.run():
            reader.mark(phase)
            if phase == "forward" and steps.loss is not None:
                numbers = _saved_numbers(steps.loss)
        reader.end()
    alive, peaks = tape_bytes(reader.recording(batch))
    del peaks["load"]
    return CpuTruth(alive=alive, peaks=peaks, saved_numbers=numbers, scratch=reader.scratch())


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

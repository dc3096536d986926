"""One measurement in this process: the request's module on the reader's device, two steps, every figure that can be read."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sizer.architecture.blueprint import Blueprint, Example
from sizer.architecture.frozen_parts import inner
from sizer.architecture.greedy_generation import check_cache, generate
from sizer.architecture.inner_tensors import cache_tensors, parts_of
from sizer.base.codec import LIMIT_TEXT
from sizer.base.units import KIB, format_bytes
from sizer.catalogue.modes import KEPT, MODES
from sizer.device.readers.events import LiveTensors
from sizer.device.readers.reader import Reader
from sizer.device.record.measurement import DeviceOutOfMemory, Measurement, PhaseReading, TensorBytes, Timing
from sizer.device.record.recording import Measured
from sizer.device.trial.materialize import (
    Bring,
    allocate_parameters,
    initialize_parameters,
    loaded_on,
    parameter_and_buffer_bytes,
    prepare,
    storage_bytes,
)
from sizer.device.trial.rank import take_part
from sizer.device.trial.timing import measure_timing
from sizer.estimating.cautions import versions
from sizer.estimating.work import blueprint_of, work_of
from sizer.query.request import Request
from sizer.query.text import format_query
from sizer.tape.tape import FROZEN, KV_CACHE
from sizer.tracing.steps import Steps, Work, autocast, backends_of, mover, place, weight_dtype
from sizer.tracing.trace import repeatable
from sizer.tracing.traced_rank import make_steps


@contextmanager
def one_thread() -> Iterator[None]:
    """Run PyTorch's kernels with one thread within the context: with more threads, they hold buffers for each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def memory_limited(free_bytes: int | None) -> Iterator[None]:
    """Make an allocation within the context fail if it takes more than `free_bytes` beyond the process's current memory.

    Without it Linux overcommits, and kills the process when the memory is used. None, or another system: no limit.
    """
    if free_bytes is None or sys.platform != "linux":
        yield
        return
    import resource

    held = re.search(r"^VmData:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert held is not None  # Linux reports it for every process
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(held[1]) * KIB + free_bytes
    known = [value for value in (limit, soft, hard) if value != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(known), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


# ----------------------------------------------------------------------------------------------------------- generation


# Called with the number of tokens of each sequence, from 1, the inputs on the device and the tensors of the cache.
OnToken = Callable[[int, Example, list[Tensor]], None]


def generate_on(module: nn.Module, example: Example, work: Work, device: torch.device, on_token: OnToken) -> None:
    """Generate the tokens of `work` with a module that is on `device`. Raises RequestError if it has no such cache."""
    check_cache(module, work.cache)
    placed = place(example, weight_dtype(work.dtype), mover(device))

    def take_token(number: int, cache: object) -> bool:
        if number:
            on_token(number, placed, cache_tensors(cache))
        return number < work.new

    with torch.no_grad(), autocast(device.type, work.dtype)():
        generate(module.eval(), placed, new=work.new, cache=work.cache, on_token=take_token)


# ---------------------------------------------------------------------------------------------------------------- trial


Progress = Callable[[str], None]

_DOING = {
    "load": "loading the module",
    "rollout": "generating completions",
    "reference": "log-probabilities without gradients",
    "forward": "first forward pass",
    "backward": "first backward pass",
    "optimizer": "first optimizer step",
    "step2": "second step",
    "evaluate": "evaluation",
    "prefill": "reading the prompt",
    "decode": "generating token by token",
}


def measure_request(
    request: Request,
    reader: Reader,
    *,
    config: dict | None = None,
    config_text: str | None = None,
    timing: bool = True,
    record: bool = True,
    free_bytes: int | None = None,
    progress: Progress = lambda text: None,
) -> Measured:
    """Return the measurement of the request's one cell on the reader's device, in bytes and seconds.

    With `record` it includes the allocator's events. `free_bytes` is the available host memory: on the CPU, larger weights are
    not even tried. Out of memory and other errors of the steps are results. Raises RequestError, ConfigError and BuildError for
    the question itself.
    """
    work = replace(work_of(request, *request.dtypes), keeps_outputs=request.outputs == KEPT)
    progress("building the module")
    blueprint = blueprint_of(request, config, loaded_on(request, reader.facts(), config))
    example = blueprint.example(request.batches[0], work.trains)
    module, bring = prepare(blueprint, work.dtype, checkpointing=request.checkpointing)
    if work.plan is not None:
        module, bring = take_part(module, bring, work, reader.device)
    free_bytes = free_bytes if reader.device.type == "cpu" else None
    trial = _Trial(blueprint, module, bring, example, work, reader, progress)
    if refusal := _too_large(module, free_bytes):
        trial.out_of_memory = refusal
    else:
        trial.run(record=record, free_bytes=free_bytes)
        if timing and trial.steps is not None:
            trial.take_time(trial.steps)
    return trial.result(request, config_text, record=record)


@dataclass(slots=True)
class _Trial:
    """A running measurement; results so far remain valid when an error ends it."""

    blueprint: Blueprint
    module: nn.Module
    bring: Bring
    example: Example
    work: Work
    reader: Reader
    progress: Progress
    phase: str = "load"
    tensors: dict[str, int] = field(default_factory=dict)
    phases: tuple[PhaseReading, ...] = ()
    doubts: list[str] = field(default_factory=list)
    steps: Steps | None = None  # set once both steps were done
    out_of_memory: DeviceOutOfMemory | None = None
    failure: str | None = None
    timing: Timing | None = None

    def run(self, *, record: bool, free_bytes: int | None) -> None:
        """Run the phases, and store an error that ends them early."""
        error: Exception | None = None
        with one_thread(), repeatable(), backends_of(self.work):
            gc.collect()
            try:
                with memory_limited(free_bytes):
                    self._run_phases(record)
            except Exception as caught:  # the model and the device can raise anything; it is part of the result
                error = caught
            self.reader.end()
        self.phases = self.reader.phases()
        if error is not None:
            self._explain(error, free_bytes)

    def _explain(self, error: Exception, free_bytes: int | None) -> None:
        found = self.reader.out_of_memory(error, self.phase)
        if found is None:
            self.failure = f"{type(error).__name__} in the phase {self.phase}: {_one_line(error)}{_hint(error)}"
        elif free_bytes is not None:  # the allowed bytes minus the allocated bytes
            found = replace(found, free_bytes=max(0, free_bytes - (found.allocated_bytes or 0)))
        self.out_of_memory = found

    def _run_phases(self, record: bool) -> None:
        device = self.reader.device
        if device.type != "cpu" and self._comes_from_host():
            allocate_parameters(self.module)
        self.progress(_DOING["load"])
        self.reader.begin(record=record)
        self.module = self.bring(self.module, device)
        self.reader.watch(inner(self.module))
        self._mark("load", self._loaded())
        initialize_parameters(self.module)
        if MODES[self.work.mode].generates:
            generate_on(self.module, self.example, self.work, device, self._mark_token)
            return
        steps = make_steps(self.blueprint, self.module, self.example, self.work, device=device)
        steps.on_phase = partial(self._mark_phase, steps)
        for phase in steps.run():
            self._mark(phase, self._live(phase, steps))
        self.steps = steps
        if steps.skipped:
            self.doubts.append("the gradient scaler met an overflow and left out an optimizer's step")

    def _mark_phase(self, steps: Steps, number: int, phase: str, ends: bool) -> None:
        """Mark a phase of the first step that ends while a schedule runs."""
        if ends and number == 1:
            self._mark(phase, self._live(phase, steps))

    def _mark_token(self, number: int, inputs: Example, cache: list[Tensor]) -> None:
        """Mark the end of the prompt with the first token, that of the generation with the last one."""
        ends = [phase for phase, last in (("prefill", 1), ("decode", self.work.new)) if number == last]
        for phase in ends:
            live = self._placed(inputs) if phase == "prefill" else {}
            self._mark(phase, {**live, **_at_addresses(KV_CACHE, {"": self._on_device(cache)})})

    def _comes_from_host(self) -> bool:
        """Return whether all weights are on the host before they are moved to the device."""
        plan = self.work.plan
        return self.blueprint.load_quantized is None and (plan is None or not plan.splits)

    def _mark(self, phase: str, live: LiveTensors) -> None:
        self.reader.mark(phase, live)
        self.phase = self.work.phase_after(phase)
        if phase != self.phase:
            self.progress(_DOING[self.phase])

    def _loaded(self) -> LiveTensors:
        weights, buffers = parameter_and_buffer_bytes(self.module, self.reader.device.type)
        self.tensors["weights_bytes"], self.tensors["buffers_bytes"] = weights, buffers
        named = dict(inner(self.module).named_parameters())
        frozen = {name for name, p in named.items() if self.work.tell_frozen and not p.requires_grad}
        parameters = _at_addresses("parameter", {name: p for name, p in named.items() if name not in frozen})
        parameters |= _at_addresses(FROZEN, {name: named[name] for name in frozen})
        return _at_addresses("buffer", dict(inner(self.module).named_buffers())) | parameters

    def _live(self, phase: str, steps: Steps) -> LiveTensors:
        """Count the tensors that a phase brought, and return their addresses."""
        if phase == "forward":
            return self._placed(steps.example)
        if phase == "backward":
            gradients = {path: p.grad for path, p in inner(self.module).named_parameters() if p.grad is not None}
            self.tensors["gradients_bytes"] = storage_bytes(self._on_device(gradients.values()))
            owners = {path: path.rpartition(".")[0] for path in gradients}
            return {
                address: (category, owners[path])
                for address, (category, path) in _at_addresses("gradient", gradients).items()
            }
        if phase == "optimizer":
            states = self._on_device(steps.optimizers.state_tensors())
            self.tensors["optimizer_bytes"] = storage_bytes(states)
            return _at_addresses("optimizer state", {"": states})
        return {}

    def _placed(self, example: Example) -> LiveTensors:
        inputs = self._on_device(_tensors(example))
        self.tensors["inputs_bytes"] = storage_bytes(inputs)
        return _at_addresses("input", {"": inputs})

    def _on_device(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [tensor for tensor in tensors if tensor.device.type == self.reader.device.type]

    def take_time(self, steps: Steps) -> None:
        """Measure the time of one step and of copying the batch to the device; add a doubt if that fails."""
        self.progress("timing steps")
        try:
            batch = place(self.example, weight_dtype(self.work.dtype), lambda tensor: tensor)
            with backends_of(self.work):
                self.timing = measure_timing(steps.step, batch, self.reader.device)
        except Exception as error:  # the memory figures are complete without it
            self.doubts.append(f"the time could not be measured: {type(error).__name__} {_one_line(error)}")

    def result(self, request: Request, config_text: str | None, *, record: bool) -> Measured:
        """Return all results."""
        measurement = Measurement(
            query=format_query(request, complete=True),
            dtype=self.work.dtype,
            batch=request.batches[0],
            config_text=config_text,
            device=self.reader.facts(),
            versions=versions(),
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            source=self.reader.source,
            phases=self.phases,
            tensors=TensorBytes(**self.tensors, activations_bytes=self._activations()),
            retries=self.reader.retries() if self.phases else None,
            doubts=(*self.reader.doubts(), *self.doubts),
            out_of_memory=self.out_of_memory,
            failure=self.failure,
            timing=self.timing,
        )
        recording = self.reader.recording(request.batches[0]) if record and self.phases else None
        return Measured(
            measurement=measurement,
            recording=recording,
            segments=() if recording is None else self.reader.segments(),
        )

    def _activations(self) -> int | None:
        """Return the bytes that the forward pass left in addition to loaded tensors and inputs, by the device's counters."""
        read = {reading.phase: reading.allocated_bytes for reading in self.phases}
        if "forward" not in read or "inputs_bytes" not in self.tensors:
            return None
        return max(0, read["forward"] - read["load"] - self.tensors["inputs_bytes"])


def _too_large(module: nn.Module, free_bytes: int | None) -> DeviceOutOfMemory | None:
    """Return an out-of-memory result if the weights alone exceed the host's free memory, before anything is tried."""
    needed = sum(parameter_and_buffer_bytes(module))
    if free_bytes is None or needed <= free_bytes:
        return None
    return DeviceOutOfMemory(
        phase="load",
        requested_bytes=needed,
        free_bytes=free_bytes,
        allocated_bytes=0,
        reserved_bytes=None,
        message=f"not tried: weights and buffers are {format_bytes(needed)}, this computer has {format_bytes(free_bytes)} free",
    )


def _at_addresses(category: str, tensors: Mapping[str, Tensor | list[Tensor]]) -> dict[int, tuple[str, str]]:
    return {
        part.untyped_storage().data_ptr(): (category, path)
        for path, found in tensors.items()
        for tensor in (found if isinstance(found, list) else [found])
        for part in parts_of(tensor)
    }


def _tensors(example: Example) -> Iterator[Tensor]:
    leaves = pytree.tree_leaves((example.args, example.kwargs, example.targets))
    return (leaf for leaf in leaves if isinstance(leaf, Tensor))


def _hint(error: BaseException) -> str:
    return " (oneDNN says so where memory has run out, too)" if "could not create a primitive" in str(error) else ""


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[: LIMIT_TEXT // 100]

"""From a Blueprint to a Tape: one run of its steps on meta tensors."""

from __future__ import annotations

import copy
import gc
import random
import traceback
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from types import FunctionType, NoneType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from sizer.architecture.blueprint import Blueprint
from sizer.architecture.inner_tensors import parts_of
from sizer.architecture.peft_adapters import cast
from sizer.architecture.quantization import quantization_objects
from sizer.base.errors import BuildError, ConfigError, RequestError, TraceError
from sizer.catalogue.optimizers import BITSANDBYTES
from sizer.distributed.sharding import refuses_unused, split
from sizer.tape.affine import LIMIT_BYTES
from sizer.tape.tape import BlockNotes, PhaseOfStep, Tape
from sizer.tracing.compiled.install import WRAPPED, compile_failures, compiling, module_compiled
from sizer.tracing.compiled.launches import libraries_called
from sizer.tracing.cpu.bitsandbytes import bitsandbytes_on_cpu
from sizer.tracing.cuda.attention import backends_answered
from sizer.tracing.cuda.encoder import fast_path_on
from sizer.tracing.cuda.recurrent import weights_flattened
from sizer.tracing.device import Device
from sizer.tracing.device_rules import kernels_installed
from sizer.tracing.meta.autocast import Autocast
from sizer.tracing.meta.constructors import random_states_seen, values_from_data
from sizer.tracing.meta.cuda_graphs import graphs_seen
from sizer.tracing.meta.device_optimizers import optimizers_on, state_of
from sizer.tracing.meta.dtypes import is_refusal, remedy
from sizer.tracing.meta.graph_order import nodes_numbered_as_on_device
from sizer.tracing.meta.host_memory import offloading_seen
from sizer.tracing.meta.imports import untraced_imports
from sizer.tracing.meta.loss_operators import chunked_loss_on, transducers_on
from sizer.tracing.meta.quantized_operators import fp8_products
from sizer.tracing.meta.stream_calls import streams_seen
from sizer.tracing.meta.unseen_calls import buckets_seen, emptied_caches_seen, resizes_seen
from sizer.tracing.meta.views import views_unseen
from sizer.tracing.modules import Loading
from sizer.tracing.recorder import Recorder
from sizer.tracing.steps import Steps, Work, backends_of, is_marked, weight_dtype
from sizer.tracing.traced_rank import make_steps, world_of_work, wrap_ddp
from sizer.tracing.values.iterations import iterations_assumed
from sizer.tracing.values.libraries import library_values_assumed

Ends = bool | Callable[[Tape], bool]
"""True if a trace ends at a phase, or a function of the tape so far that returns True to end it there."""

# Of the accumulated passes of a step, the first has no gradients yet; from the second on all are equal
# (tests/tracing/test_accumulate.py).
PASSES = 2

_META = torch.device("meta")
# Types of most attributes of modules, which hold no tensors other than those that `_restore` handles
_PLAIN = frozenset({NoneType, bool, int, float, str, dict, OrderedDict, tuple, list, set, frozenset})
_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def build(blueprint: Blueprint, *, checkpointing: bool = False, dtype: str = "float32") -> nn.Module:
    """Return the blueprint's float32 module on meta, made for its work; a quantized one for one dtype of the contract.

    Constructors that read values (`.tolist()`, `.item()`) get them. Small buffers (strides, positions, scales) keep their
    values for later traces (`Recorder.load`). Raises what Blueprint.make raises.
    """
    with _building() as recorder:
        module = blueprint.make(checkpointing=checkpointing, dtype=dtype)
    recorder.values.keep(module)
    return module


def build_loaded(
    blueprint: Blueprint, *, checkpointing: bool, dtype: str, device: Device, tell_frozen: bool
) -> tuple[nn.Module, Loading]:
    """Return the blueprint's quantized module on meta for a dtype of the contract, and its loading by the rules of `device`.

    Raises what Blueprint.make raises, and TraceError.
    """
    with _building() as builder:
        module = blueprint.prepare(dtype)
    builder.values.keep(module)
    recorder = Recorder(device)
    recorder.block_notes = BlockNotes()
    with repeatable(), recording(recorder), torch.device("meta"):
        module = blueprint.finish(blueprint.load(module), checkpointing=checkpointing)
        return module, recorder.loaded(module, tell_frozen=tell_frozen)


@contextmanager
def _building() -> Iterator[Recorder]:
    """Build modules on meta within the context, with values for their construction."""
    recorder = Recorder(Device("cpu"))
    with untraced_imports(), values_from_data(recorder.values), recorder, torch.device("meta"):
        yield recorder


def trace(
    blueprint: Blueprint,
    module: nn.Module,
    work: Work,
    *,
    batch: int,
    device: Device,
    short: Ends = False,
    forward_alone: Ends = False,
    first_step: bool = False,
    block_notes: BlockNotes | None = None,
    loading: Loading | None = None,
    on_token: Callable[[Recorder, int, object], bool] | None = None,
) -> Tape:
    """Return the tape (bytes as requested) of two steps of `work` at one batch size, by the rules of `device`.

    DDP at its defaults refuses parameters without a gradient. If there are any, it gets `find_unused_parameters=True`, and the
    device notes it.

    Args:
        blueprint: The blueprint.
        module: The result of `build`. It is cast to the work's dtype and keeps it, but no other changes of its steps. A
            quantized module is the result of `build_loaded`, with its `loading`.
        work: The work.
        batch: The batch size.
        device: The device.
        short: End the trace when the first step no longer depends on the batch size, for `fit_affine`. A function instead of
            True is called there with the tape so far; if it returns False the trace continues.
        forward_alone: End the trace after the first forward pass; True or a function, as for `short`.
        first_step: End the trace after the first step of the optimizer; True or a function, as for `short`.
        block_notes: Receives further facts about blocks; the tape does not change.
        loading: The loading of a quantized module.
        on_token: Called as `Steps.on_token`, with the recorder.

    Raises:
        TraceError: PyTorch fails; the error has the operator and the module.
    """
    given: dict[str, Any] = {"batch": batch, "device": device, "ends": _ends(work, short, forward_alone, first_step)}
    given |= {"block_notes": block_notes, "loading": loading, "on_token": on_token}
    if module not in _WITH_UNUSED:
        try:
            return _trace(blueprint, module, work, **given)
        except TraceError as error:
            if work.plan is None or not work.plan.replicates or not refuses_unused(error):
                raise
        _WITH_UNUSED.add(module)
        if block_notes is not None:
            for noted in (block_notes.tensors, block_notes.parameters, block_notes.ends):
                noted.clear()
    return _trace(blueprint, module, work, **given)


def _ends(work: Work, short: Ends, forward_alone: Ends, first_step: bool) -> dict[str, list[Ends]]:
    """Return, by phase of the first step, the arguments that end a trace after it. Empty if the trace has both steps."""
    found: dict[str, list[Ends]] = {}
    last = "backward" if work.trains else "forward"
    for phase, is_last in (("forward", forward_alone), (last, short), ("optimizer", first_step and work.trains)):
        if is_last:
            found.setdefault(phase, []).append(is_last)
    return found


_WITH_UNUSED: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules with parameters that have no gradient
_UNUSED = "some parameters have no gradient; without it DDP refuses the second step"


def _trace(
    blueprint: Blueprint,
    module: nn.Module,
    work: Work,
    *,
    batch: int,
    device: Device,
    ends: dict[str, list[Ends]],
    block_notes: BlockNotes | None,
    loading: Loading | None,
    on_token: Callable[[Recorder, int, object], bool] | None,
) -> Tape:
    """Return the tape as `trace` does, for one setting of DDP."""
    if loading is None and blueprint.replace_layers is None:
        cast(module.to("meta"), weight_dtype(work.dtype))
    example = blueprint.example(batch, work.trains)
    device.dtype = work.dtype
    recorder = Recorder(device)
    recorder.batch_size = batch
    recorder.block_notes = block_notes
    if work.plan is None:
        bring(recorder, module, loading, tell_frozen=work.tell_frozen)

    def tape() -> Tape:
        _check_size(recorder, batch)
        return recorder.log.tape(batch=batch, stand_ins=tuple(recorder.notes), host_bytes=recorder.host.peak_bytes)

    def is_last(phase: str) -> bool:
        return any(end is True or (end is not False and end(tape())) for end in ends.get(phase, ()))

    with world_of_work(work, module, device), unchanged(module):
        with repeatable(), backends_of(work), compiling(work, recorder) as end_phase, recording(recorder), ExitStack() as views:
            if work.plan is None and work.compile_scope is None:
                views.enter_context(views_unseen(module, recorder.only_views))
            try:
                with explain_errors(recorder, module), compile_failures(), ExitStack() as stack:
                    if work.plan is not None:
                        find_unused = module in _WITH_UNUSED
                        if find_unused and work.plan.replicates:
                            device.note_choice("DDP", "find_unused_parameters=True", _UNUSED)
                        module = on_rank(recorder, module, work, loading, find_unused=find_unused)
                    recorder.log.mark("load")
                    if block_notes is not None:
                        block_notes.ends.append((len(recorder.log.order), PhaseOfStep(step=0, phase="load")))
                    called = stack.enter_context(module_compiled(module, work.compile_scope, work.compile_mode))
                    stack.enter_context(libraries_called(work.library, recorder, fla=work.fla))
                    steps = make_steps(
                        *(blueprint, called, example, work),
                        device=_META,
                        kind=device.kind,
                        move=recorder.place,
                        passes=min(work.accumulate, PASSES),
                    )
                    if on_token is not None:
                        steps.on_token = partial(on_token, recorder)
                    try:
                        with closing(steps.run_all()) as parts:
                            _log(recorder, steps, parts, is_last=is_last, end_phase=end_phase)
                    finally:
                        steps.close()
            finally:
                module.zero_grad(set_to_none=True)
        return tape()


def on_rank(
    recorder: Recorder, module: nn.Module, work: Work, loading: Loading | None, *, find_unused: bool = False
) -> nn.Module:
    """Return the rank's module on its device, logged: a copy, unless it was quantized while it was loaded.

    FSDP2, tensor and pipeline parallel wrap the module on meta. It is then made empty, so that only its own shards are ever on
    the device; if they are offloaded, only its buffers are. DDP wraps the existing tensors, and holds its buckets from then on.
    """
    plan = work.plan
    assert plan is not None, "ranks have a plan"
    with _disable_current_modes():
        if loading is None:
            module = copy.deepcopy(module)
        if plan.splits:
            module = split(module, plan, work.computed_in)
    if plan.splits and not plan.offload:
        module.to_empty(device=_META)
    for part in (stage.model for stage in module) if plan.pp > 1 else (module,):
        bring(recorder, part, loading, tell_frozen=work.tell_frozen)
    return wrap_ddp(module, plan, work.objective, find_unused=find_unused) if plan.replicates else module


def bring(recorder: Recorder, module: nn.Module, loading: Loading | None, *, tell_frozen: bool = False) -> None:
    """Log the module's transfer to the device: by `.to(device)`, or as it was loaded."""
    if loading is None:
        recorder.load(module, tell_frozen=tell_frozen)
    else:
        recorder.resume(loading, module)


def _check_size(recorder: Recorder, batch: int) -> None:
    """Raise TraceError if the bytes of all blocks exceed 64 bits, in which replays add them up."""
    if (total := sum(recorder.log.sizes)) >= LIMIT_BYTES:
        raise TraceError(f"batch {batch} would allocate {total:.1e} bytes in all", allowed="less than 2**62")


def _log(
    recorder: Recorder,
    steps: Steps,
    parts: Iterable[tuple[int, str, bool]],
    *,
    is_last: Callable[[str], bool],
    end_phase: Callable[[], None],
) -> None:
    """Run the `parts` of steps, mark their phases and classify their blocks.

    It stops at the end of the first phase of the first step for which `is_last` is True. `end_phase` is called at the end of
    each phase.
    """
    log = recorder.log
    trained = [p for p in steps.module.parameters() if p.requires_grad]
    start = len(log.order)
    log.again = several = steps.passes > 1

    def passed(number: int, phase: str, ends: bool) -> None:
        nonlocal start
        end_phase()
        if phase == "forward":
            log.keep_activations(start)
            if steps.loss is not None:
                recorder.note_output(steps.loss)
            if ends and number == 2 and steps.module.training:
                log.second_forward = len(log.order)
        elif phase == "backward":
            recorder.classify((p.grad for p in trained), "gradient")
            log.end_outputs()
        elif phase == "optimizer":
            recorder.classify(steps.optimizers.state_tensors(), "optimizer state")
        if recorder.block_notes is not None:
            _note(recorder, steps, number, phase)
        if phase != "forward":
            log.again = several and phase == "optimizer"
        start = len(log.order)
        if ends and is_marked(number, phase):
            log.mark(phase)

    steps.on_phase = passed
    steps.on_output = recorder.note_output
    steps.on_gradient = lambda gradient: recorder.classify((gradient,), "gradient")
    steps.on_backward = lambda: log.begin_graphs_end(recorder.block_of(steps.loss))
    for number, phase, ends in steps.run_all():
        passed(number, phase, ends)
        if ends and number == 1 and is_last(phase):
            return


def _note(recorder: Recorder, steps: Steps, number: int, phase: str) -> None:
    """Note the end of a phase, and the parameters of gradients and optimizer state."""
    notes = recorder.block_notes
    if notes is None:
        return
    notes.ends.append((len(recorder.log.order), PhaseOfStep(step=number, phase=phase)))
    states = {parameter: state for one in steps.optimizers.optimizers for parameter, state in state_of(one).items()}
    for name, parameter in steps.module.named_parameters():
        state = states.get(parameter, {}).values()
        for tensor in (parameter.grad, *(value for value in state if isinstance(value, torch.Tensor))):
            for part in () if tensor is None else parts_of(tensor):
                if (block := recorder.block_of(part)) is not None:
                    notes.parameters[block] = name.removeprefix(WRAPPED)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Log all operators on meta tensors by the rules of the recorder's device within the context."""
    device = recorder.device
    with ExitStack() as stack:
        stack.enter_context(untraced_imports())
        stack.enter_context(kernels_installed(device))
        stack.enter_context(Autocast(device.kind, device.version, compiles=recorder.compiles).installed())
        stack.enter_context(optimizers_on(device.kind, lambda: recorder.host.offloads))
        stack.enter_context(fast_path_on(device.kind))
        stack.enter_context(fp8_products(device.kind))
        stack.enter_context(chunked_loss_on(device))
        stack.enter_context(emptied_caches_seen(device.kind, recorder.empty_cache))
        stack.enter_context(values_from_data(recorder.values, recorder.place_of_data))
        stack.enter_context(library_values_assumed(recorder, recorder.values.assume_unknown))
        stack.enter_context(iterations_assumed(recorder.stand_in))
        stack.enter_context(transducers_on(recorder))
        stack.enter_context(streams_seen(recorder, device.kind))
        stack.enter_context(graphs_seen(recorder))
        stack.enter_context(resizes_seen(recorder.resized))
        stack.enter_context(buckets_seen(recorder.log))
        stack.enter_context(offloading_seen(recorder.host, recorder.leave))
        if device.kind != "cpu":
            stack.enter_context(nodes_numbered_as_on_device())
        if device.kind == "cuda":
            stack.enter_context(weights_flattened(recorder.block_of))
            stack.enter_context(backends_answered(device))
        if device.kind == "cpu":
            stack.enter_context(random_states_seen(recorder.see_new))
            stack.enter_context(bitsandbytes_on_cpu())
        stack.enter_context(recorder.paths)
        stack.enter_context(recorder)
        yield


@contextmanager
def explain_errors(recorder: Recorder, module: nn.Module | None = None) -> Iterator[None]:
    """Convert failures of the traced code to a TraceError with the operator, the module and the line of that code.

    With the `module` that was cast to the recorder's dtype, the error has a remedy if the dtype is the reason.
    """
    try:
        yield
    except (TraceError, RequestError, ConfigError, BuildError):  # has the reason already
        raise
    except Exception as error:  # model code can raise any error; all of them mean that this step cannot be traced
        todo = remedy(recorder.device.dtype, module) if module is not None and is_refusal(error) else None
        raise TraceError(_failure(recorder, error), todo=todo) from error


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Restore a module after the steps within the context, so that each trace is of a module without earlier steps.

    Steps may leave tensors in it, such as a table made once for their dtype and batch size, which another trace would use.
    """
    before = [(child, dict(vars(child)), dict(child._buffers)) for child in module.modules()]
    objects = [(one, dict(vars(one))) for child in module.modules() for one in _objects_of(child)]
    dtypes = [(parameter, parameter.dtype) for parameter in module.parameters()]
    try:
        yield
    finally:
        for one, attributes in objects:
            _restore(vars(one), attributes)
        for cached in _cached_methods(module):
            cached.cache_clear()
        for parameter, dtype in dtypes:
            if parameter.dtype != dtype:  # bitsandbytes' layers cast their biases
                parameter.data = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
        for child, attributes, buffers in before:
            _restore(vars(child), attributes)
            child._buffers.clear()
            child._buffers.update(buffers)


def _objects_of(module: nn.Module) -> Iterator[object]:
    """Yield objects of a module that are no modules and may hold tensors: tables of rotary positions, quantized states.

    States of 4-bit weights stay as the first forward pass leaves them, which repacks them on the CPU.
    """
    yield from quantization_objects(module)
    for value in vars(module).values():
        if type(value) in _PLAIN:
            continue
        own = hasattr(value, "__dict__") and not isinstance(value, (nn.Module, torch.Tensor, type, FunctionType))
        if own and not type(value).__module__.startswith(f"{BITSANDBYTES}."):
            yield value


def _cached_methods(module: nn.Module) -> set[Any]:
    """Return the caches of methods (functools.lru_cache) of a module's classes, which may keep tensors by device."""
    found = set()
    for kind in {type(child) for child in module.modules()}:
        for name, defined in vars(kind).items():
            method = getattr(defined, "__func__", defined)  # of a static method
            inside = [cell.cell_contents for cell in getattr(method, "__closure__", None) or ()]  # of a wrapper around a cache
            found |= {one for one in (method, *inside) if hasattr(one, "cache_clear") and not name.startswith("__")}
    return found


def _restore(now: dict[str, object], before: dict[str, object]) -> None:
    """Restore the attributes that hold tensors. Other attributes stay: in one, transformers notes that its hooks are installed."""
    for name in now.keys() | before.keys():
        old, new = before.get(name), now.get(name)
        if old is new or not (_holds_tensors(old) or _holds_tensors(new)):
            continue
        if name in before:
            now[name] = old
        else:
            del now[name]


def _holds_tensors(value: object) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
    return any(isinstance(item, torch.Tensor) for item in items)


@contextmanager
def repeatable() -> Iterator[None]:
    """Fix random seeds and disable garbage collection within the context, so that two traces differ in sizes only."""
    enabled, state, numpys = gc.isenabled(), random.getstate(), np.random.get_state()
    gc.disable()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)  # transformers' masks over speech
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numpys)
        if enabled:
            gc.enable()


def _failure(recorder: Recorder, error: Exception) -> str:
    where = recorder.paths.of_error(error) or "the model"
    text = str(error).strip().splitlines()
    line = line_of(error)
    return (
        f"{type(error).__name__} in {where} at {recorder.at}: {text[0][:200] if text else 'no message'}"
        f"{f' ({line})' if line else ''}"
    )


def line_of(error: Exception) -> str | None:
    """Return file and line of the innermost code outside of PyTorch and Sizer; None if there is none (a backward pass)."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith((*_OURS, "<"))]
    return f"{Path(theirs[-1].filename).name}:{theirs[-1].lineno}" if theirs else None

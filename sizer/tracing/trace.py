"""From a Blueprint to a Tape: one run of a recipe on meta tensors."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from sizer.architecture.blueprint import Blueprint
from sizer.errors import TraceError
from sizer.memory.tape import Tape
from sizer.tracing.autocast import Autocast
from sizer.tracing.boxes import boxes_assumed
from sizer.tracing.device import Device
from sizer.tracing.imports import imports_apart
from sizer.tracing.kernels.encoder import fast_path_on
from sizer.tracing.kernels.rnnt import transducers_on
from sizer.tracing.lengths import lengths_assumed
from sizer.tracing.optimizers import optimizers_on
from sizer.tracing.patches import random_states_seen, values_from_data
from sizer.tracing.recipes import RECIPES, Work, weight_dtype
from sizer.tracing.recorder import Recorder


def build(blueprint: Blueprint) -> nn.Module:
    """The blueprint's float32 module on meta. Constructors that ask for values (`.tolist()`, `.item()`) get them.

    Small buffers (strides, positions, scales) keep their values for the traces to come (`Recorder.load`).
    """
    recorder = Recorder(Device("cpu"))
    with imports_apart(), values_from_data(recorder.values), recorder, torch.device("meta"):
        module = blueprint.build()
    recorder.values.keep(module)
    return module


def trace(
    blueprint: Blueprint, module: nn.Module, work: Work, *, batch: int, device: Device, short: bool = False
) -> Tape:
    """The tape (bytes as requested) of two steps of `work` at one batch size, by the rules of `device`.

    With `short` it ends where the first step no longer depends on the batch size, for `fit_affine`.

    `module` is what `build` returned; it is cast to the work's dtype and left there. Raises TraceError with the operator and
    module at which PyTorch gave up.
    """
    module.to("meta").to(weight_dtype(work.dtype))
    example = blueprint.example(batch, work.mode == "training")
    device.work = work.dtype
    recorder = Recorder(device)
    recorder.samples = batch
    recorder.load(module)
    recorder.log.mark("load")
    with repeatable(), recording(recorder):
        try:
            with explained(recorder):
                RECIPES[work.mode](recorder, blueprint, module, example, work, short=short)
        finally:
            module.zero_grad(set_to_none=True)
    return recorder.log.tape(batch=batch, stand_ins=tuple(recorder.notes))


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Within the context, everything on meta tensors is logged by the rules of the recorder's device."""
    device = recorder.device
    with ExitStack() as stack:
        stack.enter_context(imports_apart())
        stack.enter_context(device.installed())
        stack.enter_context(Autocast(device.kind).installed())
        stack.enter_context(optimizers_on(device.kind))
        stack.enter_context(fast_path_on(device.kind))
        stack.enter_context(values_from_data(recorder.values))
        stack.enter_context(boxes_assumed(recorder))
        stack.enter_context(lengths_assumed(recorder.values))
        stack.enter_context(transducers_on(recorder))
        if device.kind == "cpu":
            stack.enter_context(random_states_seen(recorder.see_new))
        stack.enter_context(recorder.paths)
        stack.enter_context(recorder)
        yield


@contextmanager
def explained(recorder: Recorder) -> Iterator[None]:
    """Turns any failure of the traced code into a TraceError that names the operator and the module."""
    try:
        yield
    except TraceError:  # says already why
        raise
    except Exception as error:  # model code can raise anything; all of it means that this step cannot be traced
        raise TraceError(_failure(recorder, error)) from error


@contextmanager
def repeatable() -> Iterator[None]:
    """Random numbers from fixed seeds and no garbage collection in between, so that two traces differ in sizes alone."""
    enabled, state = gc.isenabled(), random.getstate()
    gc.disable()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            random.seed(0)
            yield
    finally:
        random.setstate(state)
        if enabled:
            gc.enable()


def _failure(recorder: Recorder, error: Exception) -> str:
    where = recorder.paths.of_error(error) or "the model"
    text = str(error).strip().splitlines()
    return f"{type(error).__name__} in {where} at {recorder.at}: {text[0][:200] if text else 'no message'}"

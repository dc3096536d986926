"""Code of your own: any module, or any step written as for a real device. Imports torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch import device as on_meta

from sizer.architecture.blueprint import Blueprint, Example
from sizer.architecture.module_census import take_census
from sizer.base.arguments import arguments_of, check_function, check_text, check_whole, describe
from sizer.base.errors import RefusedValueError, RequestError
from sizer.base.versions import parse_version
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.modes import MODES
from sizer.distributed.described_gpus import accelerator_of
from sizer.distributed.world import alone, world_of
from sizer.estimating.cautions import cautions, target, versions
from sizer.query.hints import HINTS
from sizer.query.keys import read_optimizer
from sizer.query.values import choice, read_torch
from sizer.report.bounds import ROUTED, Margin
from sizer.report.census import Census
from sizer.report.column import read_columns
from sizer.report.estimate import with_margin
from sizer.report.replays import peak_reserved_bytes
from sizer.report.report import Report, build_report
from sizer.tape.archive import Traced
from sizer.tape.compiled_code import CompiledCode
from sizer.tape.family import TapeFamily
from sizer.tape.tape import Tape
from sizer.tracing.compiled.install import Compiler, compile_failures, hardware_like
from sizer.tracing.compiled.launches import Launches
from sizer.tracing.cuda.size_oracle import size_oracle_of
from sizer.tracing.device import Device
from sizer.tracing.explain import explain, formulas
from sizer.tracing.meta.accelerators import OnMeta, devices_told, modes_in_callbacks
from sizer.tracing.meta.collectives import ROUTES
from sizer.tracing.meta.deepspeed_calls import deepspeed_answered
from sizer.tracing.meta.own_code import (
    checkpoints_not_written,
    checkpoints_read_at_once,
    compiling_refused,
    host_tensors_told,
    refuse_low_bits,
)
from sizer.tracing.recorder import Recorder
from sizer.tracing.steps import Work
from sizer.tracing.trace import build, explain_errors, recording, repeatable, trace
from sizer.tracing.watch import StepWatcher

Loss = Callable[[Any], Tensor]

_FACTORY = "pass lambda: MyModel()"
_SETUP = "make models and optimizers in it, then `def step(): ...` and `return step`"


def size_module(
    factory: Callable[[], nn.Module],
    inputs: tuple | Mapping[str, Any],
    *,
    mode: str = "training",
    optimizer: str = "adamw",
    gpu: str = "a100-80gb",
    loss: Loss | None = None,
    steps: int = 2,
    torch: str | None = None,
) -> Report:
    """Return the report (bytes) of one step of your module, at the batch size of `inputs`.

    `factory` returns the module and is called under `torch.device("meta")`. `inputs` are its arguments, a tuple or a dict of
    tensors on the CPU; values matter only if control flow reads them. `loss` maps the module's output to a scalar. The default
    is the sum of every floating-point output. The dtype is that of the module's own parameters.

    `torch` is the PyTorch version ("2.11") of the rules; None is the installed one.

    Raises RequestError for arguments that are not allowed, TraceError if the step cannot be traced.

    *Known limitations*: `steps` is 2, the number after which memory repeats itself.
    """
    if steps != 2:
        raise RequestError("steps", given=str(steps), allowed="2", todo="leave it out: memory repeats after two")
    modes = [key for key, row in MODES.items() if not (row.generates or row.serves)]
    mode = _read("mode", mode, choice(modes, hints=HINTS["mode"]))
    optimizer = _read("optimizer", optimizer, read_optimizer)
    check_function("factory", factory, allowed="a function that returns the module, without arguments", todo=_FACTORY)
    place = _gpu(gpu)
    args, kwargs = arguments_of(inputs)
    example = Example(args=args, kwargs=kwargs)
    blueprint = Blueprint(
        name=getattr(factory, "__name__", "module"),
        class_name="",
        build=partial(_made, factory),
        example=lambda batch, training: example,
        loss=lambda module, e: _loss_of(module(*e.args, **e.kwargs), module, loss),
        predict=lambda module, e: module(*e.args, **e.kwargs),
    )
    module = build(blueprint)
    refuse_low_bits(module.parameters())
    dtype = _dtype(module)
    device = _device(place, torch)
    batch = next((t.shape[0] for t in [*args, *kwargs.values()] if isinstance(t, Tensor) and t.dim()), 1)
    work = Work(mode=mode, dtype=dtype, optimizer=optimizer)
    tape = trace(blueprint, module, work, batch=batch, device=device)
    census = take_census(module, name=blueprint.name)
    return _report(tape, census, dtype=dtype, gpu=place, mode=mode, device=device, optimizer=optimizer)


def size_step(
    setup: Callable[[], Callable[[], Any]],
    *,
    gpu: str = "a100-80gb",
    steps: int = 2,
    torch: str | None = None,
    world: int | None = None,
    rank: int = 0,
    expandable_segments: bool = False,
) -> Report:
    """Return the report (bytes) of your own step, written as for a real device.

    `setup` is called once under `torch.device("meta")`. It makes models, optimizers and batches and returns a function without
    arguments that does one step. Tensors without a device are on the host; `.cuda()`, `.to("cuda")` and `device="cuda"` put
    them on the device. `torch.autocast("cuda", …)` acts as on the device, and torch.cuda reports one GPU. Phases are marked by
    autograd's engine and the optimizers' hooks; the last of `steps` (at least 1) is "step2".

    `torch` is the PyTorch version ("2.11") of the rules; None is the installed one. `expandable_segments` is the allocator's
    setting of that name, which only CUDA devices have. Raises RequestError for arguments that are not allowed, TraceError if
    the step cannot be traced, with the operator and module.

    `world` is the world size. The step is then that of rank `rank`, as started by torchrun: torch.distributed is initialized,
    torch.cuda reports a host with eight GPUs, and DDP, FSDP1 and 2 and DTensor run unchanged (sizer.distributed). If ranks
    exchange the sizes of later messages by an all-to-all, as expert parallel does, `setup` is called a second time. The
    estimate is then for even counts, and its range ends where all other ranks send everything to this one.

    *Known limitations*: torch.cuda's memory statistics are 0 while a step is traced. Memory of NCCL is not counted: its
    buffers, and inputs of asynchronous collectives until they are waited for. Other data that ranks would send is unknown.
    Tensors that live after `setup` and are neither parameter, buffer, gradient nor optimizer state count as input. With several
    optimizers "backward" ends at the first one's step.
    """
    check_function("setup", setup, allowed="a function that returns the step, without arguments", todo=_SETUP)
    check_whole("steps", steps, "2")
    if steps < 1:
        raise RequestError("steps", given=str(steps), allowed="1 or more", todo="give 2, after which memory repeats")
    place = _gpu(gpu)
    if expandable_segments and place.backend != "cuda":
        allowed = "False, or a CUDA device"
        raise RequestError("expandable_segments", given=f"True with gpu={gpu}", allowed=allowed, todo="leave it out")
    device = _device(place, torch)
    traced = partial(_trace_step, setup, device, place, steps, world=lambda recorder: _world(world, rank, place, recorder))
    recorder, roots, compiled = traced()
    census = take_census(nn.ModuleList(roots) if len(roots) != 1 else roots[0], name=getattr(setup, "__name__", "step"))
    tape, dtype = _tape(recorder), _dtype(roots[0]) if roots else "float32"
    crowded = _tape(traced(crowded=True)[0]) if any(note.startswith(ROUTES) for note in recorder.notes) else None
    return _report(
        tape,
        census,
        dtype=dtype,
        gpu=place,
        mode="training",
        device=device,
        expandable_segments=expandable_segments,
        crowded=crowded,
        compiled=compiled,
    )


def _made(factory: Callable[[], nn.Module]) -> nn.Module:
    module = factory()
    if not isinstance(module, nn.Module):
        raise RequestError(
            "factory", given=f"one that returned {describe(module)}", allowed="one that returns an nn.Module", todo=_FACTORY
        )
    return module


def _trace_step(
    setup: Callable[[], Callable[[], Any]],
    device: Device,
    gpu: Gpu,
    steps: int,
    *,
    world: Callable[[Recorder], AbstractContextManager[None]],
    crowded: bool = False,
) -> tuple[Recorder, list[nn.Module], CompiledCode | None]:
    """Return the recorder of the steps, the top-level modules, and the compiled code.

    `crowded` is as the recorder takes it.
    """
    recorder = Recorder(device, crowded=crowded)
    compiler = Compiler(gpu, recorder) if device.kind == "cuda" else None
    recorder.compiles, recorder.environment = compiler is not None, os.environ
    launches = Launches(hardware_like(gpu), recorder.values.forget) if device.kind == "cuda" else None
    watcher = StepWatcher(recorder)
    with (
        nullcontext() if launches is None else launches.seen(),
        deepspeed_answered(),
        world(recorder),
        repeatable(),
        checkpoints_read_at_once(),
        checkpoints_not_written(recorder.notes.setdefault),
        host_tensors_told(recorder.host),
        compiling_refused() if compiler is None else compiler.watching(),
        recording(recorder),
        watcher.watching(),
        explain_errors(recorder),
        compile_failures(),
    ):
        host, deferred = recorder.host, recorder.deferred
        host.setting_up = device.kind != "cpu"
        with (
            on_meta("meta"),
            OnMeta(host, deferred) as mode,
            modes_in_callbacks(mode),
            devices_told(host, deferred, device.kind),
            deferred.setting_up(),
            watcher.low_bits_refused(),
        ):
            step = setup()
        check_function("setup", step, allowed="one that returns a function without arguments", todo=_SETUP, returned_by="one")
        host.setting_up = False
        watcher.loaded()
        for number in range(1, steps + 1):
            watcher.begin_step()
            with OnMeta(host, deferred) as mode, modes_in_callbacks(mode), devices_told(host, deferred, device.kind):
                step()
            if compiler is not None:
                compiler.end_step()
            watcher.end_step("optimizer" if number == 1 else "step2" if number == steps else "")
    recorder.notes.update(dict.fromkeys(() if launches is None else launches.notes()))
    if device.kind != "cpu" and not recorder.log.sizes:
        todo = "add .cuda() or device='cuda' to the step's tensors"
        raise RequestError("setup", given="only tensors on the host", allowed="one on the device or more", todo=todo)
    return recorder, watcher.roots(), None if compiler is None else compiler.code


def _tape(recorder: Recorder) -> Tape:
    return recorder.log.tape(batch=1, stand_ins=tuple(recorder.notes), host_bytes=recorder.host.peak_bytes)


def _report(
    tape: Tape,
    census: Census,
    *,
    dtype: str,
    gpu: Gpu,
    mode: str,
    device: Device,
    optimizer: str | None = None,
    expandable_segments: bool = False,
    crowded: Tape | None = None,
    compiled: CompiledCode | None = None,
) -> Report:
    """Return the report of a tape.

    `crowded` is the tape with all other ranks' data sent to this one; it gives the end of the range.
    """
    family, oracle = TapeFamily(exact=(tape,)), size_oracle_of(gpu)
    columns = read_columns(
        {dtype: family}, [tape.batch], gpu=gpu, mode=mode, oracle=oracle, expandable_segments=expandable_segments
    )
    if crowded is not None:
        most = peak_reserved_bytes(crowded.resolve(oracle), gpu.backend, expandable_segments)
        (row,) = columns[dtype].estimates
        margin = Margin(name=ROUTED, less_bytes=0, more_bytes=max(0, most - row.peak_reserved_bytes))
        columns[dtype] = replace(columns[dtype], estimates=(with_margin(row, margin, gpu),))
    traced = {dtype: Traced(family=family, kernels=device.kernels())}
    return build_report(
        query="",
        versions=versions(),
        census=census,
        columns=columns,
        gpu=gpu,
        mode=mode,
        cautions=cautions(device, gpu),
        target=target(device),
        assumptions=tuple(map(str, device.kernels())),
        explanation=explain(
            device,
            traced=traced,
            optimizer=optimizer if MODES[mode].trains else None,
            gpu=gpu,
            expandable_segments=expandable_segments,
        ),
        formulas=formulas(device, gpu),
        compiled=compiled,
    )


def _gpu(key: str) -> Gpu:
    return find_gpu(_read("gpu", key, lambda text: find_gpu(text).key))


def _device(gpu: Gpu, torch: str | None) -> Device:
    return Device(gpu.backend, gpu.capability, version=None if torch is None else parse_version(_read("torch", torch, read_torch)))


def _read(name: str, given: object, read: Callable[[str], str]) -> str:
    text = check_text(name, given)
    try:
        return read(text)
    except RefusedValueError as refused:
        raise RequestError(refusals=[refused.refusal(name, text)]) from None


def _refuse_ranks(ranks: int) -> None:
    raise RequestError(
        "world", given=f"none, where the step joins {ranks} ranks", allowed="the number of ranks", todo=f"give world={ranks}"
    )


def _world(size: int | None, rank: int, gpu: Gpu, recorder: Recorder) -> AbstractContextManager[None]:
    check_whole("rank", rank, "rank=0")
    if size is None:
        if rank:
            raise RequestError(
                "rank", given=str(rank), allowed="0 without a world", todo="give world=, the number of ranks"
            )
        if gpu.backend != "cuda":
            return nullcontext()
        return alone(accelerator_of(gpu), recorder.deferred.__contains__, _refuse_ranks)
    check_whole("world", size, "world=8")
    if size < 1:
        raise RequestError("world", given=str(size), allowed="1 or more", todo="give the number of ranks")
    if not 0 <= rank < size:
        raise RequestError("rank", given=str(rank), allowed=f"0 to {size - 1}", todo="give a rank of the world")
    if gpu.backend != "cuda":
        raise RequestError(
            "gpu", given=gpu.key, allowed="a CUDA GPU with world=", todo="give one, as h100-80gb"
        )
    return world_of(size, rank, accelerator_of(gpu), on_no_device=recorder.deferred.__contains__)


def _dtype(module: nn.Module) -> str:
    return next((str(p.dtype).removeprefix("torch.") for p in module.parameters() if p.is_floating_point()), "float32")


def _loss_of(output: object, module: nn.Module, loss: Callable[[object], Tensor] | None) -> Tensor:
    from sizer.architecture.blueprint import stand_in_loss

    if loss is None:
        return stand_in_loss(output, module)
    found = loss(output)
    if not isinstance(found, Tensor) or found.numel() != 1:
        given = f"a tensor of {tuple(found.shape)}" if isinstance(found, Tensor) else describe(found)
        raise RequestError(
            "loss",
            given=f"a function that returned {given}",
            allowed="one that returns a scalar tensor",
            todo="pass for example lambda out: out.mean()",
        )
    return found

"""Run a script under Sizer's tracer, on meta tensors, and write the results.

Imports torch; started by `sizer.running.starting`.

This is the route without CUDA libraries: it needs no Linux and no CUDA build of PyTorch. `torch.cuda` answers for the described
device, and tensors of the device are meta tensors.

*Known limitations*: C++ code sees meta tensors, so a library that checks for them may take another path. Values on the device
are unknown: reads return the tracer's stand-ins.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import multiprocessing.process
import os
import pickle
import re
import sys
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.cuda.comm
import torch.cuda.jiterator
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from sizer.architecture.compile_later import preceded
from sizer.architecture.module_census import take_census
from sizer.base.codec import encode
from sizer.base.errors import TraceError
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.hardware import HARDWARE
from sizer.distributed.described_gpus import Accelerator
from sizer.distributed.world import alone, world_of
from sizer.running.checkpoints import Checkpoints
from sizer.running.history import LOAD, REST, phase_of_step
from sizer.running.other_ranks import one_rank
from sizer.running.own_recordings import answer_recordings
from sizer.running.rank_messages import Messages
from sizer.running.run_settings import Settings, main_function, own_traceback
from sizer.running.small_values import call_site, fix_seeds
from sizer.running.traced_counters import TracedCounters, mps_answers
from sizer.tape.tape import Tape
from sizer.tracing.compiled.install import Compiler, compile_failures, hardware_like
from sizer.tracing.compiled.launches import Launches
from sizer.tracing.cuda.size_oracle import size_oracle_of
from sizer.tracing.device import Device
from sizer.tracing.meta.accelerators import OnMeta, devices_told, modes_in_callbacks
from sizer.tracing.meta.deepspeed_calls import deepspeed_answered
from sizer.tracing.meta.host_memory import HostMemory
from sizer.tracing.meta.own_code import checkpoints_read_at_once, compiling_refused, host_tensors_told
from sizer.tracing.recorder import Recorder
from sizer.tracing.trace import recording, repeatable
from sizer.tracing.values.host_draws import HostDraws
from sizer.tracing.values.stand_ins import FINITE
from sizer.tracing.watch import StepWatcher

_aten = torch.ops.aten
_READING = {_aten._local_scalar_dense.default, _aten._to_copy.default, _aten.copy_.default, _aten.equal.default}
_READS = ("the value of a tensor was taken as", "values copied to the CPU were taken as", "two tensors of unknown values")


class Stop(BaseException):
    """Raised after the requested number of steps."""


class Steps:
    """Report a script's modules, optimizers and compiled calls to the tracer, as `size_step` does."""

    def __init__(self, recorder: Recorder, compiler: Compiler | None, limit: int, setup: ExitStack) -> None:
        """Trace up to `limit` steps; `setup` is closed when the first step begins."""
        self.watcher, self._recorder, self._limit = StepWatcher(recorder), recorder, limit
        self._compiler = compiler
        self._setup = setup
        self.done = 0  # the steps of the optimizer that stepped most often
        self._counts = WeakIdKeyDictionary()  # by optimizer
        self.ends: dict[str, int] = {}
        self.checkpoints = Checkpoints(self._is_on_device, by_host=True)
        self._leader: weakref.ref | None = None
        self._led = 1  # the step of the leader
        self.began = False

    def begin(self) -> None:
        """End the setup."""
        if self.began:
            return
        self.began = True
        self._setup.close()
        self._recorder.host.setting_up = False
        self.watcher.loaded()
        self.ends[LOAD] = self._position()
        self.watcher.begin_step()

    def forward(self, module: nn.Module, args: Any) -> None:
        """Note that a module runs: the first one to do so ends the setup."""
        self.watcher.see(module)
        if any(map(self._is_on_device, nn.Module.parameters(module))):
            self.begin()

    @contextmanager
    def low_bits_named(self) -> Iterator[None]:
        """Raise TraceError for bitsandbytes' weights, in place of the error that they raise when moved to the device."""
        try:
            yield
        except Exception:
            if not self.began:
                with self.watcher.low_bits_refused():
                    pass
            raise

    def begun_by(self, wrap: Callable[[Callable], Callable]) -> staticmethod:
        """Return `Optimizer.profile_hook_step` such that a step ends the setup before PyTorch iterates over its hooks.

        A step with a closure may come before any forward pass. The end of the setup registers hooks of optimizers.
        """

        def begin_if_on_device(optimizer: Any, *args: Any) -> None:
            if any(self._is_on_device(parameter) for group in optimizer.param_groups for parameter in group["params"]):
                self.begin()

        return staticmethod(lambda step: preceded(wrap(step), begin_if_on_device))

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Note that an optimizer will step."""
        self._leader = weakref.ref(optimizer) if self._leader is None else self._leader
        if self._limit and self._counts.get(optimizer, 0) >= self._limit:
            raise Stop

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Note that an optimizer has stepped."""
        number = self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        self.done = max(self.done, number)
        if self._leader is not None and self._leader() is optimizer:
            self._led = number
            if self._compiler is not None:
                self._compiler.end_step()
            self.watcher.end_step("optimizer" if number == 1 else "")
            self.watcher.begin_step()
        self.ends[phase_of_step(self._led)] = self._position()

    def tape(self) -> Tape:
        """End the trace and return its tape, with the phases of a run."""
        if not self.began:
            self.begin()
            del self.ends[LOAD]  # as in a run with the driver: no module or optimizer was moved to the device
        self.watcher.end_step("step2" if self.done else "optimizer")
        tape = self._recorder.log.tape(
            batch=1, stand_ins=tuple(self._recorder.notes), host_bytes=self._recorder.host.peak_bytes
        )
        marks = sorted((position, phase) for phase, position in self.ends.items())
        return replace(tape, marks=(*marks, (len(tape.order), REST)), second_forward=None)

    def _is_on_device(self, tensor: torch.Tensor) -> bool:
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # within torch.func.grad, vmap and their kin
            tensor = torch._C._functorch.get_unwrapped(tensor)
        return tensor.is_meta and tensor not in self._recorder.host and tensor not in self._recorder.deferred

    def _position(self) -> int:
        return len(self._recorder.log.order)


def main() -> NoReturn:
    """Trace the script that the settings name."""
    settings = Settings.from_json(sys.argv[1])
    gpu = find_gpu(settings.gpu)
    recorder = Recorder(Device(gpu.backend, gpu.capability, version=None))
    is_cuda = gpu.backend == "cuda"
    compiler = Compiler(gpu, recorder) if is_cuda else None
    launches = Launches(hardware_like(gpu), recorder.values.forget) if is_cuda else None
    recorder.compiles, recorder.environment = is_cuda, os.environ
    noted = _noted(recorder)
    recorder.draws = HostDraws(recorder.host.__contains__, lambda text: recorder.notes.setdefault(text))
    began, status, message = time.monotonic(), "completed", ""
    end: object = None  # the script's objects at its end: its globals, or the exception whose traceback references its frames
    with ExitStack() as stack:
        # parameters keep their identity in `.to("cuda")`, not in `load_state_dict(assign=True)`
        getter = "get_swap_module_params_on_conversion"
        stack.enter_context(mock.patch.object(torch.__future__, getter, _swaps))
        stack.enter_context(mock.patch.object(torch.utils, "swap_tensors", _swap_data))
        setup = ExitStack()
        steps = Steps(recorder, compiler, settings.steps, setup)
        if compiler is not None:
            compiler.before_call = steps.begin
        if launches is not None:
            stack.enter_context(launches.seen())
        stack.enter_context(deepspeed_answered())
        stack.enter_context(_answers(settings, recorder, steps.checkpoints))
        stack.enter_context(answer_recordings(history=False))
        for context in (
            repeatable(),
            checkpoints_read_at_once(),
            host_tensors_told(recorder.host),
            compiling_refused() if compiler is None else compiler.watching(),
            recording(recorder),
            steps.watcher.watching(),
        ):
            stack.enter_context(context)
        for handle in (
            register_optimizer_step_pre_hook(steps.before),
            register_optimizer_step_post_hook(steps.after),
            register_module_forward_pre_hook(steps.forward),
        ):
            stack.callback(handle.remove)
        stack.enter_context(steps.checkpoints.installed())
        steps_of = torch.optim.Optimizer.profile_hook_step
        stack.enter_context(mock.patch.object(torch.optim.Optimizer, "profile_hook_step", steps.begun_by(steps_of)))
        recorder.host.setting_up = True
        enter_device(stack, recorder)  # for the setup and the steps: a script may be within a mode of its own when the steps begin
        setup.enter_context(recorder.deferred.setting_up())
        setup.enter_context(steps.watcher.low_bits_refused())
        for module, names in _UNTRACED_CALLS.items():
            for name in names:
                stack.enter_context(mock.patch.object(module, name, _refused(f"{module.__name__}.{name}")))
        stack.enter_context(recorder.draws.rounds_drawn())
        fix_seeds()
        try:
            with compile_failures(), steps.low_bits_named():
                end = main_function(settings)()
        except Stop as stop:
            status, end = "stopped", stop
        except SystemExit as left:
            end = left
            if isinstance(left.code, str):
                print(left.code, file=sys.stderr)
            if left.code not in (None, 0):
                status, message = "failed", f"SystemExit: {left.code}"
        except KeyboardInterrupt as interrupt:
            status, end = "interrupted", interrupt
        except BaseException as error:
            end = error
            failed = not _is_tracers(error)
            if _PLACES.search(str(error)):
                error.args = (_TWO_PLACES,)
            print(own_traceback(error) if failed else "".join(traceback.format_exception(error)), end="", file=sys.stderr)
            status, message = "failed" if failed else "untraced", f"{type(error).__name__}: {error}"[:2000]
            if (words := _untraced(error)) is not None:
                message = str(_refusal(*words))
        recorder.notes.update(dict.fromkeys(() if launches is None else launches.notes()))
        found = _found(settings, steps, gpu, recorder.host)
        del end
    found |= {name: counts.most_common() for name, counts in noted.items()}
    found["compiled"] = encode(None if compiler is None else compiler.code)
    found |= {"status": status, "message": message, "seconds": round(time.monotonic() - began, 1)}
    Path(settings.out).write_text(json.dumps(found))
    steps.checkpoints.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _gather_alike(objects: list[Any], obj: Any, *args: Any, **kwargs: Any) -> None:
    """Stand in for torch.distributed.all_gather_object: every rank contributes the same object as this rank."""
    objects[:] = [obj] * len(objects)


def _start_without_device(process: Any, start: Callable = multiprocessing.process.BaseProcess.start) -> None:
    """Stand in for multiprocessing.Process.start. Raises TraceError if the process is given tensors of the device."""
    given = pytree.tree_leaves((process._args, process._kwargs))
    if any(_holds_device(one) for one in given):
        raise TraceError(
            "a process that the script starts is not traced",
            given=f"tensors of the device for {process.name}",
            allowed="one process that uses the device",
            todo="run the script with `sizer run --route driver`",
        )
    start(process)


def _holds_device(value: object) -> bool:
    parameters = nn.Module.parameters(value) if isinstance(value, nn.Module) else ()
    return any(isinstance(one, torch.Tensor) and one.is_meta for one in (value, *parameters))


def _refused(name: str) -> Callable[..., NoReturn]:
    """Return a replacement that raises, for a function such as torch.jit.trace.

    Sizes are tensors under it, which meta kernels cannot check.
    """

    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise _refusal(name)

    return refused


def _refusal(name: str, given: str = "a call of it", allowed: str = "eager code") -> TraceError:
    return TraceError(
        f"{name} is not traced",
        given=given,
        allowed=allowed,
        todo="run the script with `sizer run --route driver`",
    )


def _noted(recorder: Recorder) -> dict[str, Counter[str]]:
    """Return counters by line that a recorder fills: "assumed" for assumed numbers of elements, "reads" for other values."""
    noted: dict[str, Counter[str]] = {"assumed": Counter(), "reads": Counter()}
    note = recorder.stand_in

    def stand_in(text: str) -> None:
        note(text)
        if text.startswith(_READS) or recorder.at in _READING:
            noted["reads"][call_site()] += 1
        elif text != FINITE:
            noted["assumed"][f"{call_site()}: {text}"] += 1

    recorder.stand_in = stand_in  # type: ignore[method-assign]
    return noted


def _swaps() -> bool:
    """Return True within `Module._apply`, which replaces the data of a parameter on a device (torch/nn/modules/module.py).

    bitsandbytes' weights are replaced as on a device: their class is none that a parameter can be made of.
    """
    frame = sys._getframe(1)
    if frame.f_code.co_name != "_apply":
        return False
    parameters = frame.f_locals["self"]._parameters.values()
    return not any(type(one).__module__.startswith("bitsandbytes.") and one.is_meta for one in parameters)


def _swap_data(first: torch.Tensor, second: torch.Tensor, swap: Callable = torch.utils.swap_tensors) -> None:
    """Swap two tensors, except for the attributes that Python code has set on them, as on a device.

    `Module._apply` goes on to hold the second one until the next parameter is there; on a device nothing holds the old data. It
    takes parameters that a graph or a weak reference knows, as after `weight_norm`; `torch.utils.swap_tensors` does not.
    """
    if first is second:
        return
    applies = sys._getframe(1).f_code.co_name == "_apply"
    if applies and (type(first) is type(second) or is_lazy(first)):  # a lazy one keeps its class
        torch._C._swap_tensor_impl(first, second)
    else:
        swap(first, second)
        first.__dict__, second.__dict__ = second.__dict__, first.__dict__
    if applies and type(second) in (torch.Tensor, nn.Parameter):
        with torch.no_grad(), torch.inference_mode(second.is_inference()):  # data of another kind are refused
            second.data = torch.empty(0, dtype=second.dtype, device=second.device)


def enter_device(stack: ExitStack, recorder: Recorder) -> None:
    """Send to meta the tensors that the script puts on the device, until `stack` is closed."""
    mode = stack.enter_context(OnMeta(recorder.host, recorder.deferred))
    stack.enter_context(modes_in_callbacks(mode))
    stack.enter_context(devices_told(recorder.host, recorder.deferred, recorder.device.kind))


# Functions that call the CUDA driver, or C++ code that only takes CUDA tensors.
_UNTRACED_CALLS: dict[Any, tuple[str, ...]] = {
    torch.jit: ("trace",),
    torch.cuda.comm: ("gather", "reduce_add", "reduce_add_coalesced", "broadcast_coalesced"),
    torch.cuda.jiterator: ("_create_jit_fn", "_create_multi_output_jit_fn"),
    torch.cuda: ("_compile_kernel",),
}
# By the text of PyTorch's own error: its first runs of a script specialize sizes, and nested tensors have no kernels for meta.
_UNTRACED = {
    "CUDA driver version is insufficient": ("a function that asks the CUDA driver", "a call of it", "other functions"),
    "for Dlpack": ("DLPack", "a tensor of the device", "tensors of the host"),
    "Cannot pack tensors on meta": ("DLPack", "a tensor of the device", "tensors of the host"),
    "__cuda_array_interface__": ("__cuda_array_interface__", "a tensor of the device", "tensors of the host"),
    "in the TorchScript interpreter": ("torch.jit.script", "a call of it", "eager code"),
    "NestedTensorImpl": ("a nested tensor", "layout=torch.strided", "layout=torch.jagged, or padded tensors"),
}
_TWO_PLACES = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
_PLACES = re.compile(r"Tensor on device (meta|cpu) is not on the expected device (meta|cpu)!")


def _is_tracers(error: BaseException) -> bool:
    """Return True if the tracer caused an error; the script's own errors do not speak of meta tensors."""
    if _PLACES.search(str(error)):  # on the host and on the device: an error of the script itself
        return False
    return isinstance(error, (TraceError, NotImplementedError)) or "meta" in str(error) or _untraced(error) is not None


def _untraced(error: BaseException) -> tuple[str, str, str] | None:
    """Return for PyTorch's error the operation that cannot be traced, the given and the allowed value; None for other errors."""
    return next((words for text, words in _UNTRACED.items() if text in str(error)), None)


def _found(settings: Settings, steps: Steps, gpu: Any, host: HostMemory) -> dict[str, Any]:
    """Return the values that are written with the end of the script. The tape is a separate file."""
    found: dict[str, Any] = {
        "steps": steps.done,
        "versions": {"torch": importlib.metadata.version("torch")},
        "rank": settings.rank,
        "world": settings.world,
        "not_saved": [*dict.fromkeys(steps.checkpoints.not_saved)],
        "uncounted": [],
        "devices": [],
    }
    try:
        tape = steps.tape().resolve(size_oracle_of(gpu))
        roots = steps.watcher.roots()
        census = take_census(nn.ModuleList(roots), name=", ".join(dict.fromkeys(type(root).__name__ for root in roots)))
    except Exception as error:  # a trace that ended in the middle may have no tape
        return found | {"no_tape": f"{type(error).__name__}: {error}"}
    dtypes = (p.dtype for root in roots for p in nn.Module.parameters(root) if p.is_floating_point())
    names = ("parameters", "trainable_parameters", "buffers", "parameter_bytes", "buffer_bytes")
    model = {"name": census.name or "no module", "dtype": str(next(dtypes, torch.float32)).removeprefix("torch.")}
    Path(f"{settings.out}.tape").write_bytes(pickle.dumps(tape))
    return found | {
        "host_bytes": tape.host_bytes,
        "pinned_bytes": host.most_pinned_bytes,
        "model": model | {name: getattr(census, name) for name in names},
        "traced": True,
    }


@contextmanager
def _answers(settings: Settings, recorder: Recorder, checkpoints: Checkpoints) -> Any:
    """Make torch.cuda, or torch.mps, answer for the device and torch.distributed for the world, within the context."""
    gpu = find_gpu(settings.gpu)
    counters = TracedCounters(recorder.log, gpu, size_oracle_of(gpu))
    if gpu.backend == "mps":
        with mps_answers(gpu, counters):
            yield
        return
    hardware = HARDWARE.get(gpu.key)
    assert gpu.capability is not None, "a dry run is on a GPU"
    device = Accelerator(
        capability=gpu.capability,
        total_bytes=gpu.total_bytes,
        name=hardware.name if hardware else gpu.name,
        processors=hardware.processors if hardware else None,
        hardware=hardware,
    )
    with ExitStack() as stack:
        on_no_device = recorder.deferred.__contains__
        if settings.world > 1:
            ranks = (settings.world, settings.rank)
            stack.enter_context(world_of(*ranks, device, backend="nccl", local=settings.local, on_no_device=on_no_device))
            checkpoints.ranks = Messages(Path(settings.messages), settings.rank, settings.need)
            stack.enter_context(checkpoints.ranks.installed())
        else:
            stack.enter_context(alone(device, on_no_device))
        stack.enter_context(mock.patch.object(dist, "all_gather_object", _gather_alike))
        stack.enter_context(one_rank(settings.world, settings.rank, all_traced=True))
        process = multiprocessing.process.BaseProcess
        stack.enter_context(mock.patch.object(process, "start", functools.partialmethod(_start_without_device)))
        stack.enter_context(counters.answering())
        yield

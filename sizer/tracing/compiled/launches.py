"""Triton kernels that code launches by itself: they compute nothing, and the report names them.

A kernel works on buffers that its caller has allocated, so a trace that launches nothing holds the same memory. Triton's own
driver is replaced by one that describes the GPU. Source: triton/runtime/jit.py, autotuner.py and driver.py, read in Triton 3.4
to 3.9.

*Known limitations*: memory that a kernel requests by `triton.set_allocator` is not counted, nor is autotuning: with several
configurations it takes a buffer of 256 MiB (`get_empty_cache_for_benchmark`) and copies of some arguments, once per key.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from sizer.catalogue.hardware import Hardware
from sizer.catalogue.recipes import HOLDS, TUNES, is_library
from sizer.distributed.described_gpus import Accelerator, accelerator_of, devices_answer, properties_of
from sizer.recipes.linear_attention import imported_for
from sizer.tracing.compiled.install import hardware_like, hardware_of_capability
from sizer.tracing.meta.accelerators import OnMeta, devices_told, modes_in_callbacks
from sizer.tracing.recorder import Recorder

_BUILT_IN = frozenset(("range", "min", "max", "len", "print", "float", "int"))
_NAMES = 8  # in one note


class Launches:
    """Triton kernels that were launched within `seen`, by name.

    Args:
        hardware: The described GPU; None if its hardware is unknown, in which case Triton's driver is not replaced.
        forget: Called with each tensor argument of a kernel, the values of which are unknown from then on.
    """

    def __init__(self, hardware: Hardware | None, forget: Callable[[Tensor], None]) -> None:
        self._hardware, self._forget = hardware, forget
        self._names: dict[str, None] = {}
        self._tuned: dict[str, None] = {}
        self._arguments: dict[int, frozenset[str]] = {}  # by kernel, arguments that it writes to

    @contextmanager
    def seen(self) -> Iterator[None]:
        """Make kernels launch nothing within the context. Does nothing if triton is not installed."""
        if importlib.util.find_spec("triton") is None:
            yield
            return
        from triton.runtime import autotuner, jit
        from triton.runtime.driver import driver

        tunes = autotuner.Autotuner

        def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
            name = str(_function_of(kernel).__name__)
            self._names[name] = None
            if any(isinstance(layer, tunes) and len(layer.configs) > 1 for layer in _layers_of(kernel)):
                self._tuned[name] = None
            written = self._written(kernel)
            for argument, value in (*zip(kernel.arg_names, args, strict=False), *kwargs.items()):
                if isinstance(value, Tensor) and argument in written:
                    self._forget(value)

        with ExitStack() as stack:
            for kind in (jit.JITFunction, tunes, autotuner.Heuristics):
                stack.enter_context(mock.patch.object(kind, "run", run))
            if self._hardware is not None:
                stack.enter_context(mock.patch.object(driver, "_active", _Driver(self._hardware)))
            yield

    def _written(self, kernel: Any) -> frozenset[str]:
        if id(kernel) not in self._arguments:
            self._arguments[id(kernel)] = arguments_written(_function_of(kernel).parse())
        return self._arguments[id(kernel)]

    def notes(self) -> tuple[str, ...]:
        """Return notes on the kernels: a line on launched kernels, and a line on autotuned kernels."""
        found = []
        if self._names:
            found.append(f"{HOLDS} in addition to their arguments: {_listed(self._names)}")
        if self._tuned:
            found.append(f"{TUNES} in their first launch: {_listed(self._tuned)}")
        return tuple(found)


class _Driver:
    """Replacement of Triton's driver of a GPU, which libraries query for multiprocessors and shared memory."""

    def __init__(self, hardware: Hardware) -> None:
        facts = properties_of(hardware)
        properties = {
            "max_shared_mem": facts.shared_memory_per_block_optin,
            "max_num_regs": facts.regs_per_multiprocessor,
            "multiprocessor_count": facts.multi_processor_count,
            "warpSize": facts.warp_size,
        }
        self.utils = SimpleNamespace(get_device_properties=lambda index: properties)
        self._capability = 10 * facts.major + facts.minor

    def get_current_device(self) -> int:
        """Return the number of the device, of which there is only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Return the device."""
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        """Return torch.cuda."""
        return torch.cuda

    def get_current_target(self) -> Any:
        """Return the target for which Triton would compile."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)


def arguments_written(source: ast.AST) -> frozenset[str]:
    """Return the names that reach a store of a kernel, or a function that is not Triton's own.

    Args:
        source: The kernel's syntax tree.
    """
    found: set[str] = set()
    assigned: list[tuple[set[str], set[str]]] = []
    for node in ast.walk(source):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if name.startswith(("store", "atomic")):
                found |= _names(node.func) | (_names(node.args[0]) if node.args else _names(node))
            elif isinstance(node.func, ast.Name) and node.func.id not in _BUILT_IN:
                found |= _names(*node.args, *(keyword.value for keyword in node.keywords))
        elif isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            assigned.append((_names(*targets), _names(node.value)))
    before = -1
    while len(found) != before:
        before = len(found)
        for changed, values in assigned:
            if changed & found:
                found |= values
    return frozenset(found)


def _names(*nodes: ast.AST) -> set[str]:
    return {one.id for node in nodes for one in ast.walk(node) if isinstance(one, ast.Name)}


def _layers_of(kernel: Any) -> Iterator[Any]:
    """Yield a kernel's heuristics and autotuning, and the function that they wrap."""
    yield kernel
    while not hasattr(kernel, "parse"):
        kernel = kernel.fn
        yield kernel


def _function_of(kernel: Any) -> Any:
    """Return the function that heuristics and autotuning wrap."""
    *_, function = _layers_of(kernel)
    return function


def _listed(names: dict[str, None]) -> str:
    shown = list(names)[:_NAMES]
    return f"{', '.join(shown)}{' …' if len(names) > _NAMES else ''}"


# ----------------------------------------------------------------------------------------------------------- libraries


def compiled_code_run_eagerly() -> AbstractContextManager[None]:
    """Return a context without the compiler: cut cross-entropy compiles two functions of single numbers (cce.py, 25.1)."""
    return torch.compiler.set_stance("force_eager")


@contextmanager
def libraries_called(loss: str, recorder: Recorder, *, fla: bool = False) -> Iterator[None]:
    """Show a loss's package its tensors on CUDA within the context; its kernels launch nothing.

    With `fla` the kernels of flash-linear-attention launch nothing, too. It needs the described GPU, and no tensors on CUDA.
    """
    device = recorder.device
    if not (is_library(loss) or fla) or device.kind != "cuda":
        yield
        return
    capability, gpu = device.capability.plain, device.answers_for
    hardware = hardware_of_capability(capability) if gpu is None else hardware_like(gpu)
    accelerator = Accelerator(capability=capability)
    if gpu is not None and hardware is not None:
        accelerator = replace(accelerator_of(gpu), processors=hardware.processors)
    launches = Launches(hardware, recorder.values.forget)
    with ExitStack() as stack:
        if loss == "cce":
            stack.enter_context(compiled_code_run_eagerly())
        stack.enter_context(launches.seen())
        stack.enter_context(devices_answer(accelerator, count=1))
        if fla:
            stack.enter_context(imported_for(None if gpu is None else gpu.key))
        if is_library(loss):
            mode = stack.enter_context(OnMeta(recorder.host, recorder.deferred))
            stack.enter_context(modes_in_callbacks(mode))
            stack.enter_context(devices_told(recorder.host, recorder.deferred))
        yield
    recorder.notes.update(dict.fromkeys(launches.notes()))

"""Context within which a step may call compiled code; the compiler is imported at the first call.

The compiler in the step of a query: the modules that it compiles, and its settings.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from traceback import extract_tb
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sizer.architecture.checkpointing import repeated_blocks
from sizer.base.errors import Refusal, RequestError, TraceError
from sizer.base.frozen import is_frozen
from sizer.base.versions import installed_version
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.hardware import HARDWARE, Hardware
from sizer.catalogue.modes import BLOCKS, MODEL
from sizer.distributed.described_gpus import accelerator_of, devices_answer
from sizer.tape.compiled_code import CompiledCode
from sizer.tracing.compiled.answers import compiler_answers
from sizer.tracing.compiled.compile_findings import Findings, line_of_stack, reason_of
from sizer.tracing.compiled.dynamo import CACHES_WARNING, HOOKS_WARNING, CompiledSteps, compiled_calls, dynamo_on
from sizer.tracing.compiled.inductor import compiler_at_work, inductor_on
from sizer.tracing.compiled.moved_graphs import Frontend
from sizer.tracing.compiled.names import check_compiler
from sizer.tracing.compiled.trees import trees_on

if TYPE_CHECKING:
    from sizer.tracing.recorder import Recorder
    from sizer.tracing.steps import Work


_PATCHED = (
    torch,
    torch.cuda,
    torch.accelerator,
    torch._C,
    torch.Tensor,
)  # modules with attributes that Sizer replaces in a trace

# Of Sizer's own settings: its hooks, and Inductor's caches, which are off. The last is about speed.
_WARNINGS = (
    HOOKS_WARNING,
    CACHES_WARNING,
    "Unable to hit fast path of CUDAGraphs",
)


class Compiler:
    """PyTorch's compiler within one trace on one GPU: installed at the first compiled call, uninstalled with the trace.

    Create it before any part of PyTorch is replaced. `code` is the compiled code, None if there is none. `recorder` records the
    trace. `before_call` is called before each call of compiled code.
    """

    def __init__(self, gpu: Gpu, recorder: Recorder) -> None:
        self.code: CompiledCode | None = None
        self.before_call: Callable[[], None] = lambda: None
        self._steps = CompiledSteps()
        self._findings: Findings | None = None
        self._gpu, self._hardware, self._recorder = gpu, hardware_like(gpu), recorder
        self._originals = [(owner, dict(vars(owner))) for owner in _PATCHED]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Compile code for the GPU within the context. Raises TraceError for code that cannot be compiled."""
        with ExitStack() as stack:

            def begin(function: Callable[..., Any]) -> Callable[[], None]:
                self.before_call()
                if self._findings is None:
                    self._install(stack)
                return self._steps.begin(function)

            def quiet() -> None:
                stack.enter_context(warnings.catch_warnings())
                for message in _WARNINGS:
                    warnings.filterwarnings("ignore", message=message)

            stack.enter_context(compiled_calls(begin, self._import, quiet, self._steps.with_modes))
            yield
            if self._findings is not None:
                self.code = self._findings.read()

    def end_step(self) -> None:
        """Collect the compiler's cycles if a step compiled code: they keep the step's tensors alive, and no collection runs."""
        if self._findings is not None and self._findings.compiled:
            self._findings.compiled = False
            gc.collect()

    def _import(self) -> None:
        """Import Dynamo with PyTorch's original functions, as it keeps functions of PyTorch that Sizer has replaced."""
        if "torch._dynamo.eval_frame" in sys.modules:
            return
        ours = [(owner, name, value) for owner, before in self._originals for name, value in vars(owner).items()
                if name not in before or before[name] is not value]  # fmt: skip
        before = {id(owner): names for owner, names in self._originals}
        for owner, name, _ in ours:
            if name in before[id(owner)]:
                setattr(owner, name, before[id(owner)][name])
            else:
                delattr(owner, name)
        try:
            with compiler_at_work():
                import torch._dynamo.eval_frame  # noqa: F401
        finally:
            for owner, name, value in ours:
                setattr(owner, name, value)

    def _install(self, stack: ExitStack) -> None:
        with compiler_at_work():
            check_compiler()
        if self._hardware is None:
            raise TraceError(
                "compiled code is traced for GPUs of the catalogue's capabilities",
                given=f"compute capability {self._gpu.capability}",
                todo="choose a GPU of the catalogue, or run the step eagerly",
            )
        findings, frontend, on_host = Findings(), Frontend(), self._recorder.host.__contains__
        stack.enter_context(_young_objects_collected())

        def begin_graphs() -> None:
            if not findings.has_graphs:
                findings.has_graphs = True
                stack.enter_context(trees_on(self._recorder, on_host))

        stack.enter_context(compiler_answers(self._hardware))
        own_rules = self._recorder.device.version == installed_version()
        stack.enter_context(
            inductor_on(
                self._hardware, findings, frontend, begin_graphs, rules=self._recorder.rules, own_rules=own_rules
            )
        )
        stack.enter_context(dynamo_on(findings, frontend, self._recorder, self._steps))
        self._findings = findings


@contextmanager
def _young_objects_collected() -> Iterator[None]:
    """Restrict garbage collection to objects created within the context: the compiler's cycles are collected several times.

    A collection of all objects takes a tenth of the time in which a block is compiled.
    """
    thaw = not is_frozen()  # objects that the process has frozen itself stay frozen
    gc.collect(0)  # no collection runs within a trace (`repeatable`), so all of its objects are young
    gc.freeze()
    try:
        yield
    finally:
        if thaw:
            gc.unfreeze()


@contextmanager
def compile_failures() -> Iterator[None]:
    """Turn an error of the compiler into a TraceError with its reason and the line of the user's code."""
    try:
        yield
    except TraceError as error:
        error.args = (str(error).partition("\n")[0],)  # Dynamo appends the user's lines (torch/_dynamo/exc.py, 2.15)
        raise
    except Exception as error:
        raise _failure(error) or error from error


def _failure(error: BaseException) -> TraceError | None:
    """Return the TraceError for an error that Dynamo raised, None for any other error."""
    exc = sys.modules.get("torch._dynamo.exc")
    if exc is None or not isinstance(error, exc.TorchDynamoException):
        return None
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, TraceError):
            inner.args = (str(inner).partition("\n")[0],)
            return inner
        inner = getattr(inner, "inner_exception", None) or inner.__cause__ or inner.__context__
    where = line_of_stack(getattr(error, "real_stack", None)) or line_of_stack(extract_tb(error.__traceback__))
    text = f"torch.compile fails: {reason_of(str(error))}{f' ({where})' if where else ''}"
    if isinstance(error, exc.Unsupported):
        return TraceError(text, todo="leave fullgraph=True out, or change the line so that Dynamo can trace it")
    return TraceError(text)


def hardware_like(gpu: Gpu) -> Hardware | None:
    """Return the device's hardware, or the hardware of a catalogue's GPU of the same capability with this GPU's memory."""
    row = HARDWARE.get(gpu.key)
    if row is not None or gpu.capability is None:
        return row
    alike = hardware_of_capability(gpu.capability)
    return None if alike is None else replace(alike, gpu=gpu)


def hardware_of_capability(capability: tuple[int, int]) -> Hardware | None:
    """Return the hardware of the catalogue's first GPU with a compute capability, None if there is none."""
    return next((row for row in HARDWARE.values() if row.capability == capability), None)


# ------------------------------------------------------------------------------------------------------------- modules


WRAPPED = "_orig_mod."  # begins the names of parameters in a compiled module (torch/_dynamo/eval_frame.py, 2.15)


@contextmanager
def compiling(work: Work, recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Allow the recorder's steps to call code compiled for its device's GPU within the context, if the work compiles any.

    Yields the function to call at the end of each phase. Enter it before any part of PyTorch is replaced.
    """
    gpu = recorder.device.answers_for
    if work.compile_scope is None or gpu is None:
        yield lambda: None
        return
    compiler = Compiler(gpu, recorder)
    recorder.compiles = True
    with devices_answer(accelerator_of(gpu), count=1), compiler.watching(), budgeted(work.budget):
        yield compiler.end_step
    recorder.device.note_compiled(compiler.code)


@contextmanager
def budgeted(budget: float | None) -> Iterator[None]:
    """Set the compiler's activation memory budget within the context, if given."""
    import torch._functorch.config as config

    if budget is None:
        yield
        return
    with config.patch(activation_memory_budget=budget):
        yield


@contextmanager
def module_compiled(module: nn.Module, scope: str | None, mode: str) -> Iterator[nn.Module]:
    """Compile a module, or each of its repeated blocks, as trainers do, within the context; yield the module for the loop.

    `mode` is one of COMPILE_MODES (sizer.catalogue.modes).
    Raises RequestError for blocks of a module without repeated blocks.
    """
    if scope is None:
        yield module
        return
    if scope == MODEL:
        yield torch.compile(module, mode=mode)
        return
    blocks = repeated_blocks(module)
    if not blocks:
        refusal = Refusal(
            key="compile_scope",
            given=f"{BLOCKS!r} with a model that repeats no block",
            allowed=MODEL,
            todo=f"ask for compile_scope={MODEL}",
        )
        raise RequestError(refusals=[refusal])
    for block in blocks:
        block.compile(mode=mode)
    try:
        yield module
    finally:
        for block in blocks:
            block._compiled_call_impl = None

"""Dynamo as it traces a step whose tensors are on meta, under a recorder."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from pkgutil import iter_modules
from typing import Any
from unittest import mock

import torch

from sizer.base.errors import TraceError
from sizer.tracing.compiled.compile_findings import Findings
from sizer.tracing.compiled.inductor import compiler_at_work, without_function_modes
from sizer.tracing.compiled.moved_graphs import Frontend

HOOKS_WARNING = r"Using `torch\.compile\(module\)` when there are global hooks"  # which are Sizer's
BACKENDS = ("inductor", "eager", "aot_eager")
_SIZER = Path(__file__).parents[2]
# Modules of Sizer with code of models, such as the forward passes of `checkpoint_blocks`.
_COMPILED = ("sizer.architecture",)
_OF_TENSORS = ("device", "is_cuda", "is_cpu", "is_meta", "data_ptr", "get_device")


@contextmanager
def dynamo_on(findings: Findings, frontend: Frontend, on_host: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Within the context Dynamo compiles under a recorder, and traces neither the recorder's hooks nor its function modes.

    Raises TraceError for an input that is `on_host`: both kinds of tensors are on meta, so that Dynamo takes it for the device's.
    """
    import torch._dynamo as dynamo
    import torch._dynamo.convert_frame as convert_frame
    import torch._dynamo.trace_rules as trace_rules
    import torch._dynamo.variables.builder as builder
    import torch._dynamo.variables.optimizer as optimizer
    import torch._dynamo.variables.tensor as tensors

    convert, wrap = convert_frame.CatchErrorsWrapper.__call__, builder.VariableBuilder.__call__

    def convert_on_device(self: Any, frame: Any, *args: Any) -> Any:
        if trace_rules.check(frame.f_code):  # Dynamo will skip this frame
            return convert(self, frame, *args)
        _refuse_backend(self)
        with compiler_at_work(), frontend.turned(True):
            converted = convert(self, frame, *args)
        findings.compiled = True
        gc.collect()  # the compiler's frames are in cycles, and keep what the caller has alive
        return converted

    def wrap_on_device(self: Any, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and on_host(value):
            raise TraceError(
                "compiled code cannot be traced with a tensor of the host as an input",
                given=f"{self.get_source().name} of shape {tuple(value.shape)}",
                allowed="tensors of the device",
                todo="move the tensor to the device outside of the compiled code",
            )
        return wrap(self, value)

    def set_capturable(self: Any, group: dict[str, Any]) -> bool:
        if group.get("capturable", True):
            return False
        raise TraceError(
            "a compiled optimizer cannot be traced with its step counters on the host",
            given=f"{type(self.value).__name__} with capturable=False",
            allowed="capturable=True, which keeps the counters on the device",
            todo="set it, or call the optimizer without torch.compile",
        )

    for name in _OF_TENSORS:  # Dynamo may have been imported while Sizer's own attributes were in their place
        tensors.all_tensor_attrs[name] = vars(torch._C.TensorBase)[name]
    with ExitStack() as stack:
        stack.callback(dynamo.reset)
        stack.enter_context(frontend.installed())
        stack.callback(trace_rules.clear_lru_cache)
        for place, name, value in (
            (convert_frame.CatchErrorsWrapper, "__call__", convert_on_device),
            (builder.VariableBuilder, "__call__", wrap_on_device),
            (optimizer.OptimizerVariable, "_safe_to_set_capturable", set_capturable),
            (trace_rules, "SKIP_DIRS", [*trace_rules.SKIP_DIRS]),
            (trace_rules, "SKIP_DIRS_RE", trace_rules.SKIP_DIRS_RE),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        skip_own_code()
        dynamo.reset()
        trace_rules.clear_lru_cache()
        findings.start()
        yield


def _refuse_backend(callback: Any) -> None:
    """Raise TraceError for a backend whose allocations are unknown."""
    while (inner := getattr(callback, "_torchdynamo_orig_backend", None)) is not None:
        callback = inner
    name = getattr(callback, "compiler_name", None) or getattr(callback, "__name__", type(callback).__name__)
    if name not in BACKENDS and name != "compile_fx":
        raise TraceError(
            "code compiled by this backend cannot be traced",
            given=f"torch.compile(backend={name})",
            allowed=", ".join(BACKENDS),
            todo="use one of these backends",
        )


@contextmanager
def compiled_calls(
    begin: Callable[[], Callable[[], None]], import_compiler: Callable[[], None], started: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Within the context `begin` is called before each call of compiled code, and what it returns after the call.

    `import_compiler` is called if code is compiled, and `started` once after it.
    """
    compile_ = torch.compile
    with ExitStack() as stack:

        def compile_and_watch(*args: Any, **kwargs: Any) -> Any:
            import_compiler()
            watch()
            return compile_(*args, **kwargs)

        def watch() -> None:
            frames = sys.modules["torch._dynamo.eval_frame"]
            choose = frames._callback_from_stance
            if getattr(choose, "__self__", None) is None and choose.__name__ == "_callback_from_stance":
                stack.enter_context(mock.patch.object(frames, "_callback_from_stance", begun(choose)))
                started()

        def begun(choose: Any) -> Any:
            def begin_call(callback: Any) -> Any:
                frame = sys._getframe(1)
                # None and False are no compiler: `torch.compiler.disable`, and what is put back after a call
                if callable(callback) and frame.f_code.co_name == "compile_wrapper":
                    frame.f_locals["cleanups"].append(begin())
                return choose(callback)

            return begin_call

        if "torch._dynamo.eval_frame" in sys.modules:
            watch()
        stack.enter_context(mock.patch.object(torch, "compile", compile_and_watch))
        yield


def skip_own_code() -> None:
    """Have Dynamo compile none of Sizer's own functions, which run between graphs."""
    trace_rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    for part in iter_modules([str(_SIZER)], "sizer."):
        if part.name not in _COMPILED:
            trace_rules.add(part.name)


def hide_modes() -> Callable[[], None]:
    """Remove the function modes and the global hooks of modules for the time of a compiled call: Dynamo would trace Sizer's own.

    Returns the function that puts them back.
    """
    module = torch.nn.modules.module
    hooks = [value for name, value in vars(module).items() if name.startswith("_global_") and isinstance(value, dict)]
    kept = [dict(one) for one in hooks]
    for one in hooks:
        one.clear()
    modes = ExitStack()
    modes.enter_context(without_function_modes())

    def put_back() -> None:
        modes.close()
        for one, before in zip(hooks, kept, strict=True):
            one.update(before)

    return put_back

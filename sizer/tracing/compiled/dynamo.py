"""Dynamo for a step with tensors on meta, under a recorder."""

from __future__ import annotations

import functools
import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from pkgutil import iter_modules
from types import FunctionType
from typing import Any
from unittest import mock
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.weak import WeakIdKeyDictionary

from sizer.architecture.compile_later import step_hooks
from sizer.base.errors import TraceError
from sizer.tracing.compiled.compile_findings import Findings
from sizer.tracing.compiled.inductor import compiler_at_work, without_function_modes
from sizer.tracing.compiled.moved_graphs import Frontend
from sizer.tracing.recorder import Recorder

HOOKS_WARNING = r"Using `torch\.compile\(module\)` when there are global hooks"  # which are Sizer's
CACHES_WARNING = "dynamo_pgo force disabled"  # as Inductor's caches are
BACKENDS = ("inductor", "eager", "aot_eager")
_SIZER = Path(__file__).parents[2]
# Modules of Sizer with code of models, such as the forward passes of `checkpoint_blocks`.
_COMPILED = ("sizer.architecture",)
_STAND_IN = -1  # the number of a hook, which PyTorch counts from 0
_OF_TENSORS = ("device", "is_cuda", "is_cpu", "is_meta", "data_ptr", "get_device")


@contextmanager
def dynamo_on(findings: Findings, frontend: Frontend, recorder: Recorder, steps: CompiledSteps) -> Iterator[None]:
    """Make Dynamo compile under a recorder within the context, without tracing the recorder's hooks and function modes.

    Raises TraceError for an input on the host: both kinds of tensors are on meta, so Dynamo would treat it as a device tensor.
    """
    import torch._dynamo as dynamo
    import torch._dynamo.convert_frame as convert_frame
    import torch._dynamo.trace_rules as trace_rules
    import torch._dynamo.variables.builder as builder
    import torch._dynamo.variables.optimizer as optimizer
    import torch._dynamo.variables.tensor as tensors
    import torch.distributed._functional_collectives as collectives
    import torch.distributed.utils as distributed

    flex = importlib.import_module("torch._higher_order_ops.flex_attention")  # the package has an operator with this name
    convert, wrap = convert_frame.CatchErrorsWrapper.__call__, builder.VariableBuilder.__call__
    methods, on_host = optimizer.OptimizerVariable.tp_methods, recorder.host.__contains__
    init, wait = methods["_init_group"].handler, collectives.AsyncCollectiveTensor.trigger_wait

    def convert_on_device(self: Any, frame: Any, *args: Any) -> Any:
        if trace_rules.check(frame.f_code):  # Dynamo will skip this frame
            return convert(self, frame, *args)
        _refuse_backend(self)
        with compiler_at_work(), frontend.turned(True):
            converted = convert(self, frame, *args)
        findings.compiled = True
        gc.collect()  # the compiler's frames are in cycles, and keep the caller's objects alive
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

    def is_capturable(self: Any, group: dict[str, Any]) -> bool:
        # like PyTorch's own function, which checks is_cuda of each parameter
        return "capturable" in group and all(
            p.is_meta and not on_host(p) and p not in self.value.state for p in group.get("params", ())
        )

    def init_group(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Dynamo makes the states while it traces: they are the step's
        steps.begin_step(self.value)
        own, make = vars(self.value), self.value._init_group

        def make_recorded(*args: Any, **kwargs: Any) -> Any:
            del own["_init_group"]
            return recorded(make)(*args, **kwargs)

        before = own.get("_init_group")
        own["_init_group"] = make_recorded
        try:
            return init(self, *args, **kwargs)
        finally:
            own.pop("_init_group", None)
            if before is not None:
                own["_init_group"] = before

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with recorder:
                return function(*args, **kwargs)

        return run

    def unrecorded(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if recorder not in _get_current_dispatch_mode_stack():  # Dynamo is running
                return function(*args)
            with _disable_current_modes():
                return function(*args)

        return run

    def waited(tensor: Any) -> Any:
        if recorder in _get_current_dispatch_mode_stack() or recorder.block_of(tensor.elem) is None:  # a fake tensor has none
            return wait(tensor)
        with recorder:  # AOTAutograd waits for an input's collective before it traces: the step waits
            return wait(tensor)

    for name in _OF_TENSORS:  # Dynamo may have been imported while Sizer's own attributes were installed
        tensors.all_tensor_attrs[name] = vars(torch._C.TensorBase)[name]
    with ExitStack() as stack:
        stack.callback(dynamo.reset)
        stack.enter_context(frontend.installed())
        stack.callback(trace_rules.clear_lru_cache)
        for place, name, value in (
            (convert_frame.CatchErrorsWrapper, "__call__", convert_on_device),
            (builder.VariableBuilder, "__call__", wrap_on_device),
            (optimizer.OptimizerVariable, "_safe_to_set_capturable", is_capturable),
            (optimizer.OptimizerVariable, "move_step_if_cpu", recorded(optimizer.OptimizerVariable.move_step_if_cpu)),
            # DDP's forward pass moves its inputs, and is not compiled itself
            (collectives.AsyncCollectiveTensor, "trigger_wait", waited),
            (distributed, "_recursive_to", steps.with_modes(distributed._recursive_to)),
            (flex, "create_fw_bw_graph", unrecorded(flex.create_fw_bw_graph)),  # of fake tensors
            (trace_rules, "SKIP_DIRS", [*trace_rules.SKIP_DIRS]),
            (trace_rules, "SKIP_DIRS_RE", trace_rules.SKIP_DIRS_RE),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        stack.enter_context(mock.patch.dict(methods, {"_init_group": type(methods["_init_group"])(init_group)}))
        skip_own_code()
        dynamo.reset()
        trace_rules.clear_lru_cache()
        findings.start()
        yield


def _refuse_backend(callback: Any) -> None:
    """Raise TraceError for a backend with unknown allocations."""
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
    begin: Callable[[Callable[..., Any]], Callable[[], None]],
    import_compiler: Callable[[], None],
    started: Callable[[], None] = lambda: None,
    eagerly: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
) -> Iterator[None]:
    """Call `begin` with a compiled function before each call, and its result after the call, within the context.

    `import_compiler` is called if code is compiled, and `started` once after it. `eagerly` returns the function that runs
    instead of a function of `torch.compiler.disable`.
    """
    compile_, disable = torch.compile, torch.compiler.disable
    with ExitStack() as stack:

        def compile_and_watch(*args: Any, **kwargs: Any) -> Any:
            import_compiler()
            watch()
            return compile_(*args, **kwargs)

        def disable_with_modes(fn: Any = None, recursive: bool = True, **kwargs: Any) -> Any:
            import_compiler()
            if fn is None:
                return lambda fn: disable_with_modes(fn, recursive, **kwargs)
            if recursive and isinstance(fn, FunctionType):  # otherwise Dynamo would compile the functions that it calls
                eager = eagerly(fn)
                fn = fn if eager is fn else functools.wraps(fn)(eager)  # a function that wraps itself cannot be unwrapped
            return disable(fn, recursive, **kwargs)

        def watch() -> None:
            frames = sys.modules["torch._dynamo.eval_frame"]
            choose = frames._callback_from_stance
            if getattr(choose, "__self__", None) is None and choose.__name__ == "_callback_from_stance":
                stack.enter_context(mock.patch.object(frames, "_callback_from_stance", begun(choose)))
                started()

        def begun(choose: Any) -> Any:
            def begin_call(callback: Any) -> Any:
                frame = sys._getframe(1)
                # None and False mean no compiler: `torch.compiler.disable`, and the value restored after a call
                if callable(callback) and frame.f_code.co_name == "compile_wrapper":
                    frame.f_locals["cleanups"].append(begin(frame.f_locals["fn"]))
                return choose(callback)

            return begin_call

        if "torch._dynamo.eval_frame" in sys.modules:
            watch()
        stack.enter_context(mock.patch.object(torch, "compile", compile_and_watch))
        stack.enter_context(mock.patch.object(torch.compiler, "disable", disable_with_modes))
        yield


def skip_own_code() -> None:
    """Make Dynamo skip Sizer's own functions, which run between graphs."""
    trace_rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    for part in iter_modules([str(_SIZER)], "sizer."):
        if part.name not in _COMPILED:
            trace_rules.add(part.name)


class CompiledSteps:
    """Hide Sizer's hooks and modes from Dynamo while compiled code runs, and call its hooks of optimizers around that code.

    Dynamo would break the graph at a hook that it must not trace, and run the optimizer eagerly. If an earlier call of compiled
    code stepped the optimizer, the hooks before a step are called before that code. Otherwise they are called once Dynamo
    traces the step or has run it.
    """

    def __init__(self) -> None:
        self._stepped: list[torch.optim.Optimizer] = []
        self._of_functions: Any = WeakIdKeyDictionary()  # optimizers that a compiled function steps
        self._begun: list[torch.optim.Optimizer] = []
        self._before: list[Any] = []
        self._after: list[Any] = []
        self._hidden: list[Any] = []  # modes
        self._depth = 0

    def begin(self, function: Callable[..., Any]) -> Callable[[], None]:
        """Hide hooks and modes during a call. Return the function that restores them."""
        if not self._depth:
            self._before, self._after = map(_own_hooks, _optimizer_hooks())
            self._begun = []
        for optimizer in self._of_functions.get(function, ()):
            self.begin_step(optimizer)
        shown = ExitStack()
        if not self._depth:
            hooks = step_hooks(self._stepped, self._call_before, self._call_after)
            for place, hook in zip(_optimizer_hooks(), hooks, strict=True):
                shown.callback(_replace_own_hooks(place, hook))
            self._hidden = torch.overrides._get_current_function_mode_stack()
        shown.callback(hide_modes())
        self._depth += 1

        def end() -> None:
            self._depth -= 1
            shown.close()
            stepped, self._stepped[:] = [*self._stepped], []
            for optimizer in stepped:
                self.begin_step(optimizer)
                self._call_after(optimizer, (), {})
                known = self._of_functions.setdefault(function, WeakSet())
                known.add(optimizer)

        return end

    def with_modes(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs eagerly within compiled calls, under the hidden modes."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as modes:
                if self._depth:
                    for mode in self._hidden:
                        modes.enter_context(mode)
                return function(*args, **kwargs)

        return run

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Call the hooks before a step of an optimizer, once in a call of compiled code."""
        if all(optimizer is not one for one in self._begun):
            self._call_before(optimizer, (), {})
            self._begun.append(optimizer)

    def _call_before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for hook in self._before:
            hook(optimizer, args, kwargs)

    def _call_after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for hook in self._after:
            hook(optimizer, args, kwargs)


def _optimizer_hooks() -> tuple[dict[int, Any], dict[int, Any]]:
    module: Any = sys.modules["torch.optim.optimizer"]  # `torch.optim` itself hides the name
    return module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks


def _is_own(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("sizer.")


def _own_hooks(hooks: dict[int, Any]) -> list[Any]:
    return [*filter(_is_own, hooks.values())]


def _replace_own_hooks(hooks: dict[int, Any], stand_in: Any) -> Callable[[], None]:
    """Replace Sizer's hooks among PyTorch's global ones. Return the function that restores them."""
    before = dict(hooks)
    for number, hook in before.items():
        if _is_own(hook):
            del hooks[number]
    hooks[_STAND_IN] = stand_in

    def put_back() -> None:
        added = {number: hook for number, hook in hooks.items() if number not in before and number != _STAND_IN}
        hooks.clear()
        hooks.update(before | added)

    return put_back


def hide_modes() -> Callable[[], None]:
    """Remove the function modes and the global hooks of modules during a compiled call: Dynamo would trace Sizer's own."""
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

"""Inductor and AOTAutograd, compiling for a device that is not present.

Inductor's wrapper code is kept in memory and runs on meta tensors; its kernels compute nothing.
"""

from __future__ import annotations

import gc
import io
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from subprocess import CalledProcessError
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch._C import DispatchKey
from torch._ops import resolve_key
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from sizer.base.errors import TraceError
from sizer.catalogue.hardware import Hardware
from sizer.tracing.compiled.compile_findings import Findings
from sizer.tracing.compiled.moved_graphs import Frontend, move, move_back
from sizer.tracing.cuda.convolution import as_call, backend_of
from sizer.tracing.device_rules import Rules
from sizer.tracing.meta.imports import usual_imports
from sizer.tracing.meta.strides import memory_format
from sizer.tracing.recorder import Recorder

_META = torch.device("meta")
# The device in the wrapper's code (torch/_inductor/codegen/wrapper.py, codegen_device), and the imports of its kernels.
_DEVICE, _IMPORTS = "device(type='cuda', index=0)", "\nimport triton\nimport triton.language as tl\n"


class Kernel:
    """Replacement of a compiled Triton kernel: it computes nothing and allocates nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Launch nothing."""

    __call__ = run


def triton_kernel(compiler: Any, kernel_name: str, source_code: str, device_str: str = "cuda") -> Kernel:
    """Return a replacement of AsyncCompile.triton's kernel."""
    return Kernel(kernel_name)


@contextmanager
def not_timed() -> Iterator[None]:
    """Prevent Inductor from compiling and timing Triton kernels, padding matrix products and writing files, within the context.

    The null driver's times mean nothing, and its device computes no constants. With max-autotune kernels are compiled, because
    Inductor chooses among them.
    """
    import torch._inductor.async_compile as async_compile
    import torch._inductor.config as config
    import torch._inductor.fx_passes.pad_mm as pad_mm

    compile_ = async_compile.AsyncCompile.triton

    def compile_tuned(compiler: Any, kernel_name: str, source_code: str, device_str: str = "cuda") -> Any:
        make = compile_ if _is_tuned(config) else triton_kernel
        return make(compiler, kernel_name, source_code, device_str)

    with (
        mock.patch.object(async_compile.AsyncCompile, "triton", compile_tuned),
        mock.patch.object(async_compile.AsyncCompile, "warm_pool", lambda: None),
        mock.patch.object(pad_mm, "_should_pad", lambda *args, **kwargs: False, create=True),  # unless older
        constants_on_host(),
        config.patch(force_disable_caches=True, compile_threads=1),
    ):
        yield


def empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a meta tensor in place of `empty_strided_cuda`, which allocates all buffers of Inductor's wrapper."""
    return torch.empty_strided(size, stride, dtype=dtype, device=_META)


class Sources:
    """Replacement of PyCodeCache: modules by the hash of their source, in memory. `wrappers` is the executed code, in order."""

    def __init__(self) -> None:
        self.wrappers: list[str] = []
        self._texts: dict[str, str] = {}

    def write(self, source: str, extra: str = "") -> tuple[str, str]:
        """Return the key and the path of a source; nothing is written."""
        from torch._inductor.codecache import get_hash

        key = get_hash(source, extra)
        self._texts[f"{key}.py"] = source
        return key, f"{key}.py"

    def load(self, source: str, extra: str = "", **options: Any) -> ModuleType:
        """Return the module of a source."""
        return self.load_by_key_path(*self.write(source, extra))

    def load_by_key_path(
        self, key: str, path: str, linemap: Any = None, attrs: Any = None, **options: Any
    ) -> ModuleType:
        """Return the module of a source that was written, with further attributes."""
        source, module = self._texts[path], ModuleType(f"inductor.{key}")
        module.__file__, module.__dict__["key"] = path, key
        if "def call(" in source:
            self.wrappers.append(source)
        elif "@triton.jit" in source:  # a template's kernel, which Inductor names and does not call
            return module
        code = source.replace(_DEVICE, "device(type='meta')").replace(_IMPORTS, "\n")
        exec(compile(code, path, "exec", dont_inherit=True), module.__dict__)
        vars(module).update(attrs or {})
        return module

    def open(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Open a source that was written, else a file."""
        return io.StringIO(self._texts[path]) if path in self._texts else open(path, *args, **kwargs)


# ------------------------------------------------------------------------------------------------------------ inductor


TIMED = "Inductor times whether to pad matrix products with sizes that are no multiple of the alignment; padding is taken as slower"
_CONVOLUTION = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")


class _OnHost(TorchFunctionMode):
    """Creates tensors on the CPU for code that creates them on CUDA: constants of one element, which Inductor folds."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        def on_host(value: Any) -> Any:
            return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value

        return func(*map(on_host, args), **{name: on_host(value) for name, value in (kwargs or {}).items()})


@contextmanager
def constants_on_host() -> Iterator[None]:
    """Make Inductor compute on the CPU which tensors of a graph are constant, such as masks of zeros, within the context.

    Otherwise it computes them on the device and folds them: attention loses a mask of zeros (fx_passes/joint_graph.py, 2.15).
    """
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder as Folder

    deduce: Any = getattr(Folder, "_deduce_value", None)  # unless older

    def deduce_on_host(self: Any, node: torch.fx.Node) -> Any:
        with _OnHost():
            return deduce(self, node)

    with mock.patch.object(Folder, "_deduce_value", deduce_on_host) if deduce is not None else nullcontext():
        yield


@contextmanager
def without_function_modes() -> Iterator[None]:
    """Disable all function modes within the context: the compiler must not trace Sizer's own."""
    count = torch._C._len_torch_function_stack()
    modes = [torch._C._pop_torch_function_stack() for _ in range(count)]
    try:
        yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


@contextmanager
def compiler_at_work() -> Iterator[None]:
    """Run the compiler as outside of a trace within the context: without its modes and its imports.

    Warnings are ignored: they advise on speed, or are about fake tensors.
    """
    with _disable_current_modes(), without_function_modes(), usual_imports(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def inductor_on(
    device: Hardware,
    findings: Findings,
    frontend: Frontend,
    begin_graphs: Callable[[], None],
    *,
    rules: Rules,
    own_rules: bool,
) -> Iterator[None]:
    """Make Inductor compile graphs over meta tensors as on the device within the context; its code runs on meta tensors.

    `begin_graphs` is called before code is compiled for CUDA graphs. `rules` are those of the trace. Only if they are the
    installed PyTorch's (`own_rules`), Inductor's code checks results: in 2.6 attention's seeds have another dtype.
    """
    import torch._functorch._aot_autograd.runtime_wrappers as runtime_wrappers
    import torch._functorch.config as functorch_config
    import torch._inductor.async_compile as async_compile
    import torch._inductor.codecache as codecache
    import torch._inductor.compile_fx as compile_fx
    import torch._inductor.config as inductor_config
    import torch._inductor.decomposition as decomposition
    import torch._inductor.fx_passes.pad_mm as pad_mm
    import torch._inductor.output_code as output_code
    import torch._inductor.scheduler as scheduler
    import torch._prims.rng_prims
    import torch.utils._triton as triton_answers
    from torch._subclasses.fake_tensor import FakeTensorMode

    sources = Sources()
    partition, forward, backward = (
        compile_fx.partition_fn,
        compile_fx.compile_fx_forward,
        compile_fx.compile_fx_backward,
    )
    fakified = runtime_wrappers.FakifiedOutWrapper
    results_of = fakified._compute_output_meta_with_inductor_strides
    guards, is_gpu = torch._C._dynamo.guards, decomposition.is_gpu
    bandwidth = getattr(scheduler, "get_gpu_dram_gbps", None)  # unless older

    def partition_moved(graph: Any, joint_inputs: Any, **kwargs: Any) -> Any:
        with frontend.turned(False):
            parts = partition(graph, move(graph, joint_inputs), **kwargs)
        findings.partitioned(*parts)
        return parts

    def forward_moved(graph: Any, example_inputs: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_settings(inductor_config)
        if inductor_config.triton.cudagraphs:
            begin_graphs()
        with frontend.turned(False):
            if kwargs.get("is_inference"):
                return forward(graph, move(graph, example_inputs), *args, **kwargs)
            inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
            return forward(graph, inputs, *args, **kwargs)

    def backward_moved(*args: Any, **kwargs: Any) -> Any:
        # as late as in the first backward pass, within the step's modes at that time
        with compiler_at_work(), frontend.turned(False):
            made = backward(*args, **kwargs)
        findings.compiled = True
        gc.collect()  # the compiler's frames are in cycles, and keep the step's results alive
        return made

    @cache
    def bandwidth_or_nan() -> float:
        try:
            return bandwidth() if bandwidth is not None else math.nan
        except (AssertionError, RuntimeError, OSError, CalledProcessError):  # of Triton, which looks for the driver
            return math.nan

    def pad_by_assumption(match: Any, first: Any, second: Any, op: Any, input: Any = None) -> bool:
        findings.timed.add(TIMED)
        return False

    def results_on_meta(self: Any) -> list[Any]:
        # DDPOptimizer traces the next part of a graph on them (torch/_dynamo/backends/distributed.py, 2.15)
        return [*map(move_back, results_of(self))]

    replacements: list[tuple[Any, str, Any]] = [
        (compile_fx, "with_fresh_cache_if_config", nullcontext),  # a folder on the disk
        (compile_fx, "partition_fn", partition_moved),
        (compile_fx, "compile_fx_forward", forward_moved),
        (compile_fx, "compile_fx_backward", backward_moved),
        (FakeTensorMode, "avoid_device_init", property(lambda self: True)),
        (triton_answers, "triton_hash_with_backend", lambda: "none"),
        (codecache, "triton_key", lambda: "none"),  # a hash of all of Triton's files, for keys of caches, which are off
        (scheduler, "has_triton", lambda: True),
        (scheduler, "get_gpu_dram_gbps", bandwidth_or_nan),  # for each pair of kernels Triton would start a process
        (pad_mm, "has_triton", lambda: True),
        (pad_mm, "_should_pad", pad_by_assumption),
        (fakified, "_compute_output_meta_with_inductor_strides", results_on_meta),
        *((codecache.PyCodeCache, name, getattr(sources, name)) for name in ("write", "load", "load_by_key_path")),
        (output_code, "open", sources.open),
        (async_compile.AsyncCompile, "triton", triton_kernel),
        (async_compile.AsyncCompile, "warm_pool", lambda: None),
        (guards, "_empty_strided_cuda", empty_strided),
        (guards, "assert_alignment", lambda *args: None),
        # gradients of biases are separate sums on a device; the joint graph is traced on meta
        (decomposition, "is_gpu", lambda kind: kind == "meta" or is_gpu(kind)),
        *_convolutions_on(device),
    ]
    torch._C._ensureCUDADeviceGuardSet()
    with ExitStack() as stack:
        for place, name, value in replacements:
            stack.enter_context(mock.patch.object(place, name, value, create=not hasattr(place, name)))
        stack.enter_context(constants_on_host())
        stack.enter_context(_composites_taken_apart())
        stack.enter_context(_own_kernels_left_out(rules))
        stack.enter_context(_operators_whole())
        stack.enter_context(_operators_autocast())
        table = torch._prims.rng_prims.graphsafe_run_with_rng_state.python_key_table
        stack.enter_context(mock.patch.dict(table, {Recorder: _run_with_rng_state}))
        stack.enter_context(inductor_config.patch(force_disable_caches=True, compile_threads=1, size_asserts=own_rules))
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        yield


def _run_with_rng_state(recorder: Recorder, op: Any, *args: Any, rng_state: torch.Generator, **kwargs: Any) -> Any:
    """Run an operator that the backward pass repeats with the same random numbers, such as a checkpointed dropout.

    A device changes its generator's state on the host for the time (torch/_prims/rng_prims.py, _impl_graphsafe_rng; 2.15).
    """
    with recorder:
        return op(*args, **kwargs)


def _is_tuned(config: Any) -> bool:
    return config.max_autotune or config.max_autotune_gemm or config.max_autotune_pointwise


def _refuse_settings(config: Any) -> None:
    """Raise TraceError for settings of Inductor with memory that cannot be traced."""
    if _is_tuned(config):
        raise TraceError(
            "max-autotune chooses kernels by timing them on the device",
            given="torch.compile with max-autotune",
            allowed="mode=default",
            todo="leave max-autotune out: without it each product is cuBLAS's, with its workspace",
        )


def _convolutions_on(device: Hardware) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return replacements that give a convolution's result the memory format of the device's backend.

    PyTorch's own functions ask the device whether cuDNN supports bfloat16. `_select_conv_backend` passes the format on to
    `_conv_determine_backend_memory_format`, in place of a backend (torch/_meta_registrations.py, meta_conv; 2.15).
    """
    select, determine = torch._C._select_conv_backend, torch._C._conv_determine_backend_memory_format

    def select_on_device(input: torch.Tensor, weight: torch.Tensor, *args: Any, **given: Any) -> Any:
        if input.device.type not in ("cuda", "meta") or args:  # on meta while Dynamo and AOTAutograd trace
            return select(input, weight, *args, **given)
        call = as_call(input, weight, tuple(given[name] for name in _CONVOLUTION))
        return call.layout if backend_of(call, device.capability) == "cudnn" else torch.contiguous_format

    def determine_on_device(input: torch.Tensor, weight: torch.Tensor, backend: Any) -> torch.memory_format:
        return backend if isinstance(backend, torch.memory_format) else determine(input, weight, backend)

    return [
        (torch._C, "_select_conv_backend", select_on_device),
        (torch._C, "_conv_determine_backend_memory_format", determine_on_device),
    ]


@contextmanager
def _composites_taken_apart() -> Iterator[None]:
    """Decompose composite operators with a meta kernel in Python for meta tensors, as for CUDA's, within the context.

    `resolve_key` (torch/_ops.py, 2.15) does not decompose an operator with a kernel for the backend: under AOTAutograd,
    F.cross_entropy has no gradient on meta, and F.mse_loss has one for its target. Eager mode does not use those kernels.
    Operators with a kernel of the device stay whole: gradients of activations, and the fused RMS norm.
    """
    from torch._decomp import global_decomposition_table  # importing it registers the kernels

    packets = [one for one in vars(torch.ops.aten).values() if isinstance(one, torch._ops.OpOverloadPacket)]
    places = *global_decomposition_table.values(), *(vars(packet).values() for packet in packets)
    named = {op for place in places for op in place if isinstance(op, torch._ops.OpOverload)}
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    known = [op for op in named if DispatchKey.Meta in op.py_kernels and has(op.name(), "CompositeImplicitAutograd")]
    found = [op for op in known if not has(op.name(), "CPU") and op is not torch.ops.aten._fused_rms_norm.default]
    kernels = [op.py_kernels.pop(DispatchKey.Meta) for op in found]
    for op in found:
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, kernel in zip(found, kernels, strict=True):
            op.py_kernels[DispatchKey.Meta] = kernel
            op._dispatch_cache.clear()


@contextmanager
def _own_kernels_left_out(rules: Rules) -> Iterator[None]:
    """Make the compiler trace operators as PyTorch does for CUDA within the context, not by a trace's kernels for eager code.

    Those kernels are registered on AutogradMeta (`kernels_installed`), so AOTAutograd would use them. A linear layer's views, a
    one-hot vector's scatter, and gradients of products would then differ from those of CUDA's graph. `resolve_key`
    (torch/_ops.py, 2.15) returns PyTorch's own: a decomposition in Python, or a kernel in C++. `_ASKS` keep the trace's
    kernels.
    """
    key, cuda = DispatchKey.AutogradMeta, DispatchKey.AutogradCUDA
    found = [op for op in (*rules.kernels, *rules.formulas) if op not in _ASKS]
    for op in found:
        own: Any = resolve_key(op, cuda)  # a key instead of a function: the kernel in C++ (torch/_ops.py, _get_dispatch)
        op.py_kernels[key] = op.py_kernels.get(own, own)
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op in found:
            del op.py_kernels[key]
            op._dispatch_cache.clear()


_aten = torch.ops.aten
# Composite operators that query the device in C++ to choose a path: meta tensors would use another device's path.
_ASKS = frozenset((
    _aten.scaled_dot_product_attention.default, _aten.batch_norm.default, _aten.rms_norm.default,
    _aten.lstm_cell.default, _aten.gru_cell.default, _aten.softmax.int, _aten.log_softmax.int,
    _aten.ctc_loss.Tensor, _aten.ctc_loss.IntList,
    _aten._native_multi_head_attention.default, _aten._transformer_encoder_layer_fwd.default,
))  # fmt: skip


@contextmanager
def _operators_whole() -> Iterator[None]:
    """Make the compiler trace some operators of the device whole within the context, although they are chains on meta.

    They are RMS norms and the gradients of SiLU and Mish: no other operators of PyTorch 2.15 have a composite kernel and one of
    CUDA.
    Source: layer_norm.cpp, rms_norm_symint; `rms_norm` (sizer.tracing.cuda.normalization) has the same conditions.
    """
    aten, composite, key = torch.ops.aten, DispatchKey.CompositeImplicitAutograd, DispatchKey.AutogradMeta
    rms_norm = aten.rms_norm.default

    def norm(input: Any, shape: Any, weight: Any = None, eps: Any = None) -> Any:
        is_plain = memory_format(input) is torch.contiguous_format
        if not is_plain or (weight is not None and weight.dtype != input.dtype):
            return rms_norm._op_dk(composite, input, shape, weight, eps)
        return aten._fused_rms_norm.default(input, [*shape], weight, eps)[0]

    from torch._decomp import decomposition_table

    fused, mish = aten._fused_rms_norm.default, aten.mish_backward.default
    replaced = [
        # functionalization decomposes operators without a kernel in C++ for meta
        *((op, composite, decomposition_table[op]) for op in (fused, mish)),
        (rms_norm, composite, norm),
        (rms_norm, key, norm),
    ]
    for op, place, kernel in replaced:
        op.py_kernels[place] = kernel
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, place, _ in replaced:
            del op.py_kernels[place]
            op._dispatch_cache.clear()


@contextmanager
def _operators_autocast() -> Iterator[None]:
    """Make operators that call functions accept the key that casts meta tensors (sizer.tracing.meta.autocast), in the context.

    As with AutocastCUDA it does nothing, except for flex_attention: _flex_attention_autocast_impl, torch/_higher_order_ops
    (2.15).
    """
    from torch._higher_order_ops.flex_attention import flex_attention
    from torch.amp.autocast_mode import _cast

    key = DispatchKey.AutocastIPU
    operators = [*torch._ops._higher_order_ops.values()]
    before = [operator.non_fallthrough_keys for operator in operators]

    def cast(query: Any, key_: Any, value: Any, *args: Any) -> Any:
        dtype = torch.get_autocast_dtype("cuda")
        cast_ = [_cast(tensor, "meta", dtype) for tensor in (query, key_, value)]
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            return flex_attention(*cast_, *args)

    for operator in operators:
        operator.fallthrough(key)
        operator._dispatch_cache.clear()
    flex_attention.py_impl(key)(cast)
    try:
        yield
    finally:
        del flex_attention.py_kernels[key]
        for operator, keys in zip(operators, before, strict=True):
            operator.non_fallthrough_keys = keys
            operator._dispatch_cache.clear()

"""Private names of PyTorch that tracing compiled code relies on, and the check that the installed version has them."""

from __future__ import annotations

import importlib
import importlib.util
from functools import reduce

import torch

from sizer.base.errors import TraceError
from sizer.base.versions import format_version, installed_version

OLDEST_READ = (2, 15)

NAMES = (
    ("torch._dynamo.eval_frame", "_TorchDynamoContext"),
    ("torch._dynamo.eval_frame", "_callback_from_stance"),
    ("torch._dynamo.convert_frame", "CatchErrorsWrapper.__call__"),
    ("torch._dynamo.device_interface", "CudaInterface.Worker.get_device_properties"),
    ("torch._dynamo.trace_rules", "SKIP_DIRS"),
    ("torch._dynamo.trace_rules", "SKIP_DIRS_RE"),
    ("torch._dynamo.trace_rules", "add"),
    ("torch._dynamo.trace_rules", "check"),
    ("torch._dynamo.trace_rules", "clear_lru_cache"),
    ("torch._dynamo.utils", "clear_compilation_metrics"),
    ("torch._dynamo.utils", "get_compilation_metrics"),
    ("torch._dynamo.utils", "graph_break_reasons"),
    ("torch._dynamo.utils", "set_compilation_metrics_limit"),
    ("torch._dynamo.variables.torch", "constant_fold_functions"),
    ("torch._dynamo.variables.builder", "VariableBuilder.__call__"),
    ("torch._dynamo.variables.optimizer", "OptimizerVariable._safe_to_set_capturable"),
    ("torch._dynamo.variables.optimizer", "OptimizerVariable.move_step_if_cpu"),
    ("torch._dynamo.variables.optimizer", "OptimizerVariable.tp_methods"),
    ("torch._dynamo.variables.tensor", "TensorVariable.method_attr_device"),
    ("torch._dynamo.variables.tensor", "TensorVariable.method_attr_is_cuda"),
    ("torch._dynamo.variables.tensor", "all_tensor_attrs"),
    (
        "torch._functorch._aot_autograd.runtime_wrappers",
        "FakifiedOutWrapper._compute_output_meta_with_inductor_strides",
    ),
    ("torch._functorch.config", "enable_autograd_cache"),
    ("torch._guards", "detect_fake_mode"),
    ("torch._higher_order_ops.flex_attention", "flex_attention.py_kernels"),
    ("torch._inductor.async_compile", "AsyncCompile.triton"),
    ("torch._inductor.async_compile", "AsyncCompile.warm_pool"),
    ("torch._inductor.codecache", "PyCodeCache.load"),
    ("torch._inductor.codecache", "PyCodeCache.load_by_key_path"),
    ("torch._inductor.codecache", "PyCodeCache.write"),
    ("torch._inductor.codecache", "get_hash"),
    ("torch._inductor.codecache", "triton_key"),
    ("torch._inductor.compile_fx", "compile_fx_backward"),
    ("torch._inductor.compile_fx", "compile_fx_forward"),
    ("torch._inductor.compile_fx", "partition_fn"),
    ("torch._inductor.compile_fx", "with_fresh_cache_if_config"),
    *(
        ("torch._inductor.cudagraph_trees", name)
        for name in (
            "CUDAGraphCaptureControlFlowOpDispatchMode", "CUDAGraphTreeManager.run", "ControlFlowOpWarmupDispatchMode",
            "TreeManagerContainer", "_update_current_stream_external_object", "check_memory_pool", "get_container",
            "get_history_recording", "preserve_rng_state",
        )
    ),
    ("torch._inductor.config", "force_disable_caches"),
    ("torch._inductor.config", "compile_threads"),
    ("torch._inductor.config", "size_asserts"),
    ("torch._inductor.decomposition", "is_gpu"),
    ("torch._inductor.fx_passes.joint_graph", "UniformValueConstantFolder._deduce_value"),
    ("torch._inductor.fx_passes.pad_mm", "_should_pad"),
    ("torch._inductor.fx_passes.pad_mm", "has_triton"),
    ("torch._inductor.scheduler", "has_triton"),
    ("torch._inductor.output_code", "CompiledFxGraph"),
    ("torch._ops", "_higher_order_ops"),
    ("torch._ops", "resolve_key"),
    ("torch._prims.rng_prims", "graphsafe_run_with_rng_state.python_key_table"),
    ("torch._subclasses.fake_tensor", "FakeTensorMode.dispatch"),
    ("torch._subclasses.fake_tensor", "FakeTensorMode.avoid_device_init"),
    ("torch._C", "_conv_determine_backend_memory_format"),
    ("torch._C", "_dynamo.guards._empty_strided_cuda"),
    ("torch._C", "_dynamo.guards.assert_alignment"),
    ("torch._C", "_ensureCUDADeviceGuardSet"),
    ("torch._C", "_pop_torch_function_stack"),
    ("torch._C", "get_autocast_dtype"),
    ("torch._C", "is_autocast_enabled"),
    ("torch._C", "_push_on_torch_function_stack"),
    ("torch._C", "_set_cached_tensors_enabled"),
    ("torch._C", "_select_conv_backend"),
    ("torch.amp.autocast_mode", "_cast"),
    ("torch.cuda", "_DeviceGuard"),
    ("torch.distributed._functional_collectives", "AsyncCollectiveTensor.trigger_wait"),
    ("torch.distributed.utils", "_recursive_to"),
    ("torch.utils._triton", "triton_hash_with_backend"),
)  # fmt: skip


def missing_names() -> list[str]:
    """Return the names of NAMES that the installed PyTorch lacks."""
    return [f"{module}.{path}" for module, path in NAMES if not _exists(module, path)]


def check_compiler() -> None:
    """Import PyTorch's compiler.

    Raises TraceError if triton is missing, if this PyTorch is older than the versions read, or if it lacks a name of NAMES.
    """
    if (version := installed_version()) < OLDEST_READ:
        raise TraceError(
            f"the compiler of PyTorch {format_version(version)} cannot be traced",
            allowed=f"PyTorch {format_version(OLDEST_READ)} or newer",
            todo="install such a version, or leave torch.compile out",
        )
    if importlib.util.find_spec("triton") is None:
        raise TraceError(
            "torch.compile generates Triton kernels for this device, and triton is not installed",
            todo="pip install triton (its kernels are never compiled, no GPU is needed)",
        )
    if missing := missing_names():
        raise TraceError(
            f"the compiler of PyTorch {torch.__version__} cannot be traced: it lacks {', '.join(missing)}",
            allowed="PyTorch 2.15",
            todo="install that version, or leave torch.compile out",
        )


def _exists(module: str, path: str) -> bool:
    try:
        reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        return False
    return True

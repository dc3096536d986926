"""Composite operators: chains of operators on a device, and operators with a generic path that no device uses.

The latter are linear layers, gradients of activations and one-hot vectors.

PyTorch registers Python decompositions for operators that have a CUDA kernel of their own (upsample_nearest2d). These are for
tracing compilers and do not run on a device. An operator is composite if C++ registers a composite kernel for it.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from sizer.catalogue.recipes import INSIDE
from sizer.tracing.device import Device
from sizer.tracing.meta.memo import makes_tensors
from sizer.tracing.values.handler import Handler, HandlerContext
from sizer.tracing.values.known import is_meta

_aten = torch.ops.aten
_META = torch.device("meta")
_IMPLICIT = torch._C.DispatchKey.CompositeImplicitAutograd
_LAZY = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative)
_DEVICE_KEYS = {"cuda": "CUDA", "cpu": "CPU"}

# Composite operators that make a single tensor, with values or strides that are followed as a whole.
_WHOLE = {
    operator
    for name in [
        "_conj_physical", "constant_pad_nd",
        "_copy_from",
        "_has_same_storage_numel",
        "_lazy_clone",
        "_pin_memory",
        "_reshape_copy",
        "_resize_output",
        "_to_copy",
        "_unsafe_view",
        "bernoulli",
        "clone",
        "complex",
        "convolution",
        "embedding",
        "empty_like",
        "empty_permuted",
        "fill",
        "full_like",
        "lift",
        "new_empty",
        "new_full",
        "new_ones",
        "new_zeros",
        "new_empty_strided",
        "ones_like",
        "polar",
        "rand_like",
        "randint_like",
        "randn_like",
        "resize",
        "resize_as",
        "set",
        "stack",
        "unsafe_split",
        "unsafe_split_with_sizes",
        "zero",
        "zeros_like",
        "index_put",
        "masked_fill",
        "masked_scatter_backward",
        "_convolution",
        "mv",
        "kthvalue",
        "logcumsumexp",
        "logical_and",
        "logical_not",
        "logical_or",
        "logical_xor",
        "huber_loss_backward",
        "smooth_l1_loss_backward",
        "soft_margin_loss_backward",
        "cummax",
        "cummin",
        "sort",
        "median",
        "nanmedian",
        "sum",
        "mean",
        "norm",
    ]
    if hasattr(_aten, name)
    for operator in (getattr(getattr(_aten, name), overload) for overload in getattr(_aten, name).overloads())
}


def parts(func: Any, kind: str, known: Container[Any]) -> Callable[..., Any] | None:
    """Return the chain of operators that a device of this kind runs for an operator, or None if it has a kernel of its own.

    Outside autograd's keys (in inference mode) a CompositeImplicitAutograd operator arrives whole. A CompositeExplicitAutograd
    operator always does; its parts allocate on a device like any other operator. `known` are operators with a rule.
    """
    if not isinstance(func, torch._ops.OpOverload):
        return None
    if func.namespace not in ("aten", "prims"):
        return None
    has = partial(torch._C._dispatch_has_kernel_for_dispatch_key, func.name())
    if has("CompositeImplicitAutograd"):
        return _resolving(partial(func._op_dk, _IMPLICIT))
    device_key = _DEVICE_KEYS.get(kind)
    if device_key is None or has(device_key):
        return None
    explicit = [key for key in ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional") if has(key)]
    if not explicit:
        return None
    if func in known or func in _WHOLE or not makes_tensors(func):
        return None
    if "Scalar" in func._overloadname or func._opname.endswith("_copy"):
        return None  # a number wrapped in a tensor, or a cloned view: only the result
    return partial(func._op_dk, getattr(torch._C.DispatchKey, explicit[0]))


def _resolving(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs a composite operator's parts with conjugated and negated views resolved, as on a device.

    Below a dispatch mode the dispatcher leaves out the keys that resolve them (ATen/native/MathBitsFallback.h).
    """

    def resolved(*args: Any, **kwargs: Any) -> Any:
        excluded = [key for key in _LAZY if torch._C._dispatch_tls_is_dispatch_key_excluded(key)]
        for key in excluded:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        try:
            return run(*args, **kwargs)
        finally:
            for key in excluded:
                torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)

    return resolved


def in_callbacks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel as the dispatcher calls it: with the function modes of the traced code, where there are some.

    `modes_in_callbacks` replaces this function.
    """
    return function


def python_kernel(func: Any, kind: str, known: Container[Any]) -> Handler | None:
    """Return a handler that runs the Python kernel of a `torch.library.custom_op` operator; None for others, and the `known`.

    On meta such an operator runs its fake kernel, which makes only the results. On the first call the kernel is tried on copies
    of the arguments, unlogged. If it cannot run on meta (for instance because it reads values), the fake kernel
    is used, and a note says so.
    """
    definition = OPDEFS.get(func._schema.name) if isinstance(func, torch._ops.OpOverload) else None
    if definition is None or str(func) in known:
        return None
    function = definition._backend_fns.get(kind) or definition._backend_fns.get(None)
    runs: list[bool] = []

    def handler(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
        if not runs:
            runs.append(function is not None and _runs_on_meta(function, recorder, args, kwargs))
        if not runs[0]:
            recorder.notes.setdefault(f"{INSIDE}: {func._schema.name}")
            return NotImplemented
        with recorder:
            return in_callbacks(function)(*args, **kwargs)

    return handler


def _runs_on_meta(function: Callable[..., Any], recorder: HandlerContext, args: tuple, kwargs: dict) -> bool:
    try:
        with _disable_current_modes(), recorder.unlogged():
            copies = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
            in_callbacks(function)(*copies[0], **copies[1])
    except Exception:  # of any class: the function is not part of PyTorch
        return False
    return True


def _like(*positions: int) -> Callable[..., Any]:
    """Return a handler for a gradient or a draw without a meta kernel.

    Its result is a contiguous tensor like the argument at this position.
    """

    def handler(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
        if not args[positions[0]].is_meta:  # on the host
            return NotImplemented
        made = [torch.empty(args[at].shape, dtype=args[at].dtype, device="meta") for at in positions]
        return made[0] if len(made) == 1 else tuple(made)

    return handler


def _cached_mask(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the fake-quantised tensor, and the mask of values in range (native/quantized/FakeQuantPerChannelAffine.cpp)."""
    made = torch.empty_like(args[0])
    return made, torch.empty_like(made, dtype=torch.bool)


def _observed(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run _fused_moving_avg_obs_fq_helper: the range of x, then its fake quantization.

    Arguments: x, observer_on, fake_on, running_min, running_max, scale, zero_point, .., ch_axis, per_row. With channels, the
    first call resizes the empty buffers (native/quantized/cuda/FusedObsFakeQuant.cu, 2.15).
    """
    x, buffers, least, most = args[0], args[3:7], args[8], args[9]
    axis, per_row = args[10], args[11] if len(args) > 11 else kwargs.get("per_row_fake_quant", False)
    if not x.is_meta:
        return NotImplemented
    with recorder:
        if not per_row:
            torch.aminmax(x)
            return _aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default(x, *buffers[2:], args[2], least, most)
        rows = x if x.dim() == 2 else x.transpose(0, axis).flatten(1)
        if not buffers[0].numel():
            for buffer in buffers:
                buffer.resize_(x.shape[axis])
        torch.aminmax(rows, dim=1)
        return _aten.fake_quantize_per_channel_affine_cachemask.default(x, *buffers[2:], 0, least, most)


def _ldexp(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run ldexp of floats and integers as one kernel, as on CUDA (native/BinaryOps.cpp); on meta it is a power and a product."""
    x, exponent = args
    takes = x.is_meta and exponent.is_meta and x.is_floating_point() and not exponent.is_floating_point()
    if not takes or exponent.is_complex() or recorder.device.kind != "cuda":
        return NotImplemented
    return torch.mul(x, exponent)


def _complex_dropout(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return result and mask of native_dropout of complex numbers (native/cuda/Dropout.cu); the meta kernel refuses the dtype."""
    if not args[0].is_complex() or not args[0].is_meta or kwargs or args[2] is False:
        return NotImplemented
    return torch.empty_like(args[0]), torch.empty_like(args[0], dtype=torch.bool)


def _gradient_of_view(recorder: HandlerContext, func: Any, args: tuple, kwargs: dict) -> Any:
    """Return zeros, for select_backward, slice_backward and diagonal_backward.

    The gradient is copied into a view of the zeros. View and copy make no block. A gradient of known values is copied. Source:
    native/TensorShape.cpp, 2.15.
    """
    gradient = args[0]
    if kwargs or recorder.device.kind not in _DEVICE_KEYS or recorder.sees_inputs:
        return NotImplemented
    is_plain = type(gradient) is Tensor and is_meta(gradient) and gradient.layout is torch.strided
    if not is_plain or recorder.values.is_known(gradient):
        return NotImplemented
    given = {"dtype": gradient.dtype, "layout": torch.strided, "device": _META, "pin_memory": False}
    zeros = recorder.run_logged(_aten.zeros.default, (args[1],), given)
    recorder.values.forget(zeros)
    return zeros


HANDLERS = {
    _aten.ldexp.Tensor: _ldexp,
    _aten.native_dropout.default: _complex_dropout,
    **dict.fromkeys(
        (_aten.select_backward.default, _aten.slice_backward.default, _aten.diagonal_backward.default), _gradient_of_view
    ),
    _aten._fused_moving_avg_obs_fq_helper.default: _observed,
    _aten.fake_quantize_per_channel_affine_cachemask.default: _cached_mask,
    _aten.fake_quantize_per_tensor_affine_cachemask.default: _cached_mask,
    _aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default: _cached_mask,
    _aten.multi_margin_loss_backward.default: _like(1),
    _aten.multilabel_margin_loss_backward.default: _like(1),
    _aten.fractional_max_pool3d_backward.default: _like(1),
    _aten._logcumsumexp.default: _like(0),
    # native/cuda/Distributions.cu, 2.15
    _aten.binomial.default: _like(0),
    _aten._sample_dirichlet.default: _like(0),
    _aten._dirichlet_grad.default: _like(0),
    _aten._standard_gamma_grad.default: _like(0),
}


def linear(device: Device, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Run aten.linear with the bias added in place, which meta tensors would disable (aten/src/ATen/native/Linear.cpp).

    If the weight requires gradients, the input is folded to rows, in inference mode too (LinearAlgebra.cpp, should_fold).
    Within the trace of a composite operator a view of the weight no longer reports that it requires gradients.
    """
    rows = torch.is_inference_mode_enabled() and weight.requires_grad and not weight.is_inference() and weight.dim() == 2
    if input.dim() <= 2 or input.is_contiguous() or (bias is None and not rows):
        return _aten.linear.default.decompose(input, weight, bias)
    if rows:
        out = torch.mm(input.reshape(-1, input.shape[-1]), weight.t())
        out = _aten._unsafe_view.default(out, [*input.shape[:-1], weight.shape[0]])
    else:
        out = torch.matmul(input, weight.t())
    return out if bias is None else out.add_(bias)


def activation_backward(device: Device, grad_output: Tensor, input: Tensor) -> Tensor:
    """Run silu_backward or mish_backward as one kernel, as on every device; the generic path is a chain of operators.

    Source: math_silu_backward and math_mish_backward in aten/src/ATen/native/Activation.cpp.
    """
    return torch.mul(grad_output, input)


def one_hot(device: Device, input: Tensor, num_classes: int = -1) -> Tensor:
    """Run aten.one_hot as zeros with ones scattered (aten/src/ATen/native/Onehot.cpp); on meta it compares with every class.

    The CPU first computes the smallest and the largest class (aten.aminmax).
    """
    if device.kind == "cpu" and input.numel():
        torch.aminmax(input)
    classes = int(input.max()) + 1 if num_classes == -1 else num_classes
    return input.new_zeros(*input.shape, classes).scatter_(-1, input.unsqueeze(-1), 1)


KERNELS = {
    _aten.linear.default: linear,
    _aten.silu_backward.default: activation_backward,
    _aten.mish_backward.default: activation_backward,
    _aten.one_hot.default: one_hot,
}

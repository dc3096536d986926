"""Operators that devices refuse and meta kernels accept: tensors of different dtypes in one operator.

A model that is cast to half as a whole has such operators if its own code keeps a tensor in float32: a table of positions,
boxes, a buffer made in its forward. Meta kernels accept them, and Sizer would estimate a step that no device can run. Each rule
raises PyTorch's error with PyTorch's message.

Source: the operators' own checks (aten/src/ATen/native, native/cuda and native/cudnn, 2.11 to 2.15).
`tests/tracing/test_dtypes.py` compares every rule with the CPU, `tests/null_driver/test_dtypes.py` with PyTorch's CUDA code.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sizer.tracing.meta import refusals
from sizer.tracing.operator_tables import operator

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
_SINGLE = (torch.float32, torch.float64)
_HALF_PARTS = {torch.float16: "half", torch.complex32: "half"}
_NAMES = {
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.float32: "Float",
    torch.float64: "Double",
    torch.int64: "Long",
    torch.int32: "Int",
    torch.bool: "Bool",
    torch.uint8: "Byte",
}

OWN_CODE = "its own code"  # first words about a model that mixes dtypes itself

Check = Callable[[str, tuple], None]
"""Takes the device's kind and the operator's positional arguments; raises RuntimeError or NotImplementedError."""

# Beginnings or ends of PyTorch's messages about dtypes; `.numpy()` of bfloat16 says "unsupported ScalarType".
_REFUSAL = re.compile(
    r"dtype|scalar ?type|not implemented for '(BFloat16|Half)'|Input type|Low precision"
    r"|(half|bfloat16) precision|to have type|types other than float",
    re.IGNORECASE,
)


def is_refusal(error: Exception) -> bool:
    """Return whether an error is PyTorch's about mismatched dtypes or dtypes without a kernel."""
    return isinstance(error, (RuntimeError, TypeError, ValueError)) and _REFUSAL.search(str(error)) is not None


def remedy(work: str, module: nn.Module) -> str | None:
    """Return a remedy for a module's error in a dtype of the contract; None in float32.

    transformers loads weights in a half dtype, except for modules that a class names. These are not kept in float32 here.
    """
    if work == "float32":
        return None
    half = work.removeprefix("amp-")
    if work.startswith("amp-"):
        return f"{OWN_CODE} mixes dtypes under autocast to {half}, which a device refuses, too: ask for float32"
    kept = getattr(module, "_keep_in_fp32_modules_strict", None) or ()
    loads = f" (transformers loads {', '.join(sorted(kept))} in float32)" if kept else ""
    return (
        f"{OWN_CODE} does not run cast to {half} as a whole, on a device neither{loads}: ask for amp-{half} or float32"
    )


def name(dtype: torch.dtype) -> str:
    """Return a dtype's name in PyTorch's C++."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _in_cpp(dtype: torch.dtype) -> str:
    return f"c10::{name(dtype)}" if dtype in _HALVES else name(dtype).lower()


def _alike(first: int, second: int, text: str, words: Callable[[torch.dtype], str] = name) -> Check:
    """Return a check that two positional tensors have one dtype; `text` gets the names of both."""

    def check(kind: str, args: tuple) -> None:
        a, b = args[first], args[second] if len(args) > second else None
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype != b.dtype:
            raise RuntimeError(text.format(words(a.dtype), words(b.dtype)))

    return check


def _both(*checks: Check) -> Check:
    def check(kind: str, args: tuple) -> None:
        for one in checks:
            one(kind, args)

    return check


def _no_halves(position: int, text: str) -> Check:
    """Return a check for operators without a kernel for float16 and bfloat16."""

    def check(kind: str, args: tuple) -> None:
        if args[position].dtype in _HALVES:
            raise NotImplementedError(f"\"{text}\" not implemented for '{name(args[position].dtype)}'")

    return check


def _normalized(weight: int) -> Check:
    """Return a check for layer and group norm.

    CUDA accepts weights of the input's dtype only. The CPU also accepts float32 weights for an input in half precision.
    """

    def check(kind: str, args: tuple) -> None:
        input, scale = args[0], args[weight]
        if scale is None or scale.dtype == input.dtype:
            return
        if kind == "cpu" and input.dtype in _HALVES and scale.dtype == torch.float32:
            return
        raise RuntimeError(f"expected scalar type {name(input.dtype)} but found {name(scale.dtype)}")

    return check


def _batch_norm(kind: str, args: tuple) -> None:
    """Raise RuntimeError if weights are in half precision and the input is not."""
    input, weight = args[0], args[1]
    if weight is not None and weight.dtype in _HALVES and input.dtype != weight.dtype:
        raise RuntimeError(f"Expected weight to have type {name(input.dtype)} but got {name(weight.dtype)}")


def _batch_norm_backward(kind: str, args: tuple) -> None:
    """Raise RuntimeError if statistics and weights differ in dtype on CUDA, which only backward checks (cuda/Normalization.cu).

    So parameters that FSDP2 gathers in half precision do not train with float32 statistics.
    """
    weight, mean = args[2], args[3]
    if kind == "cuda" and weight is not None and mean is not None and weight.dtype != mean.dtype:
        raise RuntimeError(f"Expected running_mean to have type {name(weight.dtype)} but got {name(mean.dtype)}")


def _index_put(kind: str, args: tuple) -> None:
    """Raise RuntimeError if values and target differ in dtype.

    An exception is a number under a mask, which becomes `masked_fill`.
    """
    target, indices, values = args[:3]
    if target.dtype == values.dtype:
        return
    accumulates = len(args) > 3 and args[3]
    masks = all(index is None or index.dtype in (torch.bool, torch.uint8) for index in indices)
    on_host = kind == "cpu" or values.device.type == "cpu"
    if values.numel() == 1 and on_host and masks and not accumulates:
        return
    raise RuntimeError(
        "Index put requires the source and destination dtypes match, "
        f"got {name(target.dtype)} for the destination and {name(values.dtype)} for the source."
    )


def _distances(kind: str, args: tuple) -> None:
    """Raise for distances in half precision that are not computed as a matrix product (Distance.cpp, cdist_impl).

    Operator: _cdist_forward, with arguments x1, x2, p, compute_mode.
    """
    first, second, p = args[:3]
    mode = args[3] if len(args) > 3 else None
    large = max(first.shape[-2], second.shape[-2]) > 25
    if p == 2 and (mode == 1 or (not mode and large)):
        return
    _alike(0, 1, "expected scalar type {} but found {}")(kind, args)
    _no_halves(0, "cdist")(kind, args)


def _transformed(kind: str, args: tuple) -> None:
    """Raise for Fourier transforms in half precision that a device does not support (CuFFTPlanCache.h).

    The CPU supports none, CUDA lengths that are powers of two.
    """
    input, dims = args[0], args[1]
    if input.dtype not in (*_HALF_PARTS, torch.bfloat16) or kind == "mps":
        return
    if kind == "cpu":
        raise NotImplementedError(f"Unsupported dtype {name(input.dtype)}")
    if input.dtype == torch.bfloat16:  # computed in float32
        return
    sizes = [input.shape[dim] for dim in dims]
    if isinstance(args[-1], int) and not isinstance(args[-1], bool) and not input.dtype.is_floating_point:
        sizes[-1] = args[-1]  # _fft_c2r: the length of the real result
    if any(size & (size - 1) for size in sizes):
        raise RuntimeError(
            f"cuFFT only supports dimensions whose sizes are powers of two when computing in {_HALF_PARTS[input.dtype]} "
            f"precision, but got a signal size of {sizes}"
        )


def _complex(kind: str, args: tuple) -> None:
    if args[0].dtype != args[1].dtype or args[0].dtype not in (torch.float16, *_SINGLE):
        raise NotImplementedError(
            "Expected both inputs to be Half, Float or Double tensors but got "
            f"{name(args[0].dtype)} and {name(args[1].dtype)}"
        )


def _recurrent(kind: str, args: tuple) -> None:
    """Raise RuntimeError if input and hidden state of _cudnn_rnn differ in dtype.

    Arguments: input, weight, stride, buffer, hx, cx, ...
    """
    for hidden in args[4:6]:
        if hidden is not None and hidden.dtype != args[0].dtype:
            raise RuntimeError(
                "Input and hidden tensors are not the same dtype, "
                f"found input tensor with {name(args[0].dtype)} and hidden tensor with {name(hidden.dtype)}"
            )


def _convolved(kind: str, args: tuple) -> None:
    """Raise RuntimeError if input and weight of a convolution differ in dtype."""
    place = "torch.cuda." if kind == "cuda" else "torch."
    input, weight = (f"{place}{name(tensor.dtype)}Tensor" for tensor in args[:2])
    if input != weight:
        raise RuntimeError(f"Input type ({input}) and weight type ({weight}) should be the same")


_PRODUCT = "mat1 and mat2 must have the same dtype, but got {} and {}"
_EXPECTED = "expected scalar type {} but found {}"
_SOURCE = "{}(): self ({{}}) and source ({{}}) must have the same scalar type"
_BIASED = _both(_alike(1, 2, _PRODUCT), _alike(0, 2, "self and mat2 must have the same dtype, but got {} and {}"))
_LOSS = _alike(1, 2, "Found dtype {1} but expected {0}")

# One line per operator, by overload if there are several.
_BY_NAME: dict[str, Check] = {
    "mm": _alike(0, 1, "expected mat1 and mat2 to have the same dtype, but got: {} != {}", _in_cpp),
    "addmm": _BIASED,
    "_addmm_activation": _BIASED,
    "mv": _alike(0, 1, "addmv input tensors must have the same dtype, but got {} and {}"),
    "addmv": _both(
        _alike(1, 2, "addmv input tensors must have the same dtype, but got {} and {}"),
        _alike(0, 1, "addmv input tensors must have the same dtype, but got {} and {}"),
    ),
    "convolution": _both(_convolved, refusals.transposed_convolution),
    "_grouped_mm": _alike(0, 1, "Expected mat_a and mat_b to have the same dtype, got {} and {}"),
    "_weight_norm_interface": _alike(0, 1, _EXPECTED),
    "native_layer_norm": _both(refusals.layer_norm, _normalized(2)),
    "native_group_norm": _normalized(1),
    "native_batch_norm": _both(refusals.batch_norm, _batch_norm),
    "native_batch_norm_backward": _batch_norm_backward,
    "cudnn_batch_norm": _both(refusals.batch_norm, _batch_norm),
    "_native_batch_norm_legit": _both(refusals.batch_norm, _batch_norm),
    "multinomial": refusals.draws,
    "_native_batch_norm_legit.no_stats": _batch_norm,
    "index_put": _index_put,
    "index_put_": _index_put,
    "_index_put_impl_": _index_put,
    "index_add": _alike(0, 3, _SOURCE.format("index_add_")),
    "index_add_": _alike(0, 3, _SOURCE.format("index_add_")),
    "index_copy": _alike(0, 3, _SOURCE.format("index_copy_")),
    "index_copy_": _alike(0, 3, _SOURCE.format("index_copy_")),
    "grid_sampler_2d": _alike(0, 1, _EXPECTED),
    "grid_sampler_3d": _alike(0, 1, _EXPECTED),
    "nll_loss_forward": _alike(0, 2, _EXPECTED),
    "nll_loss2d_forward": _alike(0, 2, _EXPECTED),
    "binary_cross_entropy": _alike(0, 1, "Found dtype {1} but expected {0}"),
    "binary_cross_entropy_backward": _LOSS,
    "huber_loss_backward": _LOSS,
    "_ctc_loss": _no_halves(0, "ctc_loss"),
    "_ctc_loss.Tensor": _no_halves(0, "ctc_loss"),
    "_cdist_forward": _distances,
    "_pdist_forward": _no_halves(0, "pdist"),
    "linalg_cholesky_ex": _no_halves(0, "cholesky"),
    "linalg_lu_factor_ex": _no_halves(0, "lu_factor"),
    "_linalg_det": _no_halves(0, "lu_factor"),
    "_linalg_slogdet": _no_halves(0, "lu_factor"),
    "_linalg_solve_ex": _no_halves(0, "lu_factor"),
    "linalg_solve_triangular": _no_halves(0, "triangular_solve"),
    "_linalg_svd": _no_halves(0, "linalg_svd"),
    "_linalg_eigh": _no_halves(0, "linalg_eigh"),
    "linalg_qr": _no_halves(0, "geqrf"),
    "_fft_r2c": _transformed,
    "_fft_c2c": _transformed,
    "_fft_c2r": _transformed,
    "complex": _complex,
    "_cudnn_rnn": _recurrent,
}


def check_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    """Raise RuntimeError if attention's dtypes do not match (validate_sdpa_input).

    Query, key and value must have one dtype. A mask is boolean, of that dtype, or float32.
    """
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(
            f"Expected query, key, and value to have the same dtype, but got query.dtype: {name(query.dtype)} "
            f"key.dtype: {name(key.dtype)} and value.dtype: {name(value.dtype)} instead."
        )
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(
            "Expected attn_mask dtype to be bool or float or to match query dtype, "
            f"but got attn_mask.dtype: {name(mask.dtype)} and query.dtype: {name(query.dtype)} instead."
        )


def check_bias(query: Tensor, bias: Tensor | None) -> None:
    """Raise RuntimeError if bias and query differ in dtype (_efficient_attention_forward)."""
    if bias is not None and bias.dtype != query.dtype:
        raise RuntimeError("invalid dtype for bias - should match query's dtype")


CHECKS: dict[Any, Check] = {operator(text): check for text, check in _BY_NAME.items()}

"""Autocast on meta tensors, at the same point of the dispatch as in PyTorch.

`torch.autocast` works on the dispatch key above autograd, by operator lists, and refuses tensors of other devices. Here the
same lists (aten/src/ATen/autocast_mode.h, PyTorch 2.6 and 2.11 to 2.15) are registered on a key of an unused device
(AutocastIPU). So casts happen for calls from Python and from composite C++ operators, autograd records them, and the cache of
cast weights has the same lifetime: until the outermost context ends.

Autocast's operator lists are those of aten/src/ATen/autocast_mode.h and autocast_mode.cpp of PyTorch 2.6 and 2.11 to 2.15. A
name that is missing in the installed PyTorch's own list is not registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from sizer.base.versions import Version, rules_version
from sizer.tracing.values.libraries import entered_once_imported


def names(text: str) -> tuple[str, ...]:
    """Return the words of a text."""
    return tuple(text.split())


# torchvision's operators that run in float32 and return the dtype of their first argument (torchvision/csrc/ops/autocast, 0.26).
TORCHVISION = names("nms roi_align roi_pool ps_roi_align ps_roi_pool deform_conv2d")

# CUDA: run in the autocast dtype.
LOWER_PRECISION = names("""
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul
    einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
    _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
    scaled_dot_product_attention _cudnn_rnn
""")
_WITH_BIASES = 4  # weights of a recurrent layer and direction; 2 without biases
# CUDA: refused.
BANNED = names("binary_cross_entropy")
# CUDA: run in float32.
FLOAT32 = names("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
    nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
    dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
    _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
    linalg_matrix_sqrth
""")
# Up to 2.11, which registers neither operator; 2.15 does, and 2.12 to 2.14 are assumed to do so.
FLOAT32_TO_2_11 = tuple(name for name in FLOAT32 if name not in ("rms_norm", "linalg_matrix_sqrth"))
# CUDA: float32 as the output dtype unless one is given.
FLOAT32_SET_DTYPE = names("""
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
""")
# CUDA: run in the widest dtype of the arguments.
PROMOTE = names("""
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
""")
# CPU.
CPU_LOWER_PRECISION = names("""
    conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding bmm mm linalg_vecdot baddbmm addmm addbmm
    _addmm_activation linear _convolution.deprecated matmul conv_tbc mkldnn_rnn_layer conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input prelu scaled_dot_product_attention _native_multi_head_attention
""")
CPU_FLOAT32 = names("""
    avg_pool3d binary_cross_entropy grid_sampler polar prod prod.dim_int quantile quantile.scalar nanquantile
    nanquantile.scalar stft stft.center cdist grid_sampler_2d _grid_sampler_2d_cpu_fallback grid_sampler_3d trace
    view_as_complex cholesky cholesky_inverse cholesky_solve inverse lu_solve orgqr ormqr pinverse max_pool3d
    max_unpool2d max_unpool3d adaptive_avg_pool3d reflection_pad1d reflection_pad2d replication_pad1d
    replication_pad2d replication_pad3d mse_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
    poisson_nll_loss smooth_l1_loss cross_entropy_loss l1_loss huber_loss margin_ranking_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss ctc_loss.IntList ctc_loss.Tensor kl_div multilabel_margin_loss
    binary_cross_entropy_with_logits fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_rfft fft_irfft
    fft_rfft2 fft_irfft2 fft_rfftn fft_irfftn fft_hfft fft_ihfft linalg_cond linalg_matrix_rank linalg_solve
    linalg_cholesky linalg_svdvals linalg_eigvals linalg_eigvalsh linalg_inv linalg_householder_product
    linalg_tensorinv linalg_tensorsolve fake_quantize_per_tensor_affine geqrf _lu_with_info qr svd triangular_solve
    fractional_max_pool2d fractional_max_pool3d adaptive_max_pool3d multilabel_margin_loss_forward linalg_qr
    linalg_cholesky_ex linalg_svd linalg_eig linalg_eigh linalg_lstsq linalg_inv_ex
    linalg_cond.p_str linalg_matrix_rank.tol_tensor linalg_matrix_rank.atol_rtol_tensor
    linalg_matrix_rank.atol_rtol_float linalg_matrix_sqrth
""")
CPU_PROMOTE = names("""
    stack cat index_copy
""")
# MPS: run in the autocast dtype.
MPS_LOWER_PRECISION = names("""
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input convolution
    _mps_convolution prelu addmm addmv addr matmul einsum mm mv linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
    lstm_cell scaled_dot_product_attention
""")
# MPS: run in float32, including sums and softmax, whatever output dtype is requested.
MPS_FLOAT32 = names("""
    conv_transpose3d.input acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
    pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm group_norm
    frobenius_norm.dim nuclear_norm nuclear_norm.dim batch_norm cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
    margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
    binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp prod prod.dim_int softmax.int log_softmax.int
    cumprod cumsum linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
""")
# MPS: run in the widest dtype of the arguments.
MPS_PROMOTE = names("""
    addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put tensordot scatter_add
""")


# ------------------------------------------------------------------------------------------------------------ autocast


_KEY = "AutocastIPU"
_DEVICE = "ipu"
_aten = torch.ops.aten


class Autocast:
    """Autocast state of a traced device: (enabled, dtype), its nesting and its cache of cast weights."""

    def __init__(self, kind: str, version: Version, *, compiles: bool = False) -> None:
        """Start outside autocast.

        With `compiles`, PyTorch's own state of autocast on CUDA is kept equal, as Dynamo saves and restores it.
        """
        self.device_types = {kind, "meta"}
        self.enabled = False
        self.dtype = torch.bfloat16 if kind == "cpu" else torch.float16
        self._nesting = 0
        self._cache: dict[int, tuple[Tensor, Tensor]] = {}
        self._kind, self._compiles = kind, compiles
        self._caches_in_inference = rules_version(version) < (2, 11)
        self._float32_of_cuda = FLOAT32 if rules_version(version) > (2, 11) else FLOAT32_TO_2_11
        self._excluded = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastIPU)

    def cast(self, dtype: torch.dtype, value: Any) -> Any:
        """Return a float tensor in `dtype`, from the cache if it is a float32 leaf with gradient.

        From 2.11 on inference mode keeps no casts, and a kept cast requires gradients in `no_grad`, too, so that a later
        forward pass can use it (pull request 165068). Source: cached_cast of autocast_mode.cpp.
        """
        if isinstance(value, (list, tuple)):
            return [self.cast(dtype, v) for v in value]
        if not _eligible(value) or value.dtype == dtype:
            return value
        cacheable = dtype == self.dtype and value.dtype == torch.float32 and value.requires_grad and value.is_leaf
        if torch.is_inference_mode_enabled() and not self._caches_in_inference:
            return value.to(dtype)
        if not cacheable or value._is_view() or not torch.is_autocast_cache_enabled():
            return value.to(dtype)
        entry = self._cache.get(id(value))
        if entry is None:
            with torch.set_grad_enabled(torch.is_grad_enabled() or not self._caches_in_inference):
                entry = self._cache[id(value)] = (value, value.to(dtype))
        return entry[1]

    def enter(self, enabled: bool, dtype: torch.dtype) -> tuple[bool, torch.dtype]:
        """Set the state, one nesting deeper; return the state to restore by `leave`."""
        before = (self.enabled, self.dtype)
        self._nesting += 1
        self._set(enabled, dtype)
        return before

    def leave(self, before: tuple[bool, torch.dtype]) -> None:
        """Restore the state; the outermost exit drops the cache."""
        self._nesting -= 1
        if self._nesting == 0:
            self._cache.clear()
        self._set(*before)

    def clear_cache(self) -> None:
        """Drop the cast weights, as torch.clear_autocast_cache() does at any time."""
        self._cache.clear()

    def _set(self, enabled: bool, dtype: torch.dtype) -> None:
        self.enabled, self.dtype = enabled, dtype
        torch.set_autocast_enabled(_DEVICE, enabled)
        if self._compiles:
            torch._C.set_autocast_enabled(self._kind, enabled)
            torch._C.set_autocast_dtype(self._kind, dtype)
        torch._C._dispatch_tls_set_dispatch_key_included(torch._C.DispatchKey.AutocastIPU, enabled)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Make `torch.autocast` for this device (and for "meta") act on meta tensors within the context."""
        with ExitStack() as stack:
            library = torch.library.Library("aten", "IMPL")
            stack.callback(library._destroy)
            self._register(library)
            stack.enter_context(entered_once_imported({"torchvision": self._torchvision_registered}))
            for owner, name, replacement in self._replacements():
                stack.enter_context(mock.patch.object(owner, name, replacement))
            try:
                yield
            finally:
                self._cache.clear()
                self._set(False, self.dtype)

    def _register(self, library: torch.library.Library) -> None:
        float32 = self._float32_of_cuda
        tables = {
            "cuda": (LOWER_PRECISION, float32, FLOAT32_SET_DTYPE, PROMOTE, BANNED),
            "mps": (MPS_LOWER_PRECISION, MPS_FLOAT32, (), MPS_PROMOTE, ()),
            "cpu": (CPU_LOWER_PRECISION, CPU_FLOAT32, (), CPU_PROMOTE, ()),
        }[self._kind]
        policies: tuple[Callable[..., Callable[..., Any]], ...] = (
            self._lower_precision, self._float32, self._float32_set_dtype, self._promote, self._banned,
        )  # fmt: skip
        _fall_through_elsewhere()
        for names, policy in zip(tables, policies, strict=True):
            for name in names:
                operator = _operator(name, key=f"Autocast{self._kind.upper()}")
                if operator is not None:
                    flattens = name == "_cudnn_rnn" and self._kind == "cuda"
                    kernel = self._flattened(operator) if flattens else policy(operator)
                    library.impl(name, self._outside_autocast(kernel), _KEY)

    @contextmanager
    def _torchvision_registered(self) -> Iterator[None]:
        """Run torchvision's operators in float32 within the context, with results cast back.

        Source: torchvision/csrc/ops/autocast.
        """
        there = torch.ops.torchvision
        key = f"Autocast{self._kind.upper()}"
        names = [
            name for name in TORCHVISION if hasattr(there, name) and _has_kernel(f"torchvision::{name}", key)
        ]
        library = torch.library.Library("torchvision", "IMPL")
        try:
            for name in names:
                operator = getattr(there, name).default
                library.impl(name, self._outside_autocast(self._float32_and_back(operator)), _KEY)
            yield
        finally:
            library._destroy()

    def _float32_and_back(self, operator: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            out = _call(operator, args, kwargs, lambda value: self.cast(torch.float32, value))

            def back(value: Any) -> Any:
                return value.to(args[0].dtype) if _eligible(value) else value

            return tuple(map(back, out)) if isinstance(out, (list, tuple)) else back(out)

        return kernel

    def _outside_autocast(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(self._excluded):
                return kernel(*args, **kwargs)

        return guarded

    def _lower_precision(self, operator: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: _call(operator, args, kwargs, lambda value: self.cast(self.dtype, value))

    def _flattened(self, operator: Any) -> Callable[..., Any]:
        """Return `_cudnn_rnn_cast_reflatten`, which casts all weights into one buffer.

        The dtype is float16, whatever the dtype of autocast is. Source: aten/src/ATen/cudnn/AutocastRNN.cpp (2.15).
        """

        def kernel(input: Tensor, weights: list[Tensor], stride: int, flat: Tensor, *rest: Any) -> Any:
            if _eligible(weights[0]) and weights[0].dtype != torch.half:
                beside = 0 if stride == _WITH_BIASES else sum(2 * weight.shape[0] for weight in weights[::stride])
                sizes = [weight.numel() for weight in weights]
                parts = weights[0].detach().new_empty(sum(sizes) + beside, dtype=torch.half).split([*sizes, beside])
                weights = [part.view(one.shape).detach().copy_(one) for part, one in zip(parts, weights, strict=False)]
            return _call(operator, (input, weights, stride, flat, *rest), {}, lambda value: self.cast(torch.half, value))

        return kernel

    def _float32(self, operator: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: _call(operator, args, kwargs, lambda value: self.cast(torch.float32, value))

    def _float32_set_dtype(self, operator: Any) -> Callable[..., Any]:
        position = next(i for i, a in enumerate(operator._schema.arguments) if a.name == "dtype")

        def kernel(*args: Any, **kwargs: Any) -> Any:
            given = kwargs.get("dtype") is not None or (len(args) > position and args[position] is not None)
            if _eligible(args[0]) and not given:
                if len(args) > position:
                    args = (*args[:position], torch.float32, *args[position + 1 :])
                else:
                    kwargs = {**kwargs, "dtype": torch.float32}
            return operator(*args, **kwargs)

        return kernel

    def _promote(self, operator: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            wide = any(t.dtype == torch.float32 for t in _float_tensors((args, tuple(kwargs.values()))))
            dtype = torch.float32 if wide else self.dtype
            return _call(operator, args, kwargs, lambda value: self.cast(dtype, value))

        return kernel

    def _banned(self, operator: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(
                "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast: CUDA refuses them; use "
                "binary_cross_entropy_with_logits or BCEWithLogitsLoss"
            )

        return kernel

    def _replacements(self) -> list[tuple[Any, str, Any]]:
        """Return the replacements of the context manager and of the functions that query autocast."""
        state, original = self, torch.amp.autocast_mode.autocast
        is_enabled, get_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
        is_available = torch.amp.is_autocast_available
        start, enter, leave = original.__init__, original.__enter__, original.__exit__

        def new_start(self, device_type, dtype=None, enabled=True, cache_enabled=None):
            if device_type not in state.device_types:
                return start(self, device_type, dtype, enabled, cache_enabled)
            self.device, self.fast_dtype, self._enabled = device_type, dtype or state.dtype, enabled
            self._cache_enabled = torch.is_autocast_cache_enabled() if cache_enabled is None else cache_enabled
            return None

        def new_enter(self):
            if self.device not in state.device_types:
                return enter(self)
            self.prev_cache_enabled = torch.is_autocast_cache_enabled()
            self._before = state.enter(self._enabled, self.fast_dtype)
            torch.set_autocast_cache_enabled(self._cache_enabled)
            return self

        def new_leave(self, *exc):
            if self.device not in state.device_types:
                return leave(self, *exc)
            state.leave(self._before)
            torch.set_autocast_cache_enabled(self.prev_cache_enabled)
            return False

        clear = torch.clear_autocast_cache

        def new_clear() -> None:
            clear()
            state.clear_cache()

        def mine(device: str) -> bool:
            return device in state.device_types

        unavailable = torch.cuda.amp.common.amp_definitely_not_available
        return [
            # a GradScaler("cuda") is enabled if CUDA's rules hold
            (torch.cuda.amp.common, "amp_definitely_not_available", lambda: self._kind != "cuda" and unavailable()),
            (original, "__init__", new_start),
            (original, "__enter__", new_enter),
            (original, "__exit__", new_leave),
            (torch, "clear_autocast_cache", new_clear),
            # without a device it returns CUDA's state (torch/csrc/autograd/init.cpp)
            (torch, "is_autocast_enabled", lambda d="cuda": state.enabled if mine(d) else is_enabled(d)),
            (torch, "get_autocast_dtype", lambda d: state.dtype if mine(d) else get_dtype(d)),
            (torch.amp, "is_autocast_available", lambda d: mine(d) or is_available(d)),
            (torch.amp.autocast_mode, "is_autocast_available", lambda d: mine(d) or is_available(d)),
        ]


def _call(operator: Any, args: tuple, kwargs: dict, cast: Callable[[Any], Any]) -> Any:
    """Return the operator's result for cast arguments; the last argument is cast first.

    The C++ of PyTorch's Linux builds evaluates casts in this order, and autograd runs their gradients in the opposite order.
    """
    keywords = {name: cast(value) for name, value in reversed(kwargs.items())}
    positional = [cast(value) for value in reversed(args)]
    return operator(*reversed(positional), **keywords)


def _eligible(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.device.type == "meta"
        and value.dtype.is_floating_point
        and value.dtype != torch.float64
    )


def _float_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _float_tensors(v)]
    return [value] if _eligible(value) else []


def _operator(name: str, key: str) -> Any:
    """Return the operator, or None if it is missing in the installed PyTorch's own list."""
    packet, _, overload = name.partition(".")
    qualified = f"aten::{packet}" + (f".{overload}" if overload else "")
    if not hasattr(_aten, packet) or not _has_kernel(qualified, key):
        return None
    return getattr(getattr(_aten, packet), overload or "default")


def _has_kernel(qualified: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(qualified, key)


_fallbacks: list[torch.library.Library] = []


def _fall_through_elsewhere() -> None:
    """Make operators without an autocast rule skip the key: once a process, as PyTorch does for its own keys."""
    if not _fallbacks and not torch._C._dispatch_has_backend_fallback(torch._C.DispatchKey.AutocastIPU):
        library = torch.library.Library("_", "IMPL")
        library.fallback(torch.library.fallthrough_kernel, _KEY)
        _fallbacks.append(library)

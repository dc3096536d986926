"""What kernels of the CPU allocate inside, in the order in which they do: copies in other layouts, columns, partial results.

Each function returns steps: a list of sizes is held together and released, a tensor is one of the operator's results, which
exists from there on. Its docstring names the C++ file, as of PyTorch 2.11 to 2.15. What goes through PyTorch's allocator is
counted; libraries that allocate for themselves (MKL's buffers) are not, nor does the profiler see them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor

from sizer.tracing.cpu import onednn
from sizer.tracing.cpu.onednn import Convolution, Layout
from sizer.tracing.meta.strides import memory_format

_LIBRARY_AT = 16  # ConvParams::use_mkldnn

Steps = Iterable[list[int] | Tensor]
_aten = torch.ops.aten


@functools.cache
def floats_per_register() -> int:
    """16 with AVX-512, 8 with AVX2 or less: this computer's, since "the CPU" is the one that Sizer runs on."""
    return 8 if torch.backends.cpu.get_cpu_capability() in ("AVX2", "DEFAULT") else 16


@functools.cache
def _library_takes(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes convolutions in this half precision here (mkldnn_bf16_device_check, mkldnn_fp16_device_check)."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float16 and torch.ops.mkldnn._is_mkldnn_fp16_supported()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


class _Question:
    """A call of aten.convolution as ConvParams has it, one dimension seen as two (view1d_as_2d)."""

    def __init__(self, input: Tensor, weight: Tensor, options: tuple, result: tuple[int, ...], bias: bool) -> None:
        stride, padding, dilation, self.transposed, output_padding, self.groups = options
        self.input, self.weight, self.bias = input, weight, bias
        dimensions = input.dim() - 2
        stride, padding, dilation, output_padding = (
            tuple(v) * (dimensions if len(v) == 1 else 1) for v in (stride, padding, dilation, output_padding)
        )
        sizes = tuple(input.shape[2:]), tuple(weight.shape[2:]), tuple(result[2:])
        self.image, self.kernel, self.result = ((1, *s) if dimensions == 1 else s for s in sizes)
        one, zero = ((1,), (0,)) if dimensions == 1 else ((), ())
        self.stride, self.padding, self.dilation = (*one, *stride), (*zero, *padding), (*one, *dilation)
        self.big_output_padding = any(o >= s for o, s in zip(output_padding, stride, strict=True))

    @property
    def plain(self) -> bool:
        """A kernel of one pixel, neither strided nor padded: its columns are the image itself."""
        return prod(self.kernel) == 1 and prod(self.stride) == 1 and not any(self.padding)

    def uses_library(self) -> bool:
        """ConvParams::use_mkldnn (aten/src/ATen/native/Convolution.cpp)."""
        if not torch.backends.mkldnn.is_available() or not torch._C._get_mkldnn_enabled():
            return False
        if self.transposed and self.big_output_padding:
            return False
        if self.input.dtype != torch.float32:
            return _library_takes(self.input.dtype)
        batch = self.input.shape[0]
        height, width = self.kernel[-2:]
        if self.library_waits_for_batch() and batch < _LIBRARY_AT:
            return False
        pixels = prod((*self.input.shape[:2], *self.image)[:4])
        return self.groups > 1 or (height > 3 and width > 3) or batch > 1 or pixels > 20480

    def library_waits_for_batch(self) -> bool:
        """Whether oneDNN takes it only for a large batch: a kernel of one pixel on a single thread."""
        several = prod(self.stride) > 1 or prod(self.dilation) > 1 or self.kernel[-2:] != (1, 1)
        return self.input.dtype == torch.float32 and not several and torch.get_num_threads() == 1

    def channels_last(self) -> bool:
        """mkldnn_conv_use_channels_last (aten/src/ATen/native/ConvUtils.h)."""
        return self.input.dim() > 3 and memory_format(self.input, self.weight) != torch.contiguous_format

    def convolution(self) -> Convolution:
        """The same for oneDNN; a transposed one is the convolution whose gradient it computes."""
        outputs, inputs = self.weight.shape[:2]
        image, result = (self.result, self.image) if self.transposed else (self.image, self.result)
        return Convolution(
            batch=self.input.shape[0],
            groups=self.groups,
            inputs=inputs,
            outputs=outputs // self.groups,
            image=image,
            result=result,
            kernel=self.kernel,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            itemsize=self.input.itemsize,
            simd=floats_per_register(),
            threads=torch.get_num_threads(),
            bias=self.bias,
        )


def _contiguous(tensor: Tensor, last: bool) -> int:
    """The bytes of `tensor.contiguous(format)`: a copy where it is not in that format yet."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = formats.get(tensor.dim(), torch.contiguous_format) if last else torch.contiguous_format
    return 0 if tensor.is_contiguous(memory_format=wanted) else _bytes(tensor)


def convolution(device: Any, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """aten.convolution (mkldnn/Conv.cpp, ConvolutionMM2d.cpp, ConvolutionMM3d.cpp, NaiveDilatedConvolution.cpp)."""
    input, weight, bias, *options = args
    question = _Question(input, weight, tuple(options), tuple(out.shape), bias is not None)
    if out.numel() == 0:
        return [out]
    if not question.uses_library():
        if question.library_waits_for_batch():
            device.changes_at = _LIBRARY_AT
        return _slow_forward(question, out)
    c, last = question.convolution(), question.channels_last()
    copies = [_contiguous(input, last), _contiguous(weight, last)]
    if last:
        layout = onednn.backward_data_last(c) if question.transposed else onednn.forward_last(c)
        return [out, [*copies, layout.scratch, layout.weight]]
    if question.transposed:
        return _copied(onednn.backward_data(c), copies, out, "source")
    return _copied(onednn.forward(c), copies, out, "result")


def _copied(layout: Layout, copies: list[int], out: Tensor, side: str) -> Steps:
    """What is computed in oneDNN's layout, then the tensor that it is copied to (mkldnn_to_dense)."""
    computed = getattr(layout, side)
    again = [_bytes(out)] if layout.is_last and out.shape[1] > 1 else []
    before = [*copies, layout.scratch, layout.source, layout.weight, layout.result]
    return [before, out, [*copies, computed, *again]]


def convolution_backward(device: Any, args: tuple, kwargs: dict, out: tuple) -> Steps:
    """aten.convolution_backward: the input's gradient, then those of weight and bias, each with its own copies."""
    grad, input, weight, _, *options, wanted = args
    gradients = [t for t in out if t is not None]
    question = _Question(input, weight, tuple(options), tuple(grad.shape), wanted[2])
    if grad.numel() == 0:
        return gradients
    if not question.uses_library():
        return _slow_backward(question, _contiguous(grad, False), out)
    c, last = question.convolution(), question.channels_last()
    copies = [_contiguous(t, last) for t in (grad, input, weight)]
    steps: list[list[int] | Tensor] = []
    if wanted[0]:
        steps += _data_steps(question, c, last, copies, out[0])
    if wanted[1] or wanted[2]:
        steps += _weight_steps(c, last, copies, out)
    return steps


def _data_steps(question: _Question, c: Convolution, last: bool, copies: list[int], out: Tensor) -> Steps:
    if last:
        layout = onednn.forward_last(c) if question.transposed else onednn.backward_data_last(c)
        return [out, [*copies, layout.weight, layout.scratch]]
    if question.transposed:
        return _copied(onednn.forward(c), copies, out, "result")
    return _copied(onednn.backward_data(c), copies, out, "source")


def _weight_steps(c: Convolution, last: bool, copies: list[int], out: tuple) -> Steps:
    layout = onednn.backward_weights_last(c) if last else onednn.backward_weights(c)
    bias = [out[2]] if out[2] is not None else []
    sums = _bytes(out[2]) if bias else 0
    computing = [*copies, layout.source, layout.weight, layout.result, layout.scratch, sums]
    if out[1] is None:
        return [computing, *bias]
    return [
        computing,
        *bias,
        [layout.weight, sums],
        out[1],
        [*copies, layout.weight, sums, _bytes(out[1]) if last else 0],
    ]


def _columns(question: _Question, images: int) -> int:
    """[images, channels * kernel, pixels]: of the input, or of the smaller side where it is transposed."""
    channels = question.weight.shape[1]
    pixels = question.image if question.transposed else question.result
    return images * channels * prod(question.kernel) * prod(pixels) * question.input.itemsize


def _slow_columns(question: _Question) -> int:
    """Without holes the columns of the whole batch, with holes or transposed those of one image."""
    if question.transposed or prod(question.dilation) > 1:
        return _columns(question, 1)
    return 0 if question.plain else _columns(question, question.input.shape[0])


def _slow_forward(question: _Question, out: Tensor) -> Steps:
    copies = [_contiguous(question.input, False)]
    columns = _slow_columns(question)
    groups = [_bytes(out)] if question.groups > 1 else []  # one after the other, then put together
    if question.transposed or prod(question.dilation) > 1:
        return [out, [*copies, columns, *groups]]
    return [[*copies, columns], out, [*copies, columns, *groups]]


def _slow_backward(question: _Question, copy: int, out: tuple) -> Steps:
    columns = _slow_columns(question)
    grad_input, grad_weight, grad_bias = out
    steps: list[list[int] | Tensor] = []
    if grad_input is not None:
        steps += [grad_input, [copy, columns]]
    steps += [t for t in (grad_bias, grad_weight) if t is not None]
    return [*steps, [copy, columns]] if grad_weight is not None else steps


def safe_softmax(device: Any, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """_safe_softmax (native/SoftMax.cpp): the softmax [.., N], then where the input is minus infinity [.., N] and which rows are
    so altogether [.., 1], in one byte an element; such rows are overwritten in place."""
    rows = out.numel() // max(1, out.shape[args[1]])
    return [out, [args[0].numel(), rows, out.itemsize]]


def _split(queries: int, keys: int) -> tuple[int, int]:
    """Rows and columns of the block of weights that a thread has in hand (cpu/FlashAttentionKernel.cpp)."""
    rows = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return min(rows, queries), min(512, keys)


def flash_attention(device: Any, args: tuple, kwargs: dict, out: tuple) -> Steps:
    """_scaled_dot_product_flash_attention_for_cpu (cpu/FlashAttentionKernel.cpp, cpu_flash_attention): per thread, in the
    accumulation dtype, a block of weights, its rows' maxima and sums, and the output; in half precision the weights again."""
    query, key = args[0], args[1]
    rows, columns = _split(query.shape[2], key.shape[2])
    threads, wide = torch.get_num_threads(), max(4, query.itemsize)
    buffer = threads * (rows * columns + 2 * rows + rows * query.shape[3]) * wide
    return [*out, [buffer, threads * rows * columns * query.itemsize if query.itemsize < 4 else 0]]


def flash_attention_backward(device: Any, args: tuple, kwargs: dict, out: tuple) -> Steps:
    """.._flash_attention_for_cpu_backward (cpu_flash_attention_backward): per thread two blocks of weights, in half precision in
    both precisions, and a sum for every row; oneDNN's matrix products in half precision work in buffers of their own."""
    grad, query, key = args[0], args[1], args[2]
    rows, columns = _split(query.shape[2], key.shape[2])
    threads, wide, half = torch.get_num_threads(), max(4, query.itemsize), query.itemsize < 4
    sizes = [threads * 2 * rows * columns * wide, threads * rows * wide]
    if half:
        sizes += [threads * 2 * rows * columns * query.itemsize]
        products = (
            _half_product(columns, rows, query.shape[3], True),
            _half_product(rows, columns, query.shape[3], False),
        )
        sizes += [max(products) if _library_takes(query.dtype) else 0]
    copy = 0 if grad.transpose(1, 2).is_contiguous() else _bytes(grad)
    return [[copy], *out, [copy, *sizes]]


def _half_product(rows: int, inner: int, columns: int, exchanged: bool) -> int:
    """Bytes of a thread's buffers in oneDNN's matrix product [rows, inner] by [inner, columns] of half precision
    (src/cpu/x64/matmul/brgemm_matmul_utils.cpp): addresses, a block of the second operand, sums in float32, and a block of the
    first operand where it is stored the other way round. The blocks are usual ones, the exact ones go by the caches. Products of
    up to 16 by 16 by 16 are not oneDNN's (mkldnn/Matmul.cpp, mkldnn_gemm_min_size)."""
    if rows * inner * columns <= 16**3:
        return 0
    rows, width = -(-rows // -(-rows // 256)), min(columns, 64)
    depth = -(-min(inner, 512) // 32) * 32
    return 1024 + rows * width * 4 + depth * 128 + (rows * depth * 2 + 128 if exchanged else 0)


def half_product(device: Any, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """mm, bmm, addmm and baddbmm in half precision (mkldnn/Matmul.cpp, use_mkldnn_matmul), where oneDNN computes them."""
    first, second = [a for a in args if isinstance(a, Tensor)][-2:]
    rows, inner, columns = first.shape[-2], first.shape[-1], second.shape[-1]
    if out.itemsize != 2 or not _library_takes(out.dtype):
        return [out]
    exchanged = first.stride(-1) != 1
    return [out, [torch.get_num_threads() * _half_product(rows, inner, columns, exchanged)]]


Inner = Callable[[Any, tuple, dict, Any], Steps]


def _results(out: Any) -> list[Tensor]:
    return [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, Tensor)]


def copying(*positions: int, last: bool = False) -> Inner:
    """Kernels that begin with `.contiguous()` of the arguments at these positions, with `last` in the format of the first of
    them: softmax (cpu/SoftMaxKernel.cpp), group norm, pooling, padding, index_select and their gradients."""

    def inner(device: Any, args: tuple, kwargs: dict, out: Any) -> Steps:
        tensors = [args[i] for i in positions]
        wanted = memory_format(tensors[0]) if last else torch.contiguous_format
        return [*_results(out), [0 if t.is_contiguous(memory_format=wanted) else _bytes(t) for t in tensors]]

    return inner


def batch_norm_backward(device: Any, args: tuple, kwargs: dict, out: tuple) -> Steps:
    """native_batch_norm_backward (Normalization.cpp, batch_norm_backward_cpu): a second tensor for the input's gradient where
    gradient and input are contiguous or both have their channels last."""
    grad, input = args[0], args[1]
    wanted = memory_format(input)
    contiguous = all(t.is_contiguous(memory_format=wanted) for t in (grad, input))
    return [*_results(out), [_bytes(input) if contiguous else 0]]


def upsample(device: Any, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """upsample_nearest2d and upsample_bilinear2d (cpu/UpSampleKernel.cpp, _use_vectorized_kernel_cond_2d): small images and
    those with channels last are computed with channels last, from a copy and into one where the tensors are not."""
    input = args[0]
    last = input.is_contiguous(memory_format=torch.channels_last) and input.shape[1] > 3
    if not last and out.shape[-2] + out.shape[-1] > 128:
        return [out]
    return [out, [0 if t.is_contiguous(memory_format=torch.channels_last) else _bytes(t) for t in (input, out)]]


def logsumexp(device: Any, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """logsumexp (ReduceOps.cpp, logsumexp_out_impl): the maxima, and the exponentials of the differences."""
    return [out, [_bytes(out), _bytes(args[0])]]


def integer_sum(device: Any, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """sum, cumsum and cumprod (ReduceOps.cpp) of booleans and integers: first the input in the output's dtype."""
    return [out, [args[0].numel() * out.itemsize if args[0].dtype != out.dtype and not out.is_floating_point() else 0]]


def half_mean(device: Any, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """mean (ReduceOps.cpp, mean_kernel_impl) of half precision: the input and the result in float32."""
    return [[4 * args[0].numel(), 4 * out.numel()] if out.itemsize == 2 else [], out]


def batch_norm(device: Any, args: tuple, kwargs: dict, out: tuple) -> Steps:
    """native_batch_norm (cpu/batch_norm_kernel.cpp): scale and shift of every channel in the accumulation dtype."""
    return [*_results(out), [args[0].shape[1] * 4] * 2]


def promoted(device: Any, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Pointwise operators of tensors of different dtypes (TensorIterator.cpp, compute_types): on the CPU each is first copied
    to the dtype of the computation; a GPU converts in registers."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    if len(tensors) < 2 or all(t.dtype == tensors[0].dtype for t in tensors):
        return [out]
    wide = functools.reduce(
        torch.promote_types, (t.dtype for t in tensors if t.dim() or len(tensors) == 1), tensors[0].dtype
    )
    copies = [t.numel() * wide.itemsize for t in tensors if t.dtype != wide and t.dtype != torch.bool and t.dim()]
    return [copies, out, copies]


_PROMOTED = """
    add.Tensor add_.Tensor sub.Tensor sub_.Tensor mul.Tensor mul_.Tensor div.Tensor div_.Tensor maximum.default minimum.default
    pow.Tensor_Tensor addcmul.default addcdiv.default addcmul_.default addcdiv_.default eq.Tensor ne.Tensor lt.Tensor le.Tensor
    gt.Tensor ge.Tensor
"""


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(_aten, packet), overload)


INNER: dict[Any, Inner] = {
    **{_overload(name): promoted for name in _PROMOTED.split()},
    _aten.convolution.default: convolution,
    _aten.convolution_backward.default: convolution_backward,
    _aten._safe_softmax.default: safe_softmax,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: flash_attention_backward,
    _aten.mm.default: half_product,
    _aten.bmm.default: half_product,
    _aten.addmm.default: half_product,
    _aten.baddbmm.default: half_product,
    _aten._softmax.default: copying(0),
    _aten._log_softmax.default: copying(0),
    _aten._softmax_backward_data.default: copying(0, 1),
    _aten._log_softmax_backward_data.default: copying(0, 1),
    _aten.native_group_norm.default: copying(0, last=True),
    _aten.native_group_norm_backward.default: copying(1, 0, last=True),
    _aten._native_batch_norm_legit.default: batch_norm,
    _aten._native_batch_norm_legit_no_training.default: batch_norm,
    _aten.native_batch_norm_backward.default: batch_norm_backward,
    _aten.max_pool2d_with_indices.default: copying(0, last=True),
    _aten.avg_pool2d.default: copying(0, last=True),
    _aten._adaptive_avg_pool2d.default: copying(0, last=True),
    _aten.adaptive_max_pool2d.default: copying(0, last=True),
    _aten.reflection_pad2d.default: copying(0, last=True),
    _aten.index_select.default: copying(0),
    _aten.upsample_bilinear2d.default: upsample,
    _aten.upsample_nearest2d.default: upsample,
    _aten.upsample_bilinear2d_backward.default: copying(0, last=True),
    _aten.upsample_nearest2d_backward.default: copying(0, last=True),
    _aten.logsumexp.default: logsumexp,
    _aten.cumsum.default: integer_sum,
    _aten.cumprod.default: integer_sum,
    _aten.sum.default: integer_sum,
    _aten.sum.dim_IntList: integer_sum,
    _aten.mean.default: half_mean,
    _aten.mean.dim: half_mean,
}

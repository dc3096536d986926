"""Convolutions of oneDNN on an x86 CPU: the layout and the buffers of each pass.

PyTorch passes plain tensors to oneDNN and lets it choose the layout (ideep, format_tag::any). So input, weight and output exist
a second time, with channels in blocks of 16 (AVX-512) or 8 (AVX2) and padded to whole blocks. All of it, including scratchpads,
comes from PyTorch's own CPU allocator (aten/src/ATen/native/mkldnn/IDeepRegistration.cpp), so the profiler sees it.

The implementation of each pass, in oneDNN's order, was read in src/cpu/cpu_convolution_list.cpp and the `init_conf` of
src/cpu/x64/jit_{uni_dw,avx512_common,avx2,brgemm}_conv*.cpp, oneDNN 3.10 to 3.13 (PyTorch 2.11 to 2.15).

*Known limitations*: block sizes and buffers that depend on the size of the caches have their usual value, with an error of a
few percent of one pass (a fifth of the columns of wide depthwise kernels on an EPYC without AVX-512); AMX and other
architectures are modelled as AVX-512.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from sizer.base.units import round_up

_ALIGNMENT = 128  # every scratchpad entry is aligned to it (src/common/memory_tracking.hpp)
_PAGE = 4096
# jit_brgemm_conv_bwd_utils.cpp: 16 bytes for each of the elements that fill a page, per thread.
_BRGEMM_BATCH = 4 * _PAGE
_BARRIER = 2 * _PAGE  # barrier of the threads, aligned (jit_avx512_core_bf16_conv_kernel.cpp, wei_bia_reduction_bctx)
_LARGEST_COLUMNS = 2**19  # gemm_convolution_utils.cpp: the forward pass's columns are blocked to fit into the L2 cache

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """Convolution over [batch, groups * inputs, *image] with weight [groups * outputs, inputs, *kernel].

    `simd` is the number of floats in a vector register, `threads` the number of threads. `emulated` means bfloat16 on a
    processor without instructions for its products.
    """

    batch: int
    groups: int
    inputs: int
    outputs: int
    image: Sizes
    result: Sizes
    kernel: Sizes
    stride: Sizes
    padding: Sizes
    dilation: Sizes
    itemsize: int = 4
    simd: int = 16
    threads: int = 1
    bias: bool = False
    emulated: bool = False

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.inputs == self.outputs == 1

    @property
    def is_unit(self) -> bool:
        """Return whether the kernel covers one pixel, unpadded."""
        return prod(self.kernel) == 1 and not any(self.padding)

    @property
    def strided(self) -> bool:
        return any(s != 1 for s in self.stride)

    @property
    def dilated(self) -> bool:
        return any(d != 1 for d in self.dilation)

    @property
    def extended(self) -> Sizes:
        """Return the kernel's extent including dilation."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation, strict=True))

    @property
    def end_padding(self) -> Sizes:
        """Return the padding beyond the image's end that the kernel reads (calculate_end_padding)."""
        shape = zip(self.result, self.stride, self.extended, self.image, self.padding, strict=True)
        return tuple((r - 1) * s + k - i - p for r, s, k, i, p in shape)

    @property
    def is_covered(self) -> bool:
        """Return whether the kernel always touches the image (kernel_outside_src)."""
        pads = zip(self.extended, self.padding, self.end_padding, strict=True)
        return all(k > before and k > after for k, before, after in pads)

    @property
    def source_bytes(self) -> int:
        return self.batch * self.groups * self.inputs * prod(self.image) * self.itemsize

    @property
    def weight_bytes(self) -> int:
        return self.groups * self.outputs * self.inputs * prod(self.kernel) * self.itemsize

    @property
    def result_bytes(self) -> int:
        return self.batch * self.groups * self.outputs * prod(self.result) * self.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Bytes of input, weight and output in a pass's layout, and of its scratchpad.

    0 means that a pass reads the tensor in place. With `is_last`, channels come last, so the result is copied once more to
    PyTorch's tensor.
    """

    source: int
    weight: int
    result: int
    scratch: int = 0
    is_last: bool = False


def _entry(size: int) -> int:
    """Return the bytes of one scratchpad entry."""
    return size + _ALIGNMENT if size else 0


def _blocked(c: Convolution, block: int, *, plain_source: bool = False, scratch: int = 0) -> Layout:
    """Return the layout with channels in padded blocks.

    With `plain_source` the few channels of a first convolution are not blocked.
    """
    inputs, outputs = round_up(c.groups * c.inputs, block), round_up(c.groups * c.outputs, block)
    if c.depthwise:
        weight = round_up(c.groups, block)
    elif c.groups > 1:
        weight = c.groups * c.inputs * c.outputs  # only whole blocks per group reach this line
    else:
        pair = 2 if c.itemsize == 2 else 1
        weight = outputs * (round_up(c.inputs, pair) if plain_source else inputs)
    return Layout(
        source=0 if plain_source else c.batch * inputs * prod(c.image) * c.itemsize,
        weight=weight * prod(c.kernel) * c.itemsize,
        result=c.batch * outputs * prod(c.result) * c.itemsize,
        scratch=scratch,
    )


def _block_of(c: Convolution) -> int | None:
    """Return the channels per block of the direct convolution.

    Channels are padded without groups; with groups it is the largest block that divides both sides.
    """
    if c.groups == 1:
        return c.simd
    blocks = (16, 8, 4) if c.simd == 16 else (8,)
    return next((b for b in blocks if c.inputs % b == 0 and c.outputs % b == 0), None)


def _unroll(c: Convolution) -> int:
    """Return the pixels of a row that the direct convolution computes at once, the largest padding that it supports."""
    return 28 if c.simd == 16 else 3


def _overflow(c: Convolution) -> int:
    """Return the pixels of a row by which the kernel extends beyond the padding."""
    return max(c.extended[-1] - 1 - c.padding[-1], c.extended[-1] - 1 - max(0, c.end_padding[-1]))


def _plain(c: Convolution, scratch: int) -> Layout:
    """Return the layout of gemm_convolution: unchanged tensors and columns."""
    return Layout(source=0, weight=0, result=c.result_bytes, scratch=scratch)


def _columns(c: Convolution) -> int:
    """Return the elements of one image's columns [inputs * kernel, pixels of a result's plane].

    0 for a kernel of one pixel.
    """
    if c.is_unit and not c.strided:
        return 0
    return c.inputs * prod(c.kernel) * prod(c.result[-2:])


def _unit_stride_copy(c: Convolution, blocks: int) -> int:
    """Return the bytes of the input's used pixels, `blocks` channel blocks of one image per thread.

    Source: reduce_to_unit_stride_t (jit_uni_1x1_conv_utils.hpp).
    """
    if not c.strided:
        return 0
    return _entry(c.threads * blocks * c.simd * prod(c.result) * c.itemsize)


def _is_unit_kernel(c: Convolution) -> bool:
    """Return whether the 1x1 implementation is used: unit strides, or strides that divide the image."""
    fits = all(r * s == i for r, s, i in zip(c.result, c.stride, c.image, strict=True))
    return c.is_unit and c.groups == 1 and (not c.strided or (fits and len(c.image) == 2))


def _padded_bias(c: Convolution) -> int:
    outputs = c.groups * c.outputs
    return _entry(round_up(outputs, c.simd) * 4) if c.bias and outputs % c.simd else 0


def forward(c: Convolution) -> Layout:
    """Return the layout of the forward pass."""
    if c.depthwise and c.is_covered:
        if len(c.image) == 2:
            return _blocked(c, c.simd, scratch=_padded_bias(c))
        weight = round_up(c.groups, c.simd) * prod(c.kernel) * c.itemsize
        return Layout(source=c.source_bytes, weight=weight, result=c.result_bytes, is_last=True)  # brdgmm_dw
    if _is_unit_kernel(c):
        blocks = -(-c.inputs // c.simd)
        sums = _entry(c.threads * round_up(c.outputs, c.simd) * prod(c.result) * 4) if c.itemsize == 2 else 0
        return _blocked(c, c.simd, scratch=_unit_stride_copy(c, blocks) + sums + _padded_bias(c))
    narrow = max(c.padding[-1], c.end_padding[-1]) <= min(c.result[-1], _unroll(c))
    if c.is_covered and narrow and (block := _block_of(c)) is not None:
        return _blocked(c, block, plain_source=c.groups == 1 and c.inputs < c.simd, scratch=_padded_bias(c))
    columns = min(_columns(c) * c.itemsize, _LARGEST_COLUMNS) * c.threads
    sums = min(c.outputs * prod(c.result) * 4, _LARGEST_COLUMNS) * c.threads if c.itemsize == 2 else 0
    return _plain(c, _entry(columns) + _entry(sums))


def backward_data(c: Convolution) -> Layout:
    """Return the layout of the input's gradient; `source` is the computed gradient, `result` the incoming gradient."""
    halves = c.itemsize == 2
    usable = not halves or (c.outputs % 4 == 0 and c.inputs % 4 == 0)
    small_groups = c.groups > 1 and c.outputs <= c.simd and usable
    if c.strided and not c.dilated and not small_groups:
        return _strided_backward(c)
    if c.depthwise and len(c.image) == 2 and not c.dilated:
        return _blocked(c, c.simd)
    if _is_unit_kernel(c) and not c.strided:
        sums = c.threads * round_up(c.inputs, c.simd) * prod(c.image) * 4 if halves else 0
        return _blocked(c, c.simd, scratch=_entry(sums))
    direct = c.is_covered and not c.depthwise and not (c.strided and c.dilated)
    if direct and _overflow(c) <= min(c.image[-1], _unroll(c)) and (block := _block_of(c)) is not None:
        return _blocked(c, block)
    threads = c.threads if c.batch > 1 or c.groups > 2 else 1
    sums = threads * c.inputs * prod(c.image) * 4 if halves else 0
    scratch = _entry(threads * _columns(c) * 4) + _entry(sums)
    return Layout(source=c.source_bytes, weight=0, result=0, scratch=scratch)


def _strided_backward(c: Convolution) -> Layout:
    """Return the layout of brgemm_convolution_bwd_strided: channels last, one padded image of the incoming gradient per thread."""
    pair = 2 if c.itemsize == 2 else 1
    weight = c.groups * round_up(c.outputs, pair) * round_up(c.inputs, c.simd) * prod(c.kernel) * c.itemsize
    shape = zip(c.result, c.extended, c.padding, c.end_padding, c.stride, strict=True)
    pixels = prod(r + max(0, k - 1 - p) // s + max(0, k - 1 - e) // s for r, k, p, e, s in shape)
    image = round_up(pixels * c.groups * c.outputs, _PAGE) * c.itemsize
    return Layout(
        source=c.source_bytes,
        weight=weight,
        result=c.result_bytes,
        scratch=c.threads * (image + _PAGE + _BRGEMM_BATCH),
        is_last=True,
    )


def backward_weights(c: Convolution) -> Layout:
    """Return the layout of the weight's gradient; `weight` is the computed gradient, summed in float32 for half precision."""
    sums = 4 * prod(c.kernel) if c.itemsize == 2 else 0
    if c.depthwise:
        if _depthwise_weights(c):
            return _blocked(c, c.simd, scratch=_entry(sums * round_up(c.groups, c.simd)))
    elif _is_unit_kernel(c):
        layout = _blocked(c, c.simd)
        scratch = _unit_stride_copy(c, min(-(-c.inputs // c.simd), 32)) + _padded_bias(c)
        if sums:
            scratch += _entry(2 * layout.weight) + _exchanged(c)
        return replace(layout, scratch=scratch)
    elif _direct_weights(c):
        layout = _blocked(c, 16 if c.simd == 16 else 8, plain_source=c.groups == 1 and c.inputs < c.simd)
        if c.emulated and c.groups == 1 and c.inputs < c.simd:  # inputs in no pairs, and the bias in float32 (PyTorch 2.15)
            layout = replace(layout, weight=round_up(c.outputs, c.simd) * c.inputs * prod(c.kernel) * c.itemsize)
            bias = _entry(round_up(c.outputs, c.simd) * 4) if c.bias else 0
            return replace(layout, scratch=_entry(2 * layout.weight) + _transposed(c) + bias)
        return replace(layout, scratch=(_entry(2 * layout.weight) + _transposed(c) if sums else 0) + _padded_bias(c))
    elif c.itemsize == 4 and _narrow_weights(c):
        return _blocked(c, 8, plain_source=c.groups == 1 and c.inputs == 3)
    return Layout(source=0, weight=c.weight_bytes, result=0, scratch=_gemm_weights(c))


def _depthwise_weights(c: Convolution) -> bool:
    """Return whether jit_uni_dw_conv_bwd_weights_kernel is used.

    It supports two dimensions and a narrow kernel without dilation, with padding up to half of the kernel.
    """
    if len(c.image) != 2 or c.dilated or c.kernel[1] > 3 or c.stride[1] > c.kernel[1]:
        return False
    halves = [k // 2 for k in c.kernel]
    ends = [max(0, e) for e in c.end_padding]
    top = c.kernel[0] + (-c.padding[0]) % c.stride[0]
    return (
        all(p <= h and e <= h for p, e, h in zip(c.padding, ends, halves, strict=True))
        and c.image[0] >= top
        and all(p <= 1 or p % c.stride[0] == 0 for p in (c.padding[0], ends[0]))
    )


def _direct_weights(c: Convolution) -> bool:
    """Return whether jit_avx512_{common,core_bf16}_conv_bwd_weights_kernel is used."""
    if c.simd != 16:
        return False
    height, ends = len(c.image) - 2, [max(0, e) for e in c.end_padding]
    if any(d > 1 and s > 1 for d, s in zip(c.dilation[: height + 1], c.stride, strict=False)):
        return False
    if (c.dilation[height] > 1 and c.extended[height] > c.image[height]) or (height and c.dilation[0] > 1):
        return False
    half = c.extended[height] // 2
    if c.padding[height] > half or ends[height] > half:
        return False
    if any(max(p, e) >= k for p, e, k in zip(c.padding, ends, c.extended, strict=True)):
        return False
    if max(c.padding[-1], ends[-1]) > 28 or c.kernel[-1] > (24 if c.itemsize == 2 and c.inputs < 16 else 14):
        return False
    if height and c.itemsize == 4 and c.padding[0] > 0 and c.kernel[0] >= c.image[0] + c.padding[0]:
        return False
    if c.groups > 1:
        return c.inputs % 16 == 0 and c.outputs % 16 == 0
    if c.inputs >= 16 or c.inputs in (1, 2, 3):
        return c.itemsize == 4 or c.inputs >= 16 or c.outputs % 16 == 0
    return False


def _narrow_weights(c: Convolution) -> bool:
    """Return whether jit_avx2_conv_bwd_weights_kernel is used, which also serves calls that AVX-512's kernels do not support."""
    if c.dilated or c.kernel[-1] >= 14 or any(k > i for k, i in zip(c.kernel, c.image, strict=True)):
        return False
    if any(max(p, e) >= k for p, e, k in zip(c.padding, c.end_padding, c.extended, strict=True)):
        return False
    if len(c.image) == 3 and (c.padding[0] or c.end_padding[0] > 0):
        return False
    return c.groups == 1 or (c.inputs % 8 == 0 and c.outputs % 8 == 0)


def _exchanged(c: Convolution) -> int:
    """Return the bytes of both sides of one image with pixels and channels exchanged.

    One block of channels at a time, per thread, and only if images are low. Source: jit_avx512_core_bf16_1x1_conv_kernel.
    """
    if c.result[-2] > 14:
        return 0
    pixels = c.threads * round_up(prod(c.result), 2) * 2
    return _entry(pixels * min(round_up(c.inputs, 16), 128)) + _entry(pixels * min(round_up(c.outputs, 16), 256))


def _transposed(c: Convolution) -> int:
    """Return the bytes of one image of each side with rows and channels exchanged, per thread.

    None for three dimensions with a kernel one pixel wide (uses_permw_transposition). Source:
    jit_avx512_core_bf16_conv_bwd_weights.
    """
    if len(c.image) == 3 and c.kernel[-1] == c.stride[-1] == 1:
        return _BARRIER
    wide = max(c.padding[-1], max(0, c.end_padding[-1]) + 1)
    width = round_up(-(-c.image[-1] // c.stride[-1]) + round_up(wide, 2), 2) * c.stride[-1]
    first = c.groups == 1 and c.inputs < c.simd
    source = 0 if first else c.groups * round_up(c.inputs, 16) * prod(c.image[:-1]) * width
    result = c.groups * round_up(c.outputs, 16) * prod(c.result[:-1]) * round_up(c.result[-1], 2)
    return _entry(source * 2) + _entry(result * 2) + _BARRIER


def _gemm_weights(c: Convolution) -> int:
    """Return the scratchpad of gemm_convolution_utils.cpp: the weight's size in bytes, counted as floats, once per thread."""
    spread = prod(c.result[-2:]) // c.threads < 256 and (c.batch > 1 or c.groups > 2)
    threads = c.threads if spread else 1
    size = _entry(threads * 4 * c.weight_bytes) + _entry(threads * _columns(c) * c.itemsize)
    return size + (_entry(4 * c.weight_bytes) if c.itemsize == 2 else 0)


def forward_last(c: Convolution) -> Layout:
    """Return the layout of the forward pass in channels last: only the weight is in blocks."""
    pair = 2 if c.itemsize == 2 else 1
    weight = round_up(c.groups, c.simd) if c.depthwise else c.groups * round_up(c.inputs, pair) * c.outputs
    batch = c.threads * 2 * _PAGE if c.groups == 1 else 0  # brgemm_conv's batch of addresses
    return _last(c, weight * prod(c.kernel) * c.itemsize, batch)


def backward_data_last(c: Convolution) -> Layout:
    """Return the layout of the input's gradient in channels last."""
    layout = backward_data(c)
    if layout.is_last:
        return _last(c, layout.weight, layout.scratch)
    return _last(c, forward_last(c).weight, forward_last(c).scratch)


def backward_weights_last(c: Convolution) -> Layout:
    """Return the layout of the weight's gradient in channels last: padded to whole blocks within every group.

    Depthwise kernels up to 3 wide have a layout of their own.
    """
    if c.depthwise and _depthwise_weights(c):
        return _last(c, round_up(c.groups, c.simd) * prod(c.kernel) * c.itemsize, 0)
    first = c.groups == 1 and c.inputs < c.simd
    inputs = c.inputs if first else round_up(c.inputs, c.simd)
    weight = c.groups * inputs * round_up(c.outputs, c.simd) * prod(c.kernel) * c.itemsize
    scratch = _padded_bias(c)
    if c.itemsize == 2:
        scratch += _entry(2 * weight) + (_exchanged(c) if _is_unit_kernel(c) else _transposed(c))
    return _last(c, weight, scratch)


def _last(c: Convolution, weight: int, scratch: int) -> Layout:
    return Layout(source=0, weight=weight, result=0, scratch=scratch, is_last=True)

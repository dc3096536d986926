"""Fourier transforms on CUDA: copies of inputs and intermediate results. cuFFT's own workspace is not counted.

PyTorch 2.15: native/cuda/SpectralOps.cpp, CuFFTPlanCache.h.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from sizer.tracing.allocations import AllocationRule, Library, Steps
from sizer.tracing.device import Device
from sizer.tracing.operator_tables import listed

_MOST = 3  # dimensions of one call of cuFFT
_HALVES = (torch.float16, torch.bfloat16, torch.complex32)


def real_to_complex(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add one more result for aten._fft_r2c over the first two dimensions, or more than three (SpectralOps.cpp).

    Arguments: input, dims, ... The last dimension is transformed first there. bfloat16 is transformed through a result of 2 ×
    16 bits if lengths are powers of 2, else through float32.
    """
    input, dims = args[0], [dim % args[0].dim() for dim in args[1]]
    at_once = _at_once(dims)
    if input.dtype == torch.bfloat16:
        powers = all(input.shape[dim] & (input.shape[dim] - 1) == 0 for dim in dims)
        if device.capability >= (8, 0) and at_once and powers:
            half = input.shape[dims[-1]] // 2 + 1
            elements = input.numel() // input.shape[dims[-1]] * half
            yield (elements * 4,)
            yield _copied(input, dims)
            if half == out.shape[dims[-1]]:
                yield out
            else:
                yield (elements * out.itemsize,)
                yield out
            return
        yield (input.numel() * 4,)
        input = torch.empty_strided(input.shape, input.stride(), dtype=torch.float32, device="meta")
    yield out
    yield _copied(input, dims if at_once else dims[-1:])
    if not at_once and len(dims) > 1:
        yield (out.nbytes,)
        yield _copied_again(out)


def complex_to_real(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add a copy of aten._fft_c2r's input, which cuFFT overwrites (SpectralOps.cpp).

    Arguments: input, dims, ... With several dimensions, the copy is the transform over the other dimensions.
    """
    input, dims = args[0], [dim % args[0].dim() for dim in args[1]]
    yield out
    if _at_once(dims) or len(dims) == 1:
        copy = torch.empty(input.shape, dtype=input.dtype, device="meta")
        yield [input.nbytes, *_copied(copy, dims if _at_once(dims) else dims[-1:])]
        return
    others = _in_order(input, dims[:-1])
    yield [input.nbytes, *_copied(input, others[-_MOST:])] if len(others) <= _MOST else [input.nbytes, input.nbytes]


def complex_to_complex(device: Device, args: tuple, kwargs: dict, out: Tensor) -> Steps:
    """Add one more result to aten._fft_c2c if it transforms more than three dimensions (SpectralOps.cpp).

    Arguments: input, dims, ... cuFFT transforms up to three dimensions at once, those of small strides first.
    """
    input = args[0]
    dims = _in_order(input, [dim % input.dim() for dim in args[1]])
    if len(dims) > _MOST:
        yield (out.nbytes,)
    yield out
    yield _copied(input, dims[-_MOST:]) if dims else []
    yield _copied_again(out) if len(dims) > _MOST else []


def _copied_again(out: Tensor) -> list[int]:
    """Return the bytes of a copy of an intermediate result, in which the dimension of the first pass is last.

    Only half-precision results need one.
    """
    return [out.nbytes] if out.dtype in _HALVES else []


def _at_once(dims: list[int]) -> bool:
    """Return True if one call of cuFFT transforms these dimensions of real numbers (use_optimized_cufft_path)."""
    return len(dims) <= _MOST and dims[:2] != [0, 1]


def _in_order(input: Tensor, dims: list[int]) -> list[int]:
    return sorted(dims, key=input.stride, reverse=True)


def _copied(input: Tensor, dims: list[int]) -> list[int]:
    """Return the bytes of a copy of the input if cuFFT cannot read its strides.

    A copy is also needed if the batch dimensions do not collapse into one dimension of one stride (_exec_fft; CuFFTPlanCache.h,
    as_cufft_embed).
    """
    batch = sorted((dim for dim in range(input.dim()) if dim not in dims), key=input.stride, reverse=True)
    ordered = input.permute(*batch, *dims)
    lengths = [input.shape[dim] for dim in dims]
    try:
        flat = ordered.view(prod(input.shape[dim] for dim in batch), *lengths)
    except RuntimeError:
        return [input.nbytes]
    strides = flat.stride()
    nested = all(left % right == 0 for left, right in pairwise(strides[1:]) if right)
    return [] if nested and 0 not in strides and (input.dtype not in _HALVES or strides[-1] == 1) else [input.nbytes]


ALLOCATIONS: dict[Any, AllocationRule] = {
    **listed("_fft_r2c", real_to_complex),
    **listed("_fft_c2r", complex_to_real),
    **listed("_fft_c2c", complex_to_complex),
}
LIBRARIES: dict[Any, Library] = listed("_fft_r2c _fft_c2r _fft_c2c", lambda args: "cuFFT")

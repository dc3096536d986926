"""The processor of this computer. "The CPU" is the one that runs Sizer."""

from __future__ import annotations

import functools

import torch


@functools.cache
def floats_per_register() -> int:
    """Return the floats in a vector register: 16 with AVX-512, 8 with AVX2 or less."""
    return 8 if torch.backends.cpu.get_cpu_capability() in ("AVX2", "DEFAULT") else 16


@functools.cache
def onednn_takes(dtype: torch.dtype) -> bool:
    """Return whether oneDNN computes convolutions in this half precision here.

    Source: mkldnn_bf16_device_check, mkldnn_fp16_device_check.
    """
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float16 and torch.ops.mkldnn._is_mkldnn_fp16_supported()


@functools.cache
def multiplies_bfloat16() -> bool:
    """Return True if the processor has instructions for products of bfloat16 (AVX-512 BF16 or AMX)."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()

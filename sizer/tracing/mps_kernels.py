"""Kernels of MPS for composite operators that differ from the generic path. The memory inside kernels is unknown."""

from __future__ import annotations

import torch
from torch import Tensor

from sizer.tracing.device import Device
from sizer.tracing.meta.attention import Attention, attention_kernel, math_attention


@attention_kernel
def scaled_dot_product_attention(device: Device, a: Attention) -> Tensor:
    """Run aten.scaled_dot_product_attention by the math path of attention.cpp, as on MPS.

    The fused kernel of MPS serves inference only.
    """
    device.note_choice("attention", "math", f"{str(a.query.dtype)[6:]}, head dim {a.query.shape[-1]}")
    return math_attention(a)


KERNELS = {torch.ops.aten.scaled_dot_product_attention.default: scaled_dot_product_attention}

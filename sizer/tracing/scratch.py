"""What kernels allocate inside, where no dispatch mode sees it: bytes per operator as functions of shapes and dtypes.

Each function returns stages: the sizes of the blocks that the kernel holds together, all released before the next stage.
Its docstring names the C++ file.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

Stages = list[list[int]]
Scratch = Callable[[Any, tuple, dict, Any], Stages]
_aten = torch.ops.aten


def _copy_if_strided(*tensors: Tensor) -> list[int]:
    """expect_contiguous: a copy of each tensor that is not contiguous."""
    return [t.numel() * t.itemsize for t in tensors if not t.is_contiguous()]


def layer_norm(device: Any, args: tuple, kwargs: dict, out: Any) -> Stages:
    """native_layer_norm (layer_norm.cpp, cuda/layer_norm_kernel.cu): the input made contiguous."""
    return [_copy_if_strided(args[0])]


def layer_norm_backward_cpu(device: Any, args: tuple, kwargs: dict, out: Any) -> Stages:
    """native_layer_norm_backward (cpu/layer_norm_kernel.cpp): gradient and input made contiguous, then the partial sums
    of weight and bias, [2, threads, N] in the accumulation dtype."""
    grad, input, shape = args[0], args[1], args[2]
    partial = 2 * torch.get_num_threads() * prod(shape) * 4
    return [[*_copy_if_strided(grad, input), partial]]


def safe_softmax(device: Any, args: tuple, kwargs: dict, out: Any) -> Stages:
    """_safe_softmax (native/SoftMax.cpp): softmax [.., N], where it equals minus infinity [.., N] and rows of that [.., 1]."""
    rows = out.numel() // max(1, out.shape[args[1]])
    return [[out.numel() * out.itemsize, args[0].numel(), rows]]


def cumsum_cpu(device: Any, args: tuple, kwargs: dict, out: Any) -> Stages:
    """cumsum (native/ReduceOps.cpp) over booleans or integers: the input in the output's dtype."""
    return [[out.numel() * out.itemsize]] if args[0].dtype != out.dtype else []


def flash_backward(device: Any, args: tuple, kwargs: dict, out: Any) -> Stages:
    """_scaled_dot_product_flash_attention_backward (cuda/flash_attn/flash_api.cpp, mha_bwd), all in float32 but the last:
    softmax_d [batch, heads, queries rounded to 128], dq_accum [.., head_dim rounded to 32, above 128 to 64], and for grouped
    heads the gradients of key and value for every query head [batch, keys, heads, head_dim]."""
    grad, query, key = args[0], args[1], args[2]
    batch, heads, queries, head = query.shape
    rows = -(-queries // 128) * 128
    multiple = 32 if head <= 128 else 64
    width = -(-head // multiple) * multiple
    sizes = [batch * heads * rows * 4, batch * heads * rows * width * 4]
    if key.shape[1] != heads:
        sizes += [batch * key.shape[2] * heads * head * query.itemsize] * 2
    return [[*_copy_if_strided(grad.transpose(1, 2)), *sizes]]


def convolution(device: Any, args: tuple, kwargs: dict, out: Any) -> Stages:
    """cudnn_convolution (cudnn/Conv_v8.cpp): where tensor cores serve NCHW tensors, cuDNN copies input, weight and output
    to NHWC. Modelled from that mechanism, not measured; engines that need less exist for every shape."""
    return [[_operand_copies(device, args[0], args[1], out, groups=args[8])]]


def convolution_backward(device: Any, args: tuple, kwargs: dict, out: Any) -> Stages:
    """The same copies for the gradient of the input, then for the gradient of the weight."""
    grad, input, weight, groups = args[0], args[1], args[2], args[9]
    return [[_operand_copies(device, input, weight, grad, groups=groups)] for wanted in args[10][:2] if wanted]


def _operand_copies(device: Any, input: Tensor, weight: Tensor, output: Tensor, groups: int) -> int:
    tensor_cores = device.capability >= ((8, 0) if input.dtype == torch.float32 else (7, 0))
    depthwise = groups > 1 and groups == input.shape[1]
    channels_last = (
        input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last) and not input.is_contiguous()
    )
    if not tensor_cores or depthwise or channels_last:
        return 0
    return sum(t.numel() * t.itemsize for t in (input, weight, output))


SCRATCH: dict[str, dict[Any, Scratch]] = {
    "cuda": {
        _aten.native_layer_norm.default: layer_norm,
        _aten._safe_softmax.default: safe_softmax,
        _aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
        _aten._scaled_dot_product_cudnn_attention_backward.default: flash_backward,
        _aten.convolution.default: convolution,
        _aten.convolution_backward.default: convolution_backward,
    },
    "mps": {},
    "cpu": {
        _aten.native_layer_norm.default: layer_norm,
        _aten.native_layer_norm_backward.default: layer_norm_backward_cpu,
        _aten._safe_softmax.default: safe_softmax,
        _aten.cumsum.default: cumsum_cpu,
    },
}

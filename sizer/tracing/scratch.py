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
    of weight and bias, [2, threads, N]."""
    grad, input, shape = args[0], args[1], args[2]
    partial = 2 * torch.get_num_threads() * prod(shape) * input.itemsize
    return [[*_copy_if_strided(grad, input), partial]]


def safe_softmax(device: Any, args: tuple, kwargs: dict, out: Any) -> Stages:
    """_safe_softmax (native/SoftMax.cpp): beside the softmax, where the input is minus infinity [.., N] and which rows are so
    altogether [.., 1], a byte an element; such rows are overwritten in place."""
    return [[args[0].numel(), out.numel() // max(1, out.shape[args[1]])]]


SCRATCH: dict[str, dict[Any, Scratch]] = {
    "mps": {},
    "cpu": {
        _aten.native_layer_norm.default: layer_norm,
        _aten.native_layer_norm_backward.default: layer_norm_backward_cpu,
    },
}

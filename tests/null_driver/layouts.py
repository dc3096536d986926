"""Operators of image models over the null driver, with inputs of several memory layouts: bytes at the peak and strides.

    python -m tests.null_driver.layouts MODE DTYPE FIRST EVERY

MODE is no_grad, inference or backward. Of all pairs of an operator and a layout those from the FIRST on, each EVERY-th. The last
line printed is JSON, as that of tests/null_driver/operators.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.null_driver.operators import Case, print_measured

LAST, LAST_3D = torch.channels_last, torch.channels_last_3d

# Each makes an image of 64 channels on a device.
PLANES: dict[str, Callable[..., Tensor]] = {
    "contiguous": lambda new: new(2, 64, 32, 32),
    "channels last": lambda new: new(2, 64, 32, 32).to(memory_format=LAST),
    "channels last, one sample": lambda new: new(1, 64, 32, 32).to(memory_format=LAST),
    "of attention": lambda new: new(1, 1024, 64).transpose(-1, -2).reshape(1, 64, 32, 32),
    "permuted": lambda new: new(2, 32, 64, 32).permute(0, 2, 1, 3),
    "sliced": lambda new: new(2, 128, 32, 32)[:, :64],
}
VOLUMES: dict[str, Callable[..., Tensor]] = {
    "contiguous, 3-D": lambda new: new(1, 64, 8, 16, 16),
    "channels last, 3-D": lambda new: new(1, 64, 8, 16, 16).to(memory_format=LAST_3D),
    "permuted, 3-D": lambda new: new(1, 8, 64, 16, 16).transpose(1, 2),
}


def new(x: Tensor, *shape: int, **options: torch.memory_format) -> Tensor:
    """Return a new tensor of the dtype and device of another."""
    return torch.empty(*shape, device=x.device, dtype=x.dtype, **options)


def statistics(x: Tensor) -> Tensor:
    """Return a mean or a variance of each channel."""
    return torch.empty(64, device=x.device)


def format_of(x: Tensor) -> torch.memory_format:
    """Return the channels-last format for this number of dimensions."""
    return LAST if x.dim() == 4 else LAST_3D


def ones(x: Tensor) -> list[int]:
    """Return a 1 for each dimension of pixels."""
    return [1] * (x.dim() - 2)


def last(x: Tensor) -> Tensor:
    """Return a view whose last dimension is the channels."""
    return x.movedim(1, -1)


def averaged(x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the means of each channel after an activation, whose gradient then is contiguous."""
    return activation(x).mean(tuple(range(2, x.dim())))


def resize(x: Tensor, **options) -> Tensor:
    return F.interpolate(x, **options)


ON_PLANES: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"up, {mode}": partial(resize, scale_factor=2.0, mode=mode)
       for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")},
    **{f"down, {mode}": partial(resize, size=(16, 16), mode=mode)
       for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")},
    "up, antialiased bilinear": partial(resize, size=(64, 64), mode="bilinear", antialias=True),
    "up, antialiased bicubic": partial(resize, size=(64, 64), mode="bicubic", antialias=True),
    "up, aligned corners": partial(resize, size=(64, 64), mode="bilinear", align_corners=True),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 4),
    "unfold": lambda x: F.unfold(x, 3, padding=1),
    "grid_sample": lambda x: F.grid_sample(x, new(x, x.shape[0], 20, 20, 2)),
    "conv2d": lambda x: F.conv2d(x, new(x, 32, 64, 3, 3), padding=1),
    "conv2d, 1 × 1": lambda x: F.conv2d(x, new(x, 32, 64, 1, 1)),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, new(x, 64, 32, 4, 4), stride=2, padding=1),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 8),
    "adaptive_avg_pool2d to one pixel": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 8),
    **{f"pad, {mode}": partial(F.pad, pad=(1, 1, 1, 1), mode=mode)
       for mode in ("constant", "reflect", "replicate", "circular")},
}  # fmt: skip
ON_VOLUMES: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"up 3-D, {mode}": partial(resize, scale_factor=2.0, mode=mode)
       for mode in ("nearest", "nearest-exact", "trilinear", "area")},
    "conv3d": lambda x: F.conv3d(x, new(x, 32, 64, 3, 3, 3), padding=1),
    "conv_transpose3d": lambda x: F.conv_transpose3d(x, new(x, 64, 32, 4, 4, 4), stride=2, padding=1),
    "avg_pool3d": lambda x: F.avg_pool3d(x, 2),
    "max_pool3d": lambda x: F.max_pool3d(x, 2),
    "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(x, 4),
    "pad 3-D, constant": lambda x: F.pad(x, (1, 1, 1, 1, 2, 0)),
    "pad 3-D, replicate": lambda x: F.pad(x, (1, 1, 1, 1, 2, 0), mode="replicate"),
}  # fmt: skip
ON_BOTH: dict[str, Callable[[Tensor], Tensor]] = {
    "group_norm": lambda x: F.group_norm(x, 32, new(x, 64), new(x, 64)),
    "group_norm without weights": lambda x: F.group_norm(x, 32),
    "instance_norm": F.instance_norm,
    "layer_norm": lambda x: F.layer_norm(last(x), (64,)),
    "layer_norm and back": lambda x: F.layer_norm(last(x), (64,)).movedim(-1, 1),
    "rms_norm": lambda x: F.rms_norm(last(x), (64,)),
    "batch_norm in evaluation": lambda x: F.batch_norm(x, statistics(x), statistics(x)),
    "normalize": lambda x: F.normalize(x, dim=1),
    **{name: getattr(F, name) for name in ("silu", "gelu", "relu", "softplus", "mish", "hardswish")},
    **{name: getattr(torch, name) for name in (
        "sigmoid", "neg", "exp", "sqrt", "rsqrt", "abs", "clone", "zeros_like", "randn_like", "nan_to_num")},
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "elu": F.elu,
    "clamp": lambda x: x.clamp(-1, 1),
    "div by 1.0": lambda x: x / 1.0,
    "div by 2": lambda x: x / 2,
    "div by a tensor": lambda x: x / torch.ones((), device=x.device),
    "mul by 2.0": lambda x: x * 2.0,
    "add 1": lambda x: x + 1,
    "rsub": lambda x: 1 - x,
    "pow": lambda x: x**2,
    "float": lambda x: x.float(),
    "contiguous": lambda x: x.contiguous(),
    "full_like": lambda x: torch.full_like(x, 1.0),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "lerp": lambda x: torch.lerp(x, x, 0.5),
    "add to itself": lambda x: x + x,
    "add contiguous": lambda x: x + new(x, *x.shape),
    "add to contiguous": lambda x: new(x, *x.shape) + x,
    "add channels last": lambda x: x + new(x, *x.shape, memory_format=format_of(x)),
    "add a bias": lambda x: x + new(x, 64, *ones(x)),
    "add an embedding": lambda x: x + new(x, x.shape[0], 64, *ones(x)),
    "cat of channels": lambda x: torch.cat([x, x], 1),
    "cat of samples": lambda x: torch.cat([x, x], 0),
    "cat with contiguous": lambda x: torch.cat([x, new(x, *x.shape)], 1),
    "stack": lambda x: torch.stack([x, x]),
    "sum": lambda x: x.sum(1),
    "sum of pixels": lambda x: x.sum((2, 3), keepdim=True),
    "mean": lambda x: x.mean(1, keepdim=True),
    "amax": lambda x: x.amax(1),
    "var": lambda x: x.var(1),
    "std": lambda x: x.std((2, 3)),
    "norm": lambda x: x.norm(dim=1),
    "softmax of channels": lambda x: x.softmax(1),
    "softmax of rows": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(1),
    "cumsum": lambda x: x.cumsum(2),
    "glu": lambda x: F.glu(x, 1),
    "flip": lambda x: x.flip(2),
    "roll": lambda x: x.roll(1, 2),
    "repeat": lambda x: x.repeat(1, 2, *ones(x)),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 2),
    "index": lambda x: x[:, torch.arange(8, device=x.device)],
    "flatten": lambda x: x.flatten(2),
    "reshape": lambda x: x.reshape(x.shape[0], -1),
    "dropout": lambda x: F.dropout(x, 0.1, True),
    "tril": lambda x: x.tril(),
    "sort": lambda x: x.sort(1)[0],
    "topk": lambda x: x.topk(2, 1)[0],
    "einsum": lambda x: torch.einsum("bc...,cd->bd...", x, new(x, 64, 32)),
    "linear": lambda x: F.linear(last(x), new(x, 32, 64)),
    "gt": lambda x: x > 0,
    "maximum": lambda x: torch.maximum(x, x * 1),
    "addcmul": lambda x: torch.addcmul(x, x, x),
    "silu in place": lambda x: F.silu(x + 0, inplace=True),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "prelu": lambda x: F.prelu(x, new(x, 64)),
    **{f"mean of {activation.__name__}": partial(averaged, activation=activation) for activation in (
        F.silu, F.gelu, F.relu, F.relu6, F.softplus, F.mish, F.hardswish, F.hardsigmoid, F.leaky_relu, F.elu, F.celu, F.selu,
        F.logsigmoid, F.softshrink, F.hardshrink, F.tanhshrink, torch.sigmoid, torch.tanh)},
}  # fmt: skip


def cases(mode: str, dtype: torch.dtype, first: int, every: int) -> Iterator[Case]:
    """Yield the name of a pair of an operator and a layout, the operator, and a function that makes the input on a device."""
    pairs = [
        *((operators, PLANES) for operators in (ON_PLANES, ON_BOTH)),
        *((operators, VOLUMES) for operators in (ON_VOLUMES, ON_BOTH)),
    ]
    rows = [
        (f"{name}|{layout}", operator, make)
        for operators, layouts in pairs
        for name, operator in operators.items()
        for layout, make in layouts.items()
    ]
    for name, operator, make in rows[first::every]:
        yield name, operator, partial(make, partial(torch.empty, dtype=dtype, device="cuda")), (), {}


if __name__ == "__main__":
    print_measured(cases)

"""torchvision's own operators in each dtype: which of them the installed wheel has kernels for.

    python -m tests.tracing.torchvision_dtypes DEVICE

prints as JSON the operators and dtypes that the device refuses; over the null driver, that is what the wheel's CUDA kernels say.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

import torch
import torchvision
from torch import Tensor

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Of quantized tensors, which have no floating-point dtype, and a version number.
OTHER_KINDS = {"qnms", "qroi_align", "_cuda_version"}
Case = Callable[[str, torch.dtype], object]


def _zeros(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _deformed(device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Input, weight, offset, mask and bias of a 3 x 3 convolution over 8 x 8 pixels."""
    shapes = ((1, 8, 8, 8), (4, 8, 3, 3), (1, 18, 8, 8), (1, 9, 8, 8), (4,))
    return tuple(_zeros(device, dtype, *shape) for shape in shapes)


def cases() -> dict[str, Case]:
    """Return a call of each operator by name: 2 regions of a 1 x 8 x 8 x 8 map, pooled to 2 x 2."""
    assert torchvision.__version__  # registers the operators
    ops, z = torch.ops.torchvision, _zeros
    grid, size, steps = (1.0, 2, 2), (1, 8, 8, 8), (1, 1, 1, 1, 1, 1, 1, 1, True)

    def places(device: str, channels: int) -> Tensor:
        return z(device, torch.int32, 2, channels, 2, 2)

    return {
        "nms": lambda d, t: ops.nms(z(d, t, 4, 4), z(d, t, 4), 0.5),
        "roi_align": lambda d, t: ops.roi_align(z(d, t, *size), z(d, t, 2, 5), *grid, 2, False),
        "_roi_align_backward": lambda d, t: ops._roi_align_backward(
            z(d, t, 2, 8, 2, 2), z(d, t, 2, 5), *grid, *size, 2, False
        ),
        "roi_pool": lambda d, t: ops.roi_pool(z(d, t, *size), z(d, t, 2, 5), *grid),
        "_roi_pool_backward": lambda d, t: ops._roi_pool_backward(
            z(d, t, 2, 8, 2, 2), z(d, t, 2, 5), places(d, 8), *grid, *size
        ),
        "ps_roi_align": lambda d, t: ops.ps_roi_align(z(d, t, *size), z(d, t, 2, 5), *grid, 2),
        "_ps_roi_align_backward": lambda d, t: ops._ps_roi_align_backward(
            z(d, t, 2, 2, 2, 2), z(d, t, 2, 5), places(d, 2), *grid, 2, *size
        ),
        "ps_roi_pool": lambda d, t: ops.ps_roi_pool(z(d, t, *size), z(d, t, 2, 5), *grid),
        "_ps_roi_pool_backward": lambda d, t: ops._ps_roi_pool_backward(
            z(d, t, 2, 2, 2, 2), z(d, t, 2, 5), places(d, 2), *grid, *size
        ),
        "deform_conv2d": lambda d, t: ops.deform_conv2d(*_deformed(d, t), *steps),
        "_deform_conv2d_backward": lambda d, t: ops._deform_conv2d_backward(
            z(d, t, 1, 4, 8, 8), *_deformed(d, t), *steps
        ),
        "box_iou_rotated": lambda d, t: ops.box_iou_rotated(z(d, t, 3, 5), z(d, t, 3, 5)),
    }


def registered() -> set[str]:
    """Return the names of the operators that the installed wheel registers."""
    assert torchvision.__version__
    names = (name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names())
    return {name.removeprefix("torchvision::") for name in names if name.startswith("torchvision::")}


def refused(device: str) -> list[str]:
    """Return the operators and dtypes, such as "nms bfloat16", that have no kernel on a device. Other errors are raised."""
    found = []
    for operator, call in cases().items():
        if operator not in registered():
            continue
        for name, dtype in DTYPES.items():
            try:
                call(device, dtype)
            except (RuntimeError, NotImplementedError) as error:
                if "not implemented for" not in str(error) and "has no" not in str(error):
                    raise
                found.append(f"{operator} {name}")
    return found


if __name__ == "__main__":
    print(json.dumps(refused(sys.argv[1])), flush=True)
    os._exit(0)  # PyTorch's threads wait for a device that never answers

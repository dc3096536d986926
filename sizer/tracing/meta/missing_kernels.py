"""Operators of torchvision that have no kernel for a half dtype.

Meta kernels accept every dtype. The real kernels are compiled for a list of dtypes (`AT_DISPATCH_FLOATING_TYPES` or
`AT_DISPATCH_FLOATING_TYPES_AND_HALF`), and other dtypes are refused.

Source: torchvision/csrc/ops/cuda, cpu and mps, 0.26 to 0.29. `tests/tracing/test_missing_kernels.py` compares each row with the CPU
kernels of the installed wheel, `tests/null_driver/test_missing_kernels.py` with its CUDA kernels.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_NO_BFLOAT16, _NO_HALVES = ("bfloat16",), ("bfloat16", "float16")

# By operator: the dtypes without a kernel on CUDA and MPS, and on the CPU.
MISSING: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "nms": (_NO_BFLOAT16, _NO_HALVES),
    "roi_align": (_NO_BFLOAT16, _NO_BFLOAT16),
    "_roi_align_backward": (_NO_BFLOAT16, _NO_BFLOAT16),
    "roi_pool": (_NO_BFLOAT16, _NO_BFLOAT16),
    "_roi_pool_backward": (_NO_BFLOAT16, _NO_BFLOAT16),
    "ps_roi_align": (_NO_BFLOAT16, _NO_BFLOAT16),
    "_ps_roi_align_backward": (_NO_BFLOAT16, _NO_BFLOAT16),
    "ps_roi_pool": (_NO_BFLOAT16, _NO_BFLOAT16),
    "_ps_roi_pool_backward": (_NO_BFLOAT16, _NO_BFLOAT16),
    "deform_conv2d": (_NO_BFLOAT16, _NO_BFLOAT16),
    "_deform_conv2d_backward": (_NO_BFLOAT16, _NO_BFLOAT16),
    "box_iou_rotated": (_NO_HALVES, _NO_HALVES),
}

_FOUND = re.compile(r"torchvision's operator (\w+) has no (\w+) kernel on \w+")


def missing_kernel(failure: str) -> str | None:
    """Return a sentence about an operator and the dtype without a kernel; None if every operator has one."""
    found = _FOUND.search(failure)
    return found and found[0]


def _check(operator: str) -> Callable[[str, tuple], None]:
    def check(kind: str, args: tuple) -> None:
        missing = MISSING[operator][kind == "cpu"]
        dtypes = [str(getattr(arg, "dtype", "")).removeprefix("torch.") for arg in args]
        name = next((dtype for dtype in dtypes if dtype in _NO_HALVES), None)
        if name in missing:
            raise NotImplementedError(f"torchvision's operator {operator} has no {name} kernel on {kind.upper()}")

    return check


CHECKS: dict[str, Callable[[str, tuple], None]] = {
    f"torchvision.{operator}.default": _check(operator) for operator in MISSING
}

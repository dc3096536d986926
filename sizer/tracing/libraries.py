"""Memory that libraries keep once they are used.

Source: aten/src/ATen/cuda/CublasHandlePool.cpp, PyTorch 2.11 to 2.15.
"""

from __future__ import annotations

import torch

_aten = torch.ops.aten

DEFAULT_WORKSPACE = 8_519_680  # parseChosenWorkspaceSize: ":4096:2:16:8" = 4096 KiB * 2 + 16 KiB * 8
HOPPER_WORKSPACE = 32 * 2**20  # the same for compute capability 9.0 and newer majors

WORKSPACE_USERS = frozenset(
    {
        _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.addmv.default,
        _aten.mv.default, _aten.dot.default, _aten.addbmm.default,
    }
)  # fmt: skip


def cublas_workspace_bytes(capability: tuple[int, int] | None) -> int:
    """The workspace in bytes that one cuBLAS handle (one per thread and stream) takes at its first use; cuBLASLt shares it."""
    return HOPPER_WORKSPACE if capability is not None and capability[0] >= 9 else DEFAULT_WORKSPACE

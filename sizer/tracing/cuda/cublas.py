"""Memory that cuBLAS takes from PyTorch's allocator, by PyTorch's version.

Source: aten/src/ATen/cuda/CublasHandlePool.cpp, CUDABlas.cpp (CublasLtWorkspace) and native/cuda/Blas.cpp
(isInputCompliesAddmmCudaLt), read in their versions 2.6 and 2.11 to 2.15 and, for 2.11.0 and 2.15.0, in the binaries themselves:

| PyTorch      | cuBLAS                                   | cuBLASLt                        | 32 MiB on capability |
|---|---|---|---|
| 2.6          | one per thread, from first use to the end | 1 MiB for the time of each call | 9.0                  |
| 2.11         | one per thread, from first use to the end | 1 MiB of its own, kept likewise | 9.0                  |
| 2.12 to 2.14 | the same                                  | shares it                       | 9 to 12              |
| 2.15 on      | for the time of each call                 | 1 MiB for the time of each call | 9 to 12              |

Elsewhere cuBLAS takes 8,519,680 bytes. 2.12 is taken to be as 2.13, whose source was read; 2.7 and 2.8 as 2.6, 2.9 and 2.10 as
2.11: cuBLASLt keeps its workspace since pull request 156495 of June 2025. A product of a single row goes to cuBLASLt, too, as the
binaries show, though development versions between 2.10 and 2.11 asked for two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sizer.base.versions import Version, version_followed

_aten = torch.ops.aten

DEFAULT_WORKSPACE = 8_519_680  # parseChosenWorkspaceSize: ":4096:2:16:8" = 4096 KiB * 2 + 16 KiB * 8
LARGE_WORKSPACE = 32 * 2**20
LT_WORKSPACE = 2**20  # parseCUDABlasLtWorkspaceSize: 1024 KiB

Capability = tuple[int, int]

_BIASED = frozenset({_aten._addmm_activation.default, *(getattr(_aten.addmm, name) for name in _aten.addmm.overloads())})
_IN_PLACE = (_aten.addmm_, _aten.baddbmm_, _aten.addmv_, _aten.addbmm_)
_INTO_RESULTS = (_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm, _aten.addmv, _aten.mv, _aten.dot, _aten.vdot, _aten.addbmm)
WORKSPACE_USERS = _BIASED | {
    _aten.mm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.addmv.default, _aten.mv.default,
    _aten.dot.default, _aten.vdot.default, _aten.addbmm.default, *(packet.default for packet in _IN_PLACE),
    *(
        getattr(packet, overload)
        for packet in _INTO_RESULTS
        for overload in packet.overloads()
        if overload in ("out", "dtype", "dtype_out")
    ),
}  # fmt: skip
_COPIES_OPERANDS = frozenset({_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default})


@dataclass(frozen=True, slots=True, kw_only=True)
class Blas:
    """Workspaces in bytes of a thread's cuBLAS handle; `kept` from the first use to the end, else for the time of a call.
    `lt_size` is what cuBLASLt takes, None where it shares the handle's, and `lt_kept` whether that is kept likewise; it takes a
    bias of one row [1, N], too, where `lt_takes_a_row`."""

    size: int
    lt_size: int | None
    kept: bool
    lt_kept: bool
    lt_takes_a_row: bool
    lt_takes_a_matrix: bool  # a bias [M, N] of a half dtype
    outer_by_triton: bool = False  # bmm of [B, M, 1] and [B, 1, N] is a Triton kernel (torch/_native/ops/bmm_outer_product)

    def needs(
        self, func: object, args: tuple, out: Tensor, *, beta: float = 1
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return what a matrix product works in (bytes): for the time of the call, and what is kept.

        Those are copies of operands that cuBLAS cannot read, and the handle's workspace, cuBLASLt's or both, which empty products
        do without. `beta` scales what is added to the product.
        """
        if self.outer_by_triton and func is _aten.bmm.default and _is_outer(*args):
            return (), ()
        copies = tuple(t.nbytes for t in args[-2:] if not _is_readable(t)) if func in _COPIES_OPERANDS else ()
        if out.numel() == 0 or any(t.numel() == 0 for t in args[-2:] if isinstance(t, Tensor)):
            return copies, ()
        light: tuple[int, ...] = ()
        if self.lt_size is not None and func in _BIASED and self._uses_lt(args[0], args[1], args[2], out, beta):
            light = (self.lt_size,)
        if not self.kept:
            return (*copies, *(light or (self.size,))), ()
        # a cuBLASLt handle is a cuBLAS handle, which brings its own workspace along
        return (copies, (self.size, *light)) if self.lt_kept else ((*copies, *light), (self.size,))

    def _uses_lt(self, bias: Tensor, first: Tensor, second: Tensor, out: Tensor, beta: float) -> bool:
        if not out.is_contiguous():
            return False
        if beta == 1 and uses_lt(bias, first, second, row=self.lt_takes_a_row):
            return True
        halves = first.dtype in (torch.float16, torch.bfloat16) and bias.dtype == first.dtype
        whole = bias.shape == (first.shape[0], second.shape[1]) and bias.is_contiguous() and bias is not out
        return self.lt_takes_a_matrix and beta != 0 and halves and whole and min(*second.shape) > 1


def _is_outer(first: Tensor, second: Tensor) -> bool:
    return first.shape[2] == 1 and second.shape[1] == 1 and not first.is_complex()


def blas_of(capability: Capability, version: Version) -> Blas:
    """What cuBLAS takes on a device of this capability in this version of PyTorch."""
    return blas_with(handle_workspace(capability, version), version)


def handle_workspace(capability: Capability, version: Version) -> int:
    """The bytes of a handle's workspace."""
    large = capability == (9, 0) if version_followed(version) < (2, 12) else 9 <= capability[0] <= 12
    return LARGE_WORKSPACE if large else DEFAULT_WORKSPACE


def blas_with(size: int, version: Version) -> Blas:
    """What cuBLAS takes in this version of PyTorch where a handle's workspace has `size` bytes."""
    version = version_followed(version)
    own_lt = version < (2, 12) or version >= (2, 15)
    return Blas(
        size=size,
        lt_size=LT_WORKSPACE if own_lt else None,
        kept=version < (2, 15),
        lt_kept=(2, 11) <= version < (2, 12),
        lt_takes_a_row=version >= (2, 11),
        lt_takes_a_matrix=version >= (2, 15),
        outer_by_triton=version >= (2, 15),
    )


def uses_lt(bias: Tensor, first: Tensor, second: Tensor, *, row: bool = True) -> bool:
    """Whether bias [N] + first [M, K] @ second [K, N] goes to cuBLASLt, which adds the bias in its epilogue; a bias [1, N] where it
    takes such a `row`."""
    flat = bias.dim() == 1 or (row and bias.squeeze().dim() == 1)
    fusable = flat and bias.is_contiguous() and bias.shape[-1] == second.shape[1]
    dtype = first.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    return fusable and dtype and min(*second.shape) > 1


def _is_readable(tensor: Tensor) -> bool:
    """Whether cuBLAS reads an operand as rows or columns: one of its last two strides is 1, none is 0 (prepare_matrix_for_cublas in
    cuda/Blas.cpp, prepare_batch_matrix_for_cublas)."""
    if tensor.is_contiguous():
        return True
    (rows, columns), (row, column) = tensor.shape[-2:], tensor.stride()[-2:]
    if (column == 1 and row >= max(1, columns)) or (row == 1 and column >= max(1, rows)):
        return True
    return tensor.dim() == 2 and _aten.is_non_overlapping_and_dense.default(tensor)

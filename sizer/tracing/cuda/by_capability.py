"""Sizes that depend on the compute capability only. Plain numbers: no torch.

They are cuBLAS's workspace, the workspace of memory-efficient attention's backward pass, and the model of cuDNN's workspaces
that is used without cuDNN's answers. In a trace that devices of several capabilities share (`Device.shared`), these sizes are
size queries; `sized` resolves them to bytes.

cuBLAS takes memory from PyTorch's allocator, depending on PyTorch's version. Source: aten/src/ATen/cuda/CublasHandlePool.cpp,
CUDABlas.cpp (CublasLtWorkspace) and native/cuda/Blas.cpp (isInputCompliesAddmmCudaLt), read in versions 2.6 and 2.11 to 2.15,
and for 2.11.0 and 2.15.0 in the binaries themselves:

| PyTorch      | cuBLAS                                   | cuBLASLt                        | 32 MiB on capability |
    |---|---|---|---|
| 2.6          | one per thread, from first use to the end | 1 MiB for the time of each call | 9.0                  |
| 2.11         | one per thread, from first use to the end | 1 MiB of its own, kept likewise | 9.0                  |
| 2.12 to 2.14 | the same                                  | shares it                       | 9 to 12              |
| 2.15 on      | for the time of each call                 | 1 MiB for the time of each call | 9 to 12              |

On other capabilities cuBLAS takes 8,519,680 bytes. 2.12 is assumed to equal 2.13, the source of which was read. 2.7 and 2.8 are
assumed to equal 2.6, and 2.9 and 2.10 to equal 2.11: cuBLASLt keeps its workspace since pull request 156495 of June 2025. A
product of a single row also uses cuBLASLt, as the binaries show, although development versions between 2.10 and 2.11 required
two rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sizer.base.units import round_up
from sizer.base.versions import Version, rules_version
from sizer.tape.family import TapeFamily
from sizer.tracing.log import DeferredSize

# Kinds of size queries
HANDLE = "cuBLAS handle"
EFFICIENT = "attention's efficient backward pass"
CUDNN = "cuDNN convolution"

DEFAULT_WORKSPACE = 8_519_680  # parseChosenWorkspaceSize: ":4096:2:16:8" = 4096 KiB * 2 + 16 KiB * 8
LARGE_WORKSPACE = 32 * 2**20
LT_WORKSPACE = 2**20  # parseCUDABlasLtWorkspaceSize: 1024 KiB

HALF, SINGLE = "half", "single"  # words of EFFICIENT
_PAIR, _NUMBER = re.compile(r":([0-9]{1,7}):([0-9]{1,5})", re.ASCII), re.compile(r"[0-9]{1,9}", re.ASCII)

Capability = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blas:
    """Workspaces in bytes of a thread's cuBLAS handle.

    If `kept`, the workspace lives from the first use to the end, else for the time of a call. `lt_size` is cuBLASLt's
    workspace, None if it shares the handle's; `lt_kept` says whether that is kept too. If `lt_takes_a_row`, cuBLASLt also
    accepts a bias of one row [1, N].
    """

    size: int
    lt_size: int | None
    kept: bool
    lt_kept: bool
    lt_takes_a_row: bool
    lt_takes_a_matrix: bool  # a bias [M, N] of a half dtype
    outer_by_triton: bool  # bmm of [B, M, 1] and [B, 1, N] is a Triton kernel (torch/_native/ops/bmm_outer_product)


def blas_of(capability: Capability, version: Version) -> Blas:
    """Return the workspaces of cuBLAS on a device of this capability in this version of PyTorch."""
    return blas_with(handle_workspace(capability, version), version)


def handle_workspace(capability: Capability, version: Version) -> int:
    """Return the bytes of a handle's workspace."""
    large = capability == (9, 0) if rules_version(version) < (2, 12) else 9 <= capability[0] <= 12
    return LARGE_WORKSPACE if large else DEFAULT_WORKSPACE


def blas_with(size: int, version: Version) -> Blas:
    """Return the workspaces of cuBLAS in this version of PyTorch if a handle's workspace has `size` bytes."""
    version = rules_version(version)
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


def as_environment_says(blas: Blas, environment: Mapping[str, str], version: Version) -> Blas:
    """Return the workspaces of cuBLAS if a process has these environment variables, which it reads before its first product.

    CUBLAS_WORKSPACE_CONFIG has pairs ":KiB:count", CUBLASLT_WORKSPACE_SIZE is in KiB (cuda/CublasHandlePool.cpp,
    parseChosenWorkspaceSize; cuda/CUDABlas.cpp, _parseChosenWorkspaceSize). PyTorch uses its defaults for other texts.
    """
    pairs = _PAIR.findall(environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        blas = replace(blas_with(sum(int(size) * int(count) for size, count in pairs) * 2**10, version), lt_size=blas.lt_size)
    lt = environment.get("CUBLASLT_WORKSPACE_SIZE", "")
    return replace(blas, lt_size=int(lt) * 2**10) if blas.lt_size is not None and _NUMBER.fullmatch(lt) else blas


def shared_blas(capability: Capability, version: Version) -> Blas:
    """Return the workspaces of cuBLAS in this version of PyTorch, with the handle's workspace as a size query.

    Without an answer, the size is that of this capability.
    """
    return blas_with(DeferredSize(handle_workspace(capability, version), HANDLE, (), ()), version)


def efficient_workspace(capability: Capability, words: tuple[str, ...], numbers: tuple[int, ...]) -> int:
    """Return the bytes of the workspace of memory-efficient attention's backward pass.

    The workspace consists of tiles that accumulate the gradient of the query, with 4 bytes per element and 16 more bytes per
    tile. Wide heads in half precision also accumulate the gradients of key and value (mem_eff_attention/kernel_backward.h,
    workspace_size). `words` are the precision, the queries and the head dims of query and value. `numbers` has the number of
    pairs of sample and head.

    *Known limitations*: below 200 pairs wide heads may split their keys, which takes up to 26 MB more.
    """
    half, (queries, head, value_head), (pairs,) = words[0] == HALF, map(int, words[1:]), numbers
    rows, columns, in_registers = _efficient_blocks(capability, half, max(head, value_head))
    tiles = -(-queries // rows) * -(-head // columns)
    elements = tiles * (4 + rows * columns)
    if half and not in_registers:
        elements += columns * (round_up(head, rows) + round_up(value_head, rows))
    return pairs * round_up(elements, 4) * 4


def _efficient_blocks(capability: Capability, half: bool, widest: int) -> tuple[int, int, bool]:
    """Return the rows and columns of the first kernel that fits, and whether it keeps gradients of key and value in registers.

    Kernels are tried in the order of mem_eff_attention/kernels/cutlassB.h. Devices with 100 KiB of shared memory cannot use the
    largest blocks.
    """
    if widest <= 64:
        return 64, 64, True
    roomy = capability in ((8, 0), (8, 7)) or (9, 0) <= capability <= (10, 9)
    if not half or capability < (8, 0):
        return (128, 64, True) if roomy or (half and widest <= 128) else (64, 64, False)
    if widest <= 96 and capability in ((8, 6), (8, 9)):
        return 128, 64, True
    if widest <= 128:
        return (128, 128, True) if roomy else (64, 64, False)
    return (128, 64, False) if roomy else (64, 64, False)


def tensor_cores_from(dtype: str) -> Capability:
    """Return the lowest capability with tensor cores for convolutions of a dtype."""
    return (8, 0) if dtype == "float32" else (7, 0)


def sized(family: TapeFamily, capability: Capability, version: Version) -> TapeFamily:
    """Return the tapes of a shared trace for a device of this capability in this version of PyTorch."""
    handle = handle_workspace(capability, version)

    def size(kind: str, words: tuple[str, ...], numbers: tuple[int, ...]) -> int | None:
        if kind == HANDLE:
            return handle
        if kind == EFFICIENT:
            return efficient_workspace(capability, words, numbers)
        return 0 if kind == CUDNN and capability < tensor_cores_from(words[1]) else None

    return family.with_sizes(size, answered=(HANDLE, EFFICIENT))

"""Sizes that go by the compute capability alone: cuBLAS's workspace, that of memory-efficient attention's backward pass, and the
model of cuDNN's where nobody is asked.

In a trace that devices of several capabilities share (`Device.shared`) they are size queries; `sized` gives them their bytes.
"""

from __future__ import annotations

from sizer.base.versions import Version
from sizer.tape.family import TapeFamily
from sizer.tracing.cuda.attention_workspaces import EFFICIENT, efficient_workspace
from sizer.tracing.cuda.convolution import CUDNN, tensor_cores_from
from sizer.tracing.cuda.cublas import Blas, blas_with, handle_workspace
from sizer.tracing.log import DeferredSize

HANDLE = "cuBLAS handle"


def shared_blas(capability: tuple[int, int], version: Version) -> Blas:
    """What cuBLAS takes in this version of PyTorch, its handle's workspace, as on this capability, left to a size query."""
    return blas_with(DeferredSize(handle_workspace(capability, version), HANDLE, (), ()), version)


def sized(family: TapeFamily, capability: tuple[int, int], version: Version) -> TapeFamily:
    """The tapes of a shared trace on a device of this capability in this version of PyTorch."""
    handle = handle_workspace(capability, version)

    def size(kind: str, words: tuple[str, ...], numbers: tuple[int, ...]) -> int | None:
        if kind == HANDLE:
            return handle
        if kind == EFFICIENT:
            return efficient_workspace(capability, words, numbers)
        return 0 if kind == CUDNN and capability < tensor_cores_from(words[1]) else None

    return family.with_sizes(size, answered=(HANDLE, EFFICIENT))

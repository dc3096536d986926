"""What gloo copies: NCCL writes where it is told to, gloo first to memory of its own.

Read in PyTorch 2.11 and 2.15: torch/csrc/distributed/c10d/ProcessGroupGloo.cpp.
"""

from __future__ import annotations

from typing import Any

import torch

from sizer.tracing.allocations import Held, Steps
from sizer.tracing.device import Device
from sizer.tracing.values.known import tensors_of


def gathered(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """allgather_ and _allgather_base_ (outputs first): what all ranks have, as one tensor that the outputs are copied from."""
    outputs = args[0][0] if isinstance(args[0], list) else [args[0]]
    return [[sum(tensor.nbytes for tensor in outputs)]]


def reduced(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
    """_reduce_scatter_base_ (output, input): the whole input, copied and reduced."""
    return [[sum(tensor.nbytes for tensor in tensors_of(args[1:2]))]]


_ROWS: dict[str, Held] = {
    "allgather_": gathered,
    "_allgather_base_": gathered,
    "_reduce_scatter_base_": reduced,
}
# PyTorch may be built without torch.distributed.
HELD: dict[Any, Held] = {
    getattr(torch.ops.c10d, name).default: row for name, row in _ROWS.items() if hasattr(torch.ops.c10d, name)
}

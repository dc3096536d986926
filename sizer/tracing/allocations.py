"""Allocations of a kernel other than its results, which no dispatch mode sees: steps in the kernel's own order.

- A list of sizes (bytes) is held together and released.
- A tuple of sizes is held until the operator ends. A list at its beginning is held until the rest of the tuple exists.
- A tensor is one of the operator's results, which exists from there on.
- `During` holds sizes while its own steps run.
- PRODUCT among the sizes of a list represents cuBLAS's workspace.
- A tuple among the sizes of a list is allocated and released at its position, once for each thread; then the cache is emptied.

Each function in a table ALLOCATIONS takes the device, the operator's arguments and its results; its docstring names the C++ file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from sizer.tracing.device import Device
from sizer.tracing.log import DeferredSize
from sizer.tracing.values.known import tensors_of

PRODUCT: Final = -1


@dataclass(frozen=True, slots=True)
class During:
    """Sizes in bytes that are held together until their steps have run."""

    sizes: list[int]
    steps: Steps


Step: TypeAlias = list[int | tuple[DeferredSize]] | list[int] | tuple[list[int] | int, ...] | Tensor | During
Steps = Iterable[Step]
AllocationRule = Callable[[Device, tuple, dict, Any], Steps]
Library = Callable[[tuple], str | None]
"""Returns the name of the library that an operator calls with these arguments, if only that library knows its workspace."""


def after_results(rule: AllocationRule) -> AllocationRule:
    """Return the rule of an operator that allocates its results first."""

    @wraps(rule)
    def steps(device: Device, args: tuple, kwargs: dict, out: Any) -> Steps:
        yield from tensors_of((out,))
        yield from rule(device, args, kwargs, out)

    return steps


def copies(*tensors: Tensor | None, layout: torch.memory_format = torch.contiguous_format) -> list[int]:
    """Return the bytes that `contiguous()` copies, for each tensor that is not in the layout."""
    return [t.nbytes for t in tensors if t is not None and not t.is_contiguous(memory_format=layout)]

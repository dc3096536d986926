"""How a module's tensors come to a device: by `.to(device)`, or, where they are quantised, one by one while they are loaded.

The latter is recorded once for a module, and every trace of it begins with what was recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from sizer.architecture.quantization import quantization_states
from sizer.tape.block_notes import Tensor as NotedTensor
from sizer.tape.tape import FROZEN
from sizer.tracing.log import BlockLog
from sizer.tracing.modules import children_first


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """What loading a module has logged, the block of each of its tensors, by path, and what the blocks hold, where noted."""

    log: BlockLog
    blocks: dict[str, int]
    tensors: dict[int, NotedTensor]


def tensors_in(module: nn.Module, *, tell_frozen: bool = False) -> Iterator[tuple[str, Tensor, str]]:
    """Path, tensor and category of a module's parameters and buffers in the order in which `.to(device)` moves them; behind a
    quantised weight what restores it, which is of its category.

    With `tell_frozen` parameters that require no gradient have a category of their own.
    """
    for path, child in children_first(module):
        category = "parameter"
        for name, parameter in child._parameters.items():
            if parameter is not None:
                category = FROZEN if tell_frozen and not parameter.requires_grad else "parameter"
                yield f"{path}.{name}".lstrip("."), parameter, category
        for name, state in quantization_states(child):
            yield f"{path}.{name}".lstrip("."), state, category
        for name, buffer in child._buffers.items():
            if buffer is not None:
                yield f"{path}.{name}".lstrip("."), buffer, "buffer"

"""Gradient checkpointing for modules without their own switch: repeated blocks are run again in the backward pass."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_BLOCKS_AS_ATTRIBUTES = ("GoogLeNet", "Inception3")  # models of torchvision with blocks as attributes, not in a container


def checkpoint_blocks(module: nn.Module) -> None:
    """Make every repeated block keep only its inputs for the backward pass, which runs it again.

    In training with gradients enabled a block's forward goes through `torch.utils.checkpoint(use_reentrant=False)`.
    The block's class becomes a subclass of the same name, so paths, parameters and printouts stay as they were.

    *Known limitations*: batch norm updates its running statistics twice a step, as with any recomputation.
    """
    for block in repeated_blocks(module):
        kind: Any = type(block)
        block.__class__ = _checkpointed(kind)


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the outermost repeated blocks of a module: residual blocks, encoder layers, inverted residuals, ...

    A block is a child of a Sequential, ModuleList or ModuleDict, has children itself and is not such a container, and its class
    occurs at least twice among them. A module that only holds a ModuleList is a stage of blocks, not a block.
    """
    outermost = list(_outermost(module))
    counts = Counter(type(block) for block in outermost)
    inside = [[block] if counts[type(block)] > 1 else repeated_blocks(block) for block in outermost]
    return [block for blocks in inside for block in blocks]


def _outermost(parent: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks below `parent`, without looking inside them."""
    in_position = isinstance(parent, _CONTAINERS) or _has_blocks_as_attributes(parent)
    for child in parent.children():
        if in_position and _is_block(child):
            yield child
        else:
            yield from _outermost(child)


def _has_blocks_as_attributes(module: nn.Module) -> bool:
    torchvision = sys.modules.get("torchvision.models")  # not imported for models of other packages
    return torchvision is not None and isinstance(module, tuple(getattr(torchvision, name) for name in _BLOCKS_AS_ATTRIBUTES))


def _is_block(module: nn.Module) -> bool:
    children = list(module.children())
    is_stage = all(type(child) is nn.ModuleList for child in children)  # also true for a leaf without children
    return not is_stage and not isinstance(module, _CONTAINERS)


@cache  # blocks of one class stay blocks of one class
def _checkpointed(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        if self.training and torch.is_grad_enabled():
            # DenseNet continues to append to the list that it passes to its layers.
            kept = [list(value) if isinstance(value, list) else value for value in args]
            return checkpoint(kind.forward, self, *kept, use_reentrant=False, **kwargs)
        return kind.forward(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__, "__doc__": kind.__doc__})

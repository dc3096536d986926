"""The tensors that examples are made of: real, on the CPU, the same at every call, sample by sample alike."""

from __future__ import annotations

import re

import torch
from torch import Tensor
from transformers import PreTrainedConfig

IGNORED_LABEL = -100
SPECIAL = re.compile(r"_token_(id|ids|index)$|^image_patch_id$")


def floats(batch: int, *shape: int) -> Tensor:
    """Floats in [0, 1), (batch, *shape) float32: one random sample, repeated."""
    sample = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    return sample.repeat(batch, *(1 for _ in shape))


def integers(bound: int, batch: int, *shape: int) -> Tensor:
    """Integers in [0, bound), (batch, *shape) int64."""
    return torch.randint(max(1, bound), (batch, *shape), generator=torch.Generator().manual_seed(0))


def ones(batch: int, *shape: int) -> Tensor:
    """A mask that hides nothing, (batch, *shape) int64, as tokenizers and processors return it."""
    return torch.ones((batch, *shape), dtype=torch.int64)


def zeros(batch: int, *shape: int) -> Tensor:
    """Zeros, (batch, *shape) int64."""
    return torch.zeros((batch, *shape), dtype=torch.int64)


def words(vocabulary: int, special: frozenset[int], batch: int, length: int) -> Tensor:
    """Token ids below `vocabulary` that are none of the special ones, nor 0, the padding where no config names another, (batch,
    length) int64."""
    left_out = sorted(token for token in special | {0} if 0 <= token < vocabulary)
    if len(left_out) == vocabulary:
        left_out = []
    ids = integers(vocabulary - len(left_out), batch, length)
    for token in left_out:  # ascending: the n-th of the ids that are left
        ids += ids >= token
    return ids


def special_tokens(*configs: PreTrainedConfig) -> frozenset[int]:
    """Every token id that the configs give a meaning of its own: padding, begin, end, image placeholders, ..."""
    found: set[int] = set()
    for config in configs:
        for name, value in vars(config).items():
            if SPECIAL.search(name):
                found.update(v for v in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(v, int))
    return frozenset(found)

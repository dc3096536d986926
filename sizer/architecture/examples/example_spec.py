"""Specification of an example, queries that all recipes share, and the tensors of examples.

Tensors are real, on the CPU, the same at every call and for every sample.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from sizer.base.errors import BuildError

CACHE = ("cache", "past_key_values")  # the cache argument of a decoder: its name since transformers 5.24, and before


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleSpec:
    """Specification of an example: class and config, batch size, lengths and sizes, with labels or without.

    `length` counts tokens (mel frames or audio samples for an audio-only model), `image_size` is (height, width); each is None
    if the model has no such input. `features` is the number of placeholder tokens of an image or audio in each text; None
    before it is counted. `interpolate`: the images have another size than the model's positions. `text_alone`: the texts
    contain no image or audio.
    """

    config: PreTrainedConfig
    cls: type[PreTrainedModel]
    batch: int
    training: bool
    length: int | None
    image_size: tuple[int, int] | None
    features: int | None = None
    interpolate: bool = False
    text_alone: bool = False

    @property
    def class_name(self) -> str:
        return self.cls.__name__

    @property
    def tokens(self) -> int:
        """Length of a text. Raises BuildError if the model has none."""
        if self.length is None:
            raise BuildError(f"{self.class_name} reads neither text nor audio")
        return self.length

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of an image in pixels. Raises BuildError if the model has none."""
        if self.image_size is None:
            raise BuildError(f"{self.class_name} takes no images")
        return self.image_size

    @property
    def text(self) -> PreTrainedConfig:
        return text_config(self.config)

    def takes(self, *names: str) -> bool:
        """Return True if the class's forward has a parameter of one of these names."""
        return takes(self.cls, *names)

    @property
    def switches_cache(self) -> bool:
        """Return True if the forward takes `use_cache`, by name or for the inner model with the same config."""
        rest = inspect.signature(self.cls.forward).parameters.values()
        passes_on = self.takes(*CACHE) and any(parameter.kind is parameter.VAR_KEYWORD for parameter in rest)
        return self.takes("use_cache") or (passes_on and read(self.config, "use_cache") is True)

    def read(self, *names: str, default: Any = None) -> Any:
        """Return the first of the dotted attribute paths that the config has, else `default`."""
        return read(self.config, *names, default=default)

    def part(self, *names: str) -> PreTrainedConfig:
        """Return the first sub-config of these names, else the config itself."""
        return read(self.config, *names, default=self.config)


Recipe = Callable[[ExampleSpec], dict[str, Any]]


@cache
def forward_parameters(cls: type[PreTrainedModel]) -> tuple[str, ...]:
    """Return the names of the parameters of the class's forward, in order, without `self`."""
    return tuple(inspect.signature(cls.forward).parameters)[1:]


def takes(cls: type[PreTrainedModel], *names: str) -> bool:
    """Return True if the class's forward has a parameter of one of these names."""
    # mypy looks for a __hash__ of the class's instances
    return any(name in forward_parameters(cls) for name in names)  # type: ignore[arg-type]


def transduces(cls: type[PreTrainedModel]) -> bool:
    """Return True for a transducer (RNN-T, TDT): its decoder reads the transcript of the audio, not an independent text."""
    return "RNNT" in cls.__name__ or "TDT" in cls.__name__


def read(config: object, *names: str, default: Any = None) -> Any:
    """Return the first value other than None among the dotted attribute paths, else `default`."""
    for name in names:
        value = config
        for step in name.split("."):
            value = value.get(step) if isinstance(value, dict) else getattr(value, step, None)
        if value is not None:
            return value
    return default


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the part of the config that describes the tokens.

    This is `text_config`, `decoder` or another nested one, else the config itself.

    If several describe tokens, return the config of the part that reads the input ids.
    """
    try:
        return config.get_text_config()
    except ValueError:  # several candidates (MusicGen has a text encoder and an audio decoder)
        return read(config, "text_encoder", "text_config", default=config)


# ------------------------------------------------------------------------------------------------------------- tensors


IGNORED_LABEL = -100
SPECIAL = re.compile(r"_token_(id|ids|index)$|^image_patch_id$")


def floats(batch: int, *shape: int) -> Tensor:
    """Return floats in [0, 1), (batch, *shape) float32: one random sample, repeated."""
    sample = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    return sample.repeat(batch, *(1 for _ in shape))


def integers(bound: int, batch: int, *shape: int) -> Tensor:
    """Return integers in [0, bound), (batch, *shape) int64."""
    return torch.randint(max(1, bound), (batch, *shape), generator=torch.Generator().manual_seed(0))


def ones(batch: int, *shape: int) -> Tensor:
    """Return a mask without masked positions, (batch, *shape) int64, as tokenizers and processors return it."""
    return torch.ones((batch, *shape), dtype=torch.int64)


def zeros(batch: int, *shape: int) -> Tensor:
    """Return zeros, (batch, *shape) int64."""
    return torch.zeros((batch, *shape), dtype=torch.int64)


def words(vocabulary: int, special: frozenset[int], batch: int, length: int) -> Tensor:
    """Return token ids below `vocabulary` without special ones and 0, the default padding, (batch, length) int64."""
    left_out = sorted(token for token in special | {0} if 0 <= token < vocabulary)
    if len(left_out) == vocabulary:
        left_out = []
    ids = integers(vocabulary - len(left_out), batch, length)
    for token in left_out:  # ascending: the n-th of the remaining ids
        ids += ids >= token
    return ids


def special_tokens(*configs: PreTrainedConfig) -> frozenset[int]:
    """Return every token id with a special meaning in the configs: padding, begin, end, image placeholders, ..."""
    found: set[int] = set()
    for config in configs:
        for name, value in vars(config).items():
            if SPECIAL.search(name):
                found.update(v for v in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(v, int))
    return frozenset(found)

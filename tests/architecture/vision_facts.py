"""What the tests of torchvision's models share: each of the 121 built once, without touching memory for its weights."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import torch
from torch import nn

from sizer.architecture.checkpointing import repeated_blocks
from sizer.architecture.module_census import take_census
from sizer.architecture.torchvision_models import vision_blueprint
from sizer.report.census import Census


@contextlib.contextmanager
def no_initialisation() -> Iterator[None]:
    """Real modules whose weights nobody writes: their pages are never touched, so 645 M parameters cost nothing."""
    with contextlib.ExitStack() as stack:
        for name in vars(nn.init):
            if name.endswith("_") and not name.startswith("_"):
                stack.enter_context(mock.patch.object(nn.init, name, lambda tensor, *args, **kwargs: tensor))
        yield


def build_on_meta(name: str) -> nn.Module:
    """The module of a torchvision name at its usual size, on meta (RegNet reads values when it is built: moved there)."""
    blueprint = vision_blueprint(name, image_size=None, checkpointing=False)
    if name.startswith("regnet"):
        with no_initialisation():
            return blueprint.build().to("meta")
    with torch.device("meta"):
        return blueprint.build()


@functools.cache
def facts(name: str) -> tuple[Census, dict[str, int]]:
    """The census of a torchvision model and its repeated blocks by class."""
    module = build_on_meta(name)
    return take_census(module, name=name), dict(Counter(type(block).__name__ for block in repeated_blocks(module)))

"""timm's models as blueprints: every name of `timm.list_models()`, with or without a tag of weights, built without weights.

A name means the result of `timm.create_model(name, pretrained=False)`. Its `pretrained_cfg` has the channels, the image's size,
whether that is fixed, and the number of classes.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import timm
import torch
from timm.models import get_pretrained_cfg, is_model
from torch import Tensor, nn

from sizer.architecture.blueprint import Blueprint, Example, stand_in_loss
from sizer.architecture.vision_inputs import Size, Task, batch_of_one_refused, classification, format_size, predict
from sizer.base.errors import RequestError, quote, suggest
from sizer.catalogue.sources import close_name
from sizer.query.request import Request

LISTED = "`python -m sizer models` lists them"
ONE_VALUE = "Expected more than 1 value per channel"  # torch/nn/functional.py (2.15), _verify_batch_size


def timm_blueprint(
    name: str, *, image_size: Size | None, checkpointing: bool, classes: int | None = None
) -> Blueprint:
    """Return the blueprint of a timm model, at an image size (height, width in pixels), with `classes` classes.

    Size and classes default to the model's own. Raises RequestError if timm has no such name, the model does not support that
    image size, or `checkpointing` is requested and not supported; the blueprint's `example` raises it for a batch of one that
    cannot be trained on.
    """
    facts = _facts(name)
    channels, *usual = facts.input_size
    size = image_size or tuple(usual)
    build = partial(timm.create_model, name, pretrained=False, **build_options(name, size, classes=classes))
    told_apart = classes or facts.num_classes
    task = classification(classes=told_apart, channels=channels) if told_apart else _features(channels)
    module = _on_meta(build, name, size, task, check=size != tuple(usual))
    if checkpointing and not _checkpoints(module):
        raise RequestError(f"checkpointing for {name}", given="1", allowed="0", todo="timm offers none for this model")

    @cache
    def trains_on_one() -> bool:
        return _trains_on_one(module, task, size)

    def example(batch: int, training: bool) -> Example:
        if training and batch == 1 and not trains_on_one():
            raise batch_of_one_refused(name, size)
        return task.example(batch, training, size)

    class_name = type(module).__name__
    return Blueprint(
        name=name,
        class_name=class_name,
        build=build,
        example=example,
        loss=task.loss,
        predict=predict,
        checkpoint=_checkpoint if _checkpoints(module) else None,
        image_size=size,
        notes=()
        if told_apart
        else (f"{name} has no classifier; the sum of the means of its outputs is used as its loss.",),
    )


def build_options(name: str, size: Size, *, classes: int | None = None) -> dict[str, Any]:
    """Return the arguments of `timm.create_model` besides the name, for images of a size (height, width in pixels)."""
    facts = _facts(name)
    # A model of a fixed size is built for it: positions and windows follow.
    options = {"img_size": size} if facts.fixed_input_size and size != tuple(facts.input_size[1:]) else {}
    return options if classes is None else options | {"num_classes": classes}


def from_request(request: Request, config: None) -> Blueprint:
    """Return the blueprint of the timm model that a request names."""
    size, checkpointing = request.image_size, request.checkpointing
    return timm_blueprint(request.name, image_size=size, checkpointing=checkpointing, classes=request.classes)


def list_names() -> list[dict[str, str]]:
    """Return every architecture of timm by "name", without tags, with the module of timm that defines it as "family"."""
    families = {name: family for family in timm.list_modules() for name in timm.list_models(module=family)}
    return [{"name": name, "family": families[name]} for name in timm.list_models()]


def _facts(name: str) -> timm.models.PretrainedCfg:
    """Return timm's facts on a name. Raises RequestError if it has no such architecture or tag."""
    architecture, _, tag = name.partition(".")
    if not is_model(architecture):
        raise RequestError(
            "arch: unknown timm model",
            given=quote(name),
            allowed=f"the {len(timm.list_models())} names of timm.list_models(), with a tag of timm.list_pretrained() or none",
            todo=close_name("timm", architecture) or suggest(architecture, timm.list_models()) or LISTED,
        )
    tags = [known.partition(".")[2] for known in timm.list_pretrained(f"{architecture}.*")]
    if tag and tag not in tags:
        allowed = ", ".join(tags) or "none: timm has no weights of it"
        raise RequestError(f"arch: unknown tag of timm's {architecture}", given=quote(tag), allowed=allowed,
                           todo=suggest(tag, tags) or "leave the tag out")  # fmt: skip
    return get_pretrained_cfg(name)


def _on_meta(build: partial, name: str, size: Size, task: Task, *, check: bool) -> nn.Module:
    """Return the module on meta. Raises RequestError if it cannot be built for, or `check`ed at, that image size."""
    with torch.device("meta"), torch.no_grad():
        if not check:
            return build()
        try:
            module = build()
            predict(module.eval(), task.example(2, False, size))
        except Exception as error:  # any error of a model on an unsupported size
            reason = next(iter(str(error).splitlines()), type(error).__name__)[:160]
            raise RequestError(f"image for {name}", given=format_size(size), allowed="a size that this model takes",
                               todo=f"leave `image` out (the model says: {reason})") from error  # fmt: skip
    return module


def _trains_on_one(module: nn.Module, task: Task, size: Size) -> bool:
    """Return whether no batch norm layer sees a single value per channel in a batch of one."""
    with torch.device("meta"), torch.no_grad():
        try:
            predict(module.train(), task.example(1, True, size))
        except ValueError as error:
            if ONE_VALUE not in str(error):
                raise
            return False
    return True


def _checkpoints(module: nn.Module) -> bool:
    try:
        _checkpoint(module)
    except (AttributeError, AssertionError):  # it has no switch, or one that only raises
        return False
    module.set_grad_checkpointing(False)
    return True


def _checkpoint(module: nn.Module) -> None:
    module.set_grad_checkpointing(True)


def _features(channels: int) -> Task:
    """Return the task of a model without classifier: images (B, C, H, W) to features of any shape; a stand-in loss."""
    images = classification(classes=1, channels=channels)

    def loss(module: nn.Module, example: Example) -> Tensor:
        return stand_in_loss(predict(module, example), module)

    return Task(example=images.example, loss=loss)

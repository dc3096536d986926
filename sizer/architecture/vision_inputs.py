"""Inputs and targets of torchvision's models: image sizes, example inputs and targets of one step, and losses.

The limits of sizes were found by running every architecture on meta tensors at each size (torchvision 0.29); most equal the
`min_size` that torchvision publishes with its weights, and the tests try both sides of every one.

Shapes: B samples, T frames, H x W pixels, K classes. Pixels are zeros (only their shape counts), except for detection: there
their values decide which boxes survive.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models import get_model_weights

from sizer.architecture.blueprint import Example
from sizer.base.errors import RequestError

Size = tuple[int, int]

COCO_SIZE = (480, 640)  # the most frequent image size of COCO
FLYING_CHAIRS_CROP = (368, 496)  # the first training crop of RAFT (torchvision references/optical_flow/train.py)

# Built without weights vit_h_14 has positions for 224 pixels; its published weights are for 518.
_USUAL_BY_NAME = {"vit_h_14": (224, 224)}
_USUAL_BY_TASK = {"detection": COCO_SIZE, "optical_flow": FLYING_CHAIRS_CROP}


def usual_size(name: str, task: str) -> Size:
    """Return the usual image size (height, width in pixels) of a torchvision model.

    It comes from the preprocessing of its published weights; if that keeps the image's own size, from a training set.
    """
    if name in _USUAL_BY_NAME:
        return _USUAL_BY_NAME[name]
    if task in _USUAL_BY_TASK:
        return _USUAL_BY_TASK[task]
    preprocessing = get_model_weights(name).DEFAULT.transforms.keywords
    size = preprocessing.get("crop_size") or preprocessing["resize_size"]
    return (size, size) if isinstance(size, int) else tuple(size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRule:
    """Image sizes (height, width) that a model accepts, as a function and as text."""

    accepts: Callable[[int, int], bool]
    allowed: str


def check_size(name: str, class_name: str, size: Size) -> None:
    """Raise RequestError if the model does not support this size, with the sizes that it supports."""
    rule = _rule(name, class_name)
    if not rule.accepts(*size):
        raise RequestError(
            f"image for {name}",
            given=format_size(size),
            allowed=rule.allowed,
            todo="choose such a size or leave `image` out",
        )


def format_size(size: Size) -> str:
    """Return height and width in pixels as in the query string: "480x640"."""
    return f"{size[0]}x{size[1]}"


def check_training(name: str, class_name: str, size: Size, batch: int) -> None:
    """Raise RequestError if a model cannot be trained at this size, or not on a batch of one."""
    least = _TRAINING_MINIMUM.get(class_name, 1)
    if min(size) < least:
        raise RequestError(
            f"image for training {name}",
            given=format_size(size),
            allowed=f"at least {least}x{least} pixels, which its auxiliary head needs",
            todo="choose such a size, or mode=inference",
        )
    if batch == 1 and needs_two_samples(name, class_name, size):
        raise batch_of_one_refused(name, size)


def batch_of_one_refused(name: str, size: Size) -> RequestError:
    """Return the error for a batch of 1 if a batch norm layer would see one value per channel."""
    return RequestError(f"batch for training {name} at {format_size(size)} pixels", given="1", allowed="at least 2",
                        todo="choose 2 or more: batch norm would see one value per channel, which PyTorch refuses")  # fmt: skip


def needs_two_samples(name: str, class_name: str, size: Size) -> bool:
    """Return whether a batch norm layer sees a single position per sample, so that training on a batch of 1 raises."""
    largest = _SINGLE_POSITION.get(class_name.removeprefix("Quantizable"), 0)
    return name in _ALWAYS_SINGLE_POSITION or max(size) <= largest


def at_least(pixels: int) -> SizeRule:
    """Return the size rule of networks that halve the image repeatedly."""
    return SizeRule(accepts=lambda h, w: min(h, w) >= pixels, allowed=f"at least {pixels}x{pixels} pixels")


def _rule(name: str, class_name: str) -> SizeRule:
    if class_name == "VisionTransformer":
        patch = int(name.rsplit("_", 1)[1])
        return SizeRule(
            accepts=lambda h, w: h == w and h % patch == 0, allowed=f"squares of a multiple of {patch} pixels"
        )
    if class_name in _RULES:
        return _RULES[class_name]
    return at_least(max(get_model_weights(name).DEFAULT.meta["min_size"]))


# Models for which torchvision's `min_size` is not the limit. MaxVit cuts the image into 4-pixel steps, then into 7 x 7 windows at
# four scales (1, 2, 4, 8): 4 * 7 * 8 = 224; its builder fails on rectangles. MViT's builder fixes 56 x 56 steps of 4 pixels. S3D
# ends in a 7 x 7 pool after dividing by 32, rounding up four times and down once: 16 * 13 + 1 = 209. RAFT halves its 8-pixel grid
# three times, down to 2 x 2. Swin pads everything from one 4-pixel patch on.
_RULES = {
    "EfficientNet": at_least(1),
    "SwinTransformer": at_least(4),
    "MaxVit": SizeRule(
        accepts=lambda h, w: h == w and math.ceil(h / 4) % 56 == 0,
        allowed="squares of a multiple of 224 pixels, or up to 3 pixels less",
    ),
    "MViT": SizeRule(
        accepts=lambda h, w: math.ceil(h / 4) == 56 and math.ceil(w / 4) == 56, allowed="221 to 224 pixels each way"
    ),
    "S3D": at_least(209),
    "RAFT": SizeRule(
        accepts=lambda h, w: min(h, w) >= 128 and h % 8 == 0 and w % 8 == 0,
        allowed="at least 128x128 pixels, both divisible by 8",
    ),
}

# Inception's auxiliary head runs a 5 x 5 convolution over 5 x 5 pooled positions: 17 x 17 before the pool, 299 pixels.
_TRAINING_MINIMUM = {"Inception3": 299, "QuantizableInception3": 299}

# The largest image (both sides) that leaves one position per channel before some batch norm.
_SINGLE_POSITION = {
    "DenseNet": 60, "EfficientNet": 32, "FCN": 8, "GoogLeNet": 46, "Inception3": 346, "LRASPP": 16, "MNASNet": 32,
    "MobileNetV2": 32, "MobileNetV3": 32, "RegNet": 32, "ResNet": 32, "ShuffleNetV2": 32,
}  # fmt: skip

# DeepLab pools the whole image, and SSDLite's 320 pixels shrink to one position, for any image size.
_ALWAYS_SINGLE_POSITION = {
    "deeplabv3_mobilenet_v3_large",
    "deeplabv3_resnet101",
    "deeplabv3_resnet50",
    "ssdlite320_mobilenet_v3_large",
}


# -------------------------------------------------------------------------------------------------------- vision tasks


# Weights of the auxiliary classifiers' losses: GoogLeNet 0.3 (arXiv:1409.4842, section 5), Inception v3 0.4 (PyTorch's
# fine-tuning tutorial), segmentation 0.5 (torchvision references/segmentation/train.py, read at torchvision 0.29).
GOOGLENET_AUXILIARY, INCEPTION_AUXILIARY, SEGMENTATION_AUXILIARY = 0.3, 0.4, 0.5

# An image of COCO has 7.7 annotated objects on average (arXiv:1405.0312, section 5); 8 fill a 4 x 2 grid.
OBJECTS_PER_IMAGE = 8
KEYPOINTS = 17

# RAFT's sequence loss (arXiv:2003.12039, section 3.3): weight 0.8 per earlier prediction; flows of 400 pixels or more are
# left out (torchvision references/optical_flow/utils.py).
FLOW_GAMMA, FLOW_LIMIT = 0.8, 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """`example(batch, training, (height, width))` makes the inputs of one step; `loss(module, example)` its scalar."""

    example: Callable[[int, bool, Size], Example]
    loss: Callable[[nn.Module, Example], Tensor]


def _zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return zeros that store a single value for any number of images: a trace reads none of them."""
    return torch.zeros((), dtype=dtype).expand(shape)


def predict(module: nn.Module, example: Example) -> Any:
    """Return the module's output for the example's inputs."""
    return module(*example.args, **example.kwargs)


def classification(
    *, classes: int, channels: int = 3, frames: int | None = None, auxiliary_weight: float = 0.0
) -> Task:
    """Return the task of cross entropy over images (B, C, H, W), or clips (B, C, T, H, W) if `frames` is given; targets (B,).

    A module that returns (logits, auxiliary logits, ...) adds `auxiliary_weight` times the loss of each auxiliary output.
    """

    def example(batch: int, training: bool, size: Size) -> Example:
        pixels = _zeros(batch, channels, *([frames] if frames else []), *size)
        return Example(args=(pixels,), targets=torch.arange(batch) % classes if training else None)

    def loss(module: nn.Module, example: Example) -> Tensor:
        output = predict(module, example)
        logits, *others = output if isinstance(output, tuple) else (output,)
        total = functional.cross_entropy(logits, example.targets)
        for other in others:
            total = total + auxiliary_weight * functional.cross_entropy(other, example.targets)
        return total

    return Task(example=example, loss=loss)


def segmentation() -> Task:
    """Return the task of cross entropy per pixel over images (B, 3, H, W), targets (B, H, W).

    An auxiliary head's loss counts half.
    """

    def example(batch: int, training: bool, size: Size) -> Example:
        targets = _zeros(batch, *size, dtype=torch.int64) if training else None
        return Example(args=(_zeros(batch, 3, *size),), targets=targets)

    def loss(module: nn.Module, example: Example) -> Tensor:
        output = predict(module, example)
        # 255 marks pixels without a label: torchvision references/segmentation/train.py
        total = functional.cross_entropy(output["out"], example.targets, ignore_index=255)
        if "aux" in output:
            auxiliary = functional.cross_entropy(output["aux"], example.targets, ignore_index=255)
            total = total + SEGMENTATION_AUXILIARY * auxiliary
        return total

    return Task(example=example, loss=loss)


def detection(*, classes: int, masks: bool = False, keypoints: bool = False) -> Task:
    """Return the task of the module's own losses over B images (3, H, W) with 8 boxes each.

    Masks or keypoints are added if requested.
    """

    def example(batch: int, training: bool, size: Size) -> Example:
        generator = torch.Generator().manual_seed(0)
        images = [torch.rand(3, *size, generator=generator) for _ in range(batch)]
        targets = (
            [_objects(size, classes, masks=masks, keypoints=keypoints) for _ in range(batch)] if training else None
        )
        return Example(args=(images,), targets=targets)

    def loss(module: nn.Module, example: Example) -> Tensor:
        return sum(module(*example.args, example.targets).values())

    return Task(example=example, loss=loss)


def _objects(size: Size, classes: int, *, masks: bool, keypoints: bool) -> dict[str, Tensor]:
    """Return the targets of one image: a grid of boxes, 4 across and 2 down, that tile it.

    boxes (8, 4) as x1, y1, x2, y2; labels (8,) in 1..classes-1 (0 is the background); masks (8, H, W) of 0 and 1; keypoints (8,
    17, 3) as x, y, visible: all at the box's centre.
    """
    height, width = size
    edges = [
        (width * column / 4, height * row / 2, width * (column + 1) / 4, height * (row + 1) / 2)
        for row in range(2)
        for column in range(4)
    ]
    boxes = torch.tensor(edges, dtype=torch.float32)
    objects = {"boxes": boxes, "labels": torch.arange(OBJECTS_PER_IMAGE) % (classes - 1) + 1}
    if masks:
        objects["masks"] = torch.zeros(OBJECTS_PER_IMAGE, height, width, dtype=torch.uint8)
        for mask, (left, top, right, bottom) in zip(objects["masks"], boxes.int().tolist(), strict=True):
            mask[top:bottom, left:right] = 1
    if keypoints:
        centres = (boxes[:, None, :2] + boxes[:, None, 2:]) / 2
        visible = torch.ones(OBJECTS_PER_IMAGE, KEYPOINTS, 1)
        objects["keypoints"] = torch.cat([centres.expand(-1, KEYPOINTS, -1), visible], dim=2)
    return objects


def optical_flow() -> Task:
    """Return the task of RAFT's sequence loss over pairs of images (B, 3, H, W).

    Targets: flows (B, 2, H, W) and valid pixels (B, H, W).
    """

    def example(batch: int, training: bool, size: Size) -> Example:
        pair = (_zeros(batch, 3, *size), _zeros(batch, 3, *size))
        targets = (_zeros(batch, 2, *size), torch.ones(batch, *size, dtype=torch.bool)) if training else None
        return Example(args=pair, targets=targets)

    def loss(module: nn.Module, example: Example) -> Tensor:
        predictions = torch.stack(predict(module, example))  # one refined flow per update: (12, B, 2, H, W)
        flow, valid = example.targets
        counted = (valid & (flow.square().sum(dim=1).sqrt() < FLOW_LIMIT))[:, None]
        errors = ((predictions - flow).abs() * counted).mean(dim=(1, 2, 3, 4))
        ages = torch.arange(len(predictions) - 1, -1, -1, device=errors.device)
        return (errors * FLOW_GAMMA**ages).sum()

    return Task(example=example, loss=loss)

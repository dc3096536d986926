"""Which image sizes torchvision's models take: their usual one, and the rules for others.

The limits were found by running every architecture on meta tensors at each size (torchvision 0.29); most equal the
`min_size` that torchvision publishes with its weights, and the tests try both sides of every one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torchvision.models import get_model_weights

from sizer.base.errors import RequestError

Size = tuple[int, int]

COCO_SIZE = (480, 640)  # the most frequent image size of COCO
FLYING_CHAIRS_CROP = (368, 496)  # the first training crop of RAFT (torchvision references/optical_flow/train.py)

# Built without weights vit_h_14 has positions for 224 pixels; its published weights are for 518.
_USUAL_BY_NAME = {"vit_h_14": (224, 224)}
_USUAL_BY_TASK = {"detection": COCO_SIZE, "optical_flow": FLYING_CHAIRS_CROP}


def usual_size(name: str, task: str) -> Size:
    """The image size (height, width in pixels) that a torchvision model is commonly run at.

    From the preprocessing of its published weights; where that keeps the image's own size, a training set's.
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
    """Whether a model takes an image (height, width), and what it takes as text."""

    accepts: Callable[[int, int], bool]
    allowed: str


def check_size(name: str, class_name: str, size: Size) -> None:
    """Raise RequestError, naming the sizes that the model takes, where it does not take this one."""
    rule = _rule(name, class_name)
    if not rule.accepts(*size):
        raise RequestError(
            f"image for {name}",
            given=format_size(size),
            allowed=rule.allowed,
            todo="choose such a size or leave `image` out",
        )


def format_size(size: Size) -> str:
    """Height and width in pixels as the query string writes them: "480x640"."""
    return f"{size[0]}x{size[1]}"


def check_training(name: str, class_name: str, size: Size, batch: int) -> None:
    """Raise RequestError where a model that takes this size cannot be trained on it, or not one by one."""
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
    """The error of a batch of 1 where a batch norm layer would see one value per channel."""
    return RequestError(f"batch for training {name} at {format_size(size)} pixels", given="1", allowed="at least 2",
                        todo="choose 2 or more: batch norm would see one value per channel, which PyTorch refuses")  # fmt: skip


def needs_two_samples(name: str, class_name: str, size: Size) -> bool:
    """Whether a batch norm layer sees a single position per sample, so that training on a batch of 1 raises."""
    largest = _SINGLE_POSITION.get(class_name.removeprefix("Quantizable"), 0)
    return name in _ALWAYS_SINGLE_POSITION or max(size) <= largest


def at_least(pixels: int) -> SizeRule:
    """The rule of networks that halve the image until nothing is left of it."""
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


# Where torchvision's `min_size` is not the limit. MaxVit cuts the image into 4-pixel steps, then into 7 x 7 windows at
# four scales (1, 2, 4, 8): 4 * 7 * 8 = 224; its builder fails on rectangles. MViT's builder fixes 56 x 56 steps of 4
# pixels. S3D ends in a 7 x 7 pool after dividing by 32, rounding up four times and down once: 16 * 13 + 1 = 209. RAFT
# halves its 8-pixel grid three times, down to 2 x 2. Swin pads everything from one 4-pixel patch on.
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

# DeepLab pools the whole image, and SSDLite's 320 pixels shrink to one position, whatever the image's size.
_ALWAYS_SINGLE_POSITION = {
    "deeplabv3_mobilenet_v3_large",
    "deeplabv3_resnet101",
    "deeplabv3_resnet50",
    "ssdlite320_mobilenet_v3_large",
}

"""torchvision's models as blueprints: every name of `torchvision.models.list_models()`, built without weights.

A name means the result of `torchvision.models.get_model(name, weights=None, weights_backbone=None)`, with one addition: FCN and
DeepLab have their auxiliary head, as in torchvision's own training recipes and published weights.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import nn
from torchvision.models import WeightsEnum, get_model, get_model_builder, list_models

from sizer.architecture.blueprint import Blueprint, Example
from sizer.architecture.checkpointing import checkpoint_blocks
from sizer.architecture.vision_inputs import (
    GOOGLENET_AUXILIARY,
    INCEPTION_AUXILIARY,
    OBJECTS_PER_IMAGE,
    Task,
    check_size,
    check_training,
    classification,
    detection,
    format_size,
    needs_two_samples,
    optical_flow,
    predict,
    segmentation,
    usual_size,
)
from sizer.base.errors import RequestError, quote, suggest
from sizer.catalogue.sources import close_name
from sizer.query.request import Request

Size = tuple[int, int]

# Frames of a training clip: torchvision references/video_classification/README.md (S3D), else the `clip_len` or
# `min_temporal_size` that torchvision publishes with the weights.
FRAMES = {"MViT": 16, "S3D": 64, "SwinTransformer3d": 32, "VideoResNet": 16}

# Detection models resize each image: the short side to the first number, unless the long side would pass the second.
_RESIZE = {"fasterrcnn_mobilenet_v3_large_320_fpn": (320, 640)}
_FIXED_SIZE = {"ssd300_vgg16": (300, 300), "ssdlite320_mobilenet_v3_large": (320, 320)}
_DEFAULT_RESIZE = (800, 1333)

ALL_LAYERS = 5  # number of layers in a backbone that trains as a whole

_WITHOUT_BLOCKS = {"AlexNet", "VGG"}  # and SSD on VGG: plain stacks of layers


def vision_blueprint(
    name: str,
    *,
    image_size: Size | None,
    checkpointing: bool,
    classes: int | None = None,
    trainable_layers: int | None = None,
) -> Blueprint:
    """Return the blueprint of a torchvision model, at an image size (height, width in pixels) or its own usual one.

    `classes` is the builder's `num_classes`, `trainable_layers` its `trainable_backbone_layers`, each None for its own choice
    without weights.

    Raises:
        RequestError: torchvision does not have the name. The model does not support that image size, has no classes, no
            backbone to freeze, or no repeated blocks for `checkpointing`. The blueprint's `example` raises it for a batch that
            cannot be trained on.
    """
    if name not in list_models():
        raise RequestError(
            "arch: unknown torchvision model",
            given=quote(name),
            allowed=f"the {len(list_models())} names of torchvision.models.list_models()",
            todo=close_name("torchvision", name) or suggest(name, list_models()) or "`python -m sizer models` lists them",
        )
    class_name, task_name = class_name_of(name), task_name_of(name)
    size = image_size or usual_size(name, task_name)
    check_size(name, class_name, size)
    checkpoint = None if class_name in _WITHOUT_BLOCKS or name == "ssd300_vgg16" else checkpoint_blocks
    if checkpointing and checkpoint is None:
        raise RequestError(f"checkpointing for {name}", given="1", allowed="0",
                           todo="it is a plain stack of layers without repeated blocks to run again")  # fmt: skip
    check_options(name, task_name, classes=classes, trainable_layers=trainable_layers)
    task = _task(task_name, class_name, classes)
    options = build_options(name, size, classes=classes, trainable_layers=trainable_layers)

    def example(batch: int, training: bool) -> Example:
        if training:
            check_training(name, class_name, size, batch)
        return task.example(batch, training, size)

    return Blueprint(
        name=name,
        class_name=class_name,
        build=_builder(name, task_name, options),
        example=example,
        loss=task.loss,
        predict=predict,
        checkpoint=checkpoint,
        sequence_length=FRAMES.get(class_name),
        image_size=size,
        one_by_one=task_name == "detection",
        notes=tuple(_notes(name, class_name, task_name, size, trainable_layers)),
        uncounted=_UNCOUNTED.get(task_name, ()),
    )


def from_request(request: Request, config: None) -> Blueprint:
    """Return the blueprint of the torchvision model that a request names."""
    return vision_blueprint(
        request.name,
        image_size=request.image_size,
        checkpointing=request.checkpointing,
        classes=request.classes,
        trainable_layers=request.trainable_layers,
    )


def list_names() -> list[dict[str, str]]:
    """Return every model of torchvision by "name", with the module of torchvision that defines it as "family"."""
    prefix = "torchvision.models."
    return [{"name": name, "family": get_model_builder(name).__module__.removeprefix(prefix)} for name in list_models()]


def class_name_of(name: str) -> str:
    """Return the name of the class in a builder's return annotation."""
    annotation = inspect.signature(get_model_builder(name)).return_annotation
    return annotation if isinstance(annotation, str) else annotation.__name__


def task_name_of(name: str) -> str:
    """Return a builder's folder in torchvision.models; models at the top level and quantizable ones classify."""
    folder = get_model_builder(name).__module__.split(".")[2]
    return folder if folder in ("detection", "optical_flow", "segmentation", "video") else "classification"


def check_options(name: str, task_name: str, *, classes: int | None, trainable_layers: int | None) -> None:
    """Raise RequestError for options that the builder of a name does not take."""
    if classes is not None and task_name == "optical_flow":
        raise RequestError(f"classes for {name}", given=str(classes), allowed="none", todo="leave it out: it predicts a flow")
    if classes == 1 and task_name == "detection":
        raise RequestError(
            f"classes for {name}", given="1", allowed="2 or more", todo="count the background, too: classes=2 for one kind"
        )
    if trainable_layers is not None and "trainable_backbone_layers" not in _parameters(name):
        raise RequestError(
            f"trainable_layers for {name}",
            given=str(trainable_layers),
            allowed="a torchvision detection model",
            todo="leave it out, or ask for train=head",
        )


def _task(task_name: str, class_name: str, classes: int | None) -> Task:
    match task_name:
        case "detection":  # classes count the background; the builders' defaults
            keypoints = class_name == "KeypointRCNN"  # only for persons
            usual = 2 if keypoints else 91
            return detection(classes=classes or usual, masks=class_name == "MaskRCNN", keypoints=keypoints)
        case "optical_flow":
            return optical_flow()
        case "segmentation":
            return segmentation()
        case "video":
            return classification(classes=classes or 400, frames=FRAMES[class_name])
    return classification(classes=classes or 1000, auxiliary_weight=auxiliary_weight_of(class_name))


def auxiliary_weight_of(class_name: str) -> float:
    """Return the weight of each auxiliary classifier's loss, 0 for a class without any."""
    heads = {"GoogLeNet": GOOGLENET_AUXILIARY, "Inception3": INCEPTION_AUXILIARY}
    return heads.get(class_name.removeprefix("Quantizable"), 0.0)


def _parameters(name: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(get_model_builder(name)).parameters


def build_options(
    name: str, size: Size, *, classes: int | None = None, trainable_layers: int | None = None
) -> dict[str, Any]:
    """Return the arguments of `torchvision.models.get_model` besides the name and `weights=None`.

    With fewer than all `trainable_layers` it is the builder's own pretrained backbone, whose first layers and, in most
    builders, batch norm are frozen.
    """
    class_name = class_name_of(name)
    options: dict[str, Any] = {}
    if classes is not None:
        options["num_classes"] = classes
    if trainable_layers is not None and trainable_layers < ALL_LAYERS:
        options["trainable_backbone_layers"] = trainable_layers
    elif "weights_backbone" in _parameters(name):
        options["weights_backbone"] = None
    if auxiliary_weight_of(class_name):
        options["init_weights"] = False  # slow, and only values
    if class_name in ("FCN", "DeepLabV3"):
        options["aux_loss"] = True
    if class_name == "VisionTransformer":
        options["image_size"] = size[0]
    if class_name == "MaxVit":
        options["input_size"] = size
    return options


def _builder(name: str, task_name: str, options: Mapping[str, Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with _weights_left_out():
            module = get_model(name, weights=None, **options)
        if task_name == "detection":
            # In training the image size is drawn at random from a list: the largest is always used instead.
            module.transform.torch_choice = max
        return module

    return build


@contextmanager
def _weights_left_out() -> Iterator[None]:
    """Make torchvision build models with pretrained weights without downloading or loading any, within the context."""
    with (
        mock.patch.object(WeightsEnum, "get_state_dict", lambda weights, *args, **kwargs: {}),
        mock.patch.object(nn.Module, "load_state_dict", lambda module, *args, **kwargs: None),
    ):
        yield


def _notes(name: str, class_name: str, task_name: str, size: Size, trainable_layers: int | None) -> list[str]:
    """Return choices made on the user's behalf, one sentence each."""
    notes = []
    if needs_two_samples(name, class_name, size):
        notes.append(
            f"{name} cannot be trained on a batch of 1 at {format_size(size)} pixels: a batch norm layer would see one "
            "value per channel, which PyTorch refuses."
        )
    if weight := auxiliary_weight_of(class_name):
        dropped = "; torchvision drops them when it loads published weights" if "GoogLeNet" in class_name else ""
        notes.append(
            f"Built with its auxiliary heads, which training counts with weight {weight} in the loss{dropped}."
        )
    if class_name.startswith("Quantizable"):
        notes.append("The float32 model that quantization starts from (quantize=False).")
    if task_name == "segmentation" and class_name != "LRASPP":
        notes.append(
            "Built with the auxiliary head (aux_loss=True), as torchvision's training recipes and published weights "
            "have it; it runs in inference too."
        )
    if task_name == "video":
        notes.append(f"Clips of {FRAMES[class_name]} frames.")
    if task_name == "optical_flow":
        notes.append("A sample is a pair of images; 12 flow updates, each of them in the loss.")
    if task_name == "detection":
        notes += _detection_notes(name, class_name, size, trainable_layers)
    if name == "vit_h_14" and size == (224, 224):
        notes.append("Positions for 224 pixels, as torchvision builds it; its published weights are for image=518.")
    return notes


def _detection_notes(name: str, class_name: str, size: Size, trainable_layers: int | None) -> list[str]:
    inside = resized(name, size)
    padded = "" if name in _FIXED_SIZE else f" and pads it to {format_size(_padded(inside))}"
    notes = [
        f"The model resizes each {format_size(size)} image to {format_size(inside)}{padded}.",
        f"Each image has {OBJECTS_PER_IMAGE} annotated objects; an image of COCO has 7.7 on average.",
        "Built from scratch: every layer of the backbone trains. With a pretrained backbone torchvision freezes its first layers "
        "and most builders its batch norm, which takes less: trainable_layers=3 asks for it."
        if trainable_layers in (None, ALL_LAYERS)
        else f"Built as with a pretrained backbone with {trainable_layers} trainable layers; most builders freeze its batch norm.",
    ]
    if class_name == "KeypointRCNN":
        notes.append("Training draws the short side from 640 to 800 pixels; this counts 800.")
    return notes


def resized(name: str, size: Size) -> Size:
    """Return the size (height, width in pixels) to which a detection model resizes one image, before padding.

    Source: GeneralizedRCNNTransform.
    """
    if name in _FIXED_SIZE:
        return _FIXED_SIZE[name]
    short, long = _RESIZE.get(name, _DEFAULT_RESIZE)
    scale = min(short / min(size), long / max(size))
    return math.floor(size[0] * scale), math.floor(size[1] * scale)


def _padded(size: Size) -> Size:
    return math.ceil(size[0] / 32) * 32, math.ceil(size[1] / 32) * 32


_UNCOUNTED = {
    "detection": (
        "How many boxes survive score thresholds and non-maximum suppression depends on the images. The estimate counts the "
        "maximum that the model keeps, so a real run usually needs less.",
    )
}

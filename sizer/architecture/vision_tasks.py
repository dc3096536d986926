"""What torchvision's models are trained for: example inputs and targets of one step, and the loss users minimise.

Shapes: B samples, T frames, H x W pixels, K classes. Pixels are zeros (only their shape counts), except for detection,
where their values decide which boxes survive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sizer.architecture.blueprint import Example

Size = tuple[int, int]

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
    """Zeros of which one is held, however many pictures there are: a trace reads none of them."""
    return torch.zeros((), dtype=dtype).expand(shape)


def predict(module: nn.Module, example: Example) -> Any:
    """What the module returns for the example's inputs."""
    return module(*example.args, **example.kwargs)


def classification(
    *, classes: int, channels: int = 3, frames: int | None = None, auxiliary_weight: float = 0.0
) -> Task:
    """Cross entropy over images (B, C, H, W), or clips (B, C, T, H, W) where `frames` is given; targets (B,).

    A module that returns (logits, auxiliary logits, ...) adds `auxiliary_weight` times the loss of each of the others.
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
    """Cross entropy per pixel over images (B, 3, H, W), targets (B, H, W); an auxiliary head's loss counts half."""

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
    """Sum of the module's own losses over B images (3, H, W), each with 8 boxes, and masks or keypoints where asked."""

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
    """Targets of one image: a grid of boxes, 4 across and 2 down, that tile it.

    boxes (8, 4) as x1, y1, x2, y2; labels (8,) in 1..classes-1 (0 is the background); masks (8, H, W) of 0 and 1;
    keypoints (8, 17, 3) as x, y, visible: all at the box's centre.
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
    """RAFT's sequence loss over pairs of images (B, 3, H, W); targets are flows (B, 2, H, W) and valid pixels (B, H, W)."""

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

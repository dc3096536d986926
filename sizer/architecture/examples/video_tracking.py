"""Recipes for videos whose objects are followed from frame to frame: SAM 2 Video and its kin."""

from __future__ import annotations

import torch
from torch import Tensor

from sizer.architecture.examples import vision
from sizer.architecture.examples.example_spec import ExampleSpec, Recipe
from sizer.architecture.examples.tensors import floats, ones

FRAMES = 2  # the first shows the objects, in the second the memory of the first is read


def followed_objects(spec: ExampleSpec) -> dict[str, Tensor]:
    """Two frames (2, channels, height, width), and in the first a point on each of as many objects as there are samples."""
    height, width = spec.sides
    return {
        "frames": floats(FRAMES, vision.channels(spec), height, width),
        "input_points": torch.tensor([width / 2, height / 2]).repeat(spec.batch, 1, 1, 1),
        "input_labels": ones(spec.batch, 1, 1),
    }


FAMILIES: dict[str, Recipe] = dict.fromkeys(("edgetam_video", "sam2_video", "sam3_tracker_video"), followed_objects)

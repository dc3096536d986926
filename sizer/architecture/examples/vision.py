"""Recipes for images, videos and what comes with them: masks, grids, prompts."""

from __future__ import annotations

import torch
from torch import Tensor

from sizer.architecture.examples.example_spec import ExampleSpec, read
from sizer.architecture.examples.tensors import floats

BOXES = 5  # objects in every image of a detection or segmentation example
VIDEO_FRAMES = 8


def image(spec: ExampleSpec) -> Tensor:
    """Pixels (batch, channels, height, width)."""
    return floats(spec.batch, channels(spec), *spec.sides)


def video(spec: ExampleSpec) -> Tensor:
    """Frames of pixels (batch, frames, channels, height, width)."""
    return floats(spec.batch, frames(spec), channels(spec), *spec.sides)


def channels(spec: ExampleSpec) -> int:
    """Colour channels of an image, 3 where the config does not say."""
    names = ("num_channels", "in_channels", "in_chans")
    paths = [*names, *(f"vision_config.{name}" for name in names), *(f"backbone_config.{name}" for name in names)]
    found = spec.read(*paths, default=3)
    return found if isinstance(found, int) else 3


def frames(spec: ExampleSpec) -> int:
    """Frames of a video: the config's own number, else 8."""
    return spec.read("num_frames", "vision_config.num_frames", "frames_per_clip", default=VIDEO_FRAMES)


def patches(spec: ExampleSpec) -> int:
    """How many patches an image has along both sides together: height/patch times width/patch."""
    return grid(spec)[0] * grid(spec)[1]


def grid(spec: ExampleSpec) -> tuple[int, int]:
    """Patches along height and width."""
    patch = read(spec.config, "patch_size", "vision_config.patch_size", "encoder_stride", default=16)
    sides = patch if isinstance(patch, (list, tuple)) else (patch, patch)
    return spec.sides[0] // sides[-2], spec.sides[1] // sides[-1]


def hidden_patches(spec: ExampleSpec) -> Tensor | None:
    """Which patches a head has to paint, (batch, patches) bool: every other one; None for a head with another task."""
    if "MaskedImageModeling" not in spec.class_name:
        return None
    return (torch.arange(patches(spec)) % 2 == 0).expand(spec.batch, -1).contiguous()


def boxes(count: int) -> Tensor:
    """Boxes (count, 4) as centre x, centre y, width, height in parts of the image, no two alike."""
    place = (torch.arange(count, dtype=torch.float32) + 1) / (count + 1)
    return torch.stack([place, place, place / 4 + 0.05, place / 4 + 0.05], dim=-1)

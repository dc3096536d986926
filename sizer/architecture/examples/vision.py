"""Recipes for images, videos and what comes with them: masks, grids, prompts."""

from __future__ import annotations

import torch
from torch import Tensor

from sizer.architecture.examples.setting import Setting, read
from sizer.architecture.examples.tensors import floats

BOXES = 5  # objects in every image of a detection or segmentation example
VIDEO_FRAMES = 8


def image(setting: Setting) -> Tensor:
    """Pixels (batch, channels, height, width)."""
    return floats(setting.batch, channels(setting), *setting.image_size)


def video(setting: Setting) -> Tensor:
    """Frames of pixels (batch, frames, channels, height, width)."""
    return floats(setting.batch, frames(setting), channels(setting), *setting.image_size)


def channels(setting: Setting) -> int:
    """Colour channels of an image, 3 where the config does not say."""
    names = ("num_channels", "in_channels", "in_chans")
    paths = [*names, *(f"vision_config.{name}" for name in names), *(f"backbone_config.{name}" for name in names)]
    found = setting.read(*paths, default=3)
    return found if isinstance(found, int) else 3


def frames(setting: Setting) -> int:
    """Frames of a video: the config's own number, else 8."""
    return setting.read("num_frames", "vision_config.num_frames", "frames_per_clip", default=VIDEO_FRAMES)


def patches(setting: Setting) -> int:
    """How many patches an image has along both sides together: height/patch times width/patch."""
    return grid(setting)[0] * grid(setting)[1]


def grid(setting: Setting) -> tuple[int, int]:
    """Patches along height and width."""
    patch = read(setting.config, "patch_size", "vision_config.patch_size", "encoder_stride", default=16)
    sides = patch if isinstance(patch, (list, tuple)) else (patch, patch)
    return setting.image_size[0] // sides[-2], setting.image_size[1] // sides[-1]


def hidden_patches(setting: Setting) -> Tensor | None:
    """Which patches a head has to paint, (batch, patches) bool: every other one; None for a head with another task."""
    if "MaskedImageModeling" not in setting.class_name:
        return None
    return (torch.arange(patches(setting)) % 2 == 0).expand(setting.batch, -1).contiguous()


def boxes(count: int) -> Tensor:
    """Boxes (count, 4) as centre x, centre y, width, height in parts of the image, no two alike."""
    place = (torch.arange(count, dtype=torch.float32) + 1) / (count + 1)
    return torch.stack([place, place, place / 4 + 0.05, place / 4 + 0.05], dim=-1)

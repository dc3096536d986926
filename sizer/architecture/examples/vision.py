"""Recipes for images and videos, whole or as patches, and their masks, grids and prompts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from sizer.architecture.examples.example_spec import ExampleSpec, Recipe, floats, ones, read

BOXES = 5  # objects in every image of a detection or segmentation example
VIDEO_FRAMES = 8


def image(spec: ExampleSpec) -> Tensor:
    """Return pixels (batch, channels, height, width)."""
    return floats(spec.batch, channels(spec), *spec.sides)


def video(spec: ExampleSpec) -> Tensor:
    """Return frames of pixels (batch, frames, channels, height, width)."""
    return floats(spec.batch, frames(spec), channels(spec), *spec.sides)


def channels(spec: ExampleSpec) -> int:
    """Return the colour channels of an image, 3 if the config does not define them."""
    names = ("num_channels", "in_channels", "in_chans")
    paths = [*names, *(f"vision_config.{name}" for name in names), *(f"backbone_config.{name}" for name in names)]
    found = spec.read(*paths, default=3)
    return found if isinstance(found, int) else 3


def frames(spec: ExampleSpec) -> int:
    """Return the number of frames of a video: the config's own number, else 8."""
    return spec.read("num_frames", "vision_config.num_frames", "frames_per_clip", default=VIDEO_FRAMES)


def patches(spec: ExampleSpec) -> int:
    """Return the number of patches of an image, along both sides together: height/patch times width/patch."""
    return grid(spec)[0] * grid(spec)[1]


def grid(spec: ExampleSpec) -> tuple[int, int]:
    """Return the numbers of patches along height and width."""
    patch = read(spec.config, "patch_size", "vision_config.patch_size", "encoder_stride", default=16)
    sides = patch if isinstance(patch, (list, tuple)) else (patch, patch)
    return spec.sides[0] // sides[-2], spec.sides[1] // sides[-1]


def hidden_patches(spec: ExampleSpec) -> Tensor | None:
    """Return a (batch, patches) bool mask of every other patch, which a head reconstructs. None for other tasks."""
    if "MaskedImageModeling" not in spec.class_name:
        return None
    return (torch.arange(patches(spec)) % 2 == 0).expand(spec.batch, -1).contiguous()


def boxes(count: int) -> Tensor:
    """Return distinct boxes (count, 4) as centre x, centre y, width, height in parts of the image."""
    place = (torch.arange(count, dtype=torch.float32) + 1) / (count + 1)
    return torch.stack([place, place, place / 4 + 0.05, place / 4 + 0.05], dim=-1)


# ------------------------------------------------------------------------------------------------------ video tracking


FRAMES = 2  # the first shows the objects, in the second the memory of the first is read


def followed_objects(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return two frames (2, channels, height, width), and a point in the first frame for each object, one object per sample."""
    height, width = spec.sides
    return {
        "frames": floats(FRAMES, channels(spec), height, width),
        "input_points": torch.tensor([width / 2, height / 2]).repeat(spec.batch, 1, 1, 1),
        "input_labels": ones(spec.batch, 1, 1),
    }


FAMILIES: dict[str, Recipe] = dict.fromkeys(("edgetam_video", "sam2_video", "sam3_tracker_video"), followed_objects)


# ------------------------------------------------------------------------------------------------------------- patches


SHAPED_PATCHES = frozenset({"kimi_k25", "paddleocr_vl"})  # (channels, patch, patch) instead of one row
FLAT_PATCHES = 2048  # for Pix2Struct and Kosmos-2.5, as their processors split a page


def grid_thw(spec: ExampleSpec) -> Tensor:
    """Return the grid of patches of each image, (batch, 3) int64: one frame, rows, columns, both multiples of the merge size."""
    patch = side_of(read(spec.part("vision_config"), "patch_size", default=14))
    step = merge_size(spec.config)
    rows, columns = (max(1, size // (patch * step)) * step for size in spec.sides)
    return torch.tensor([[1, rows, columns]]).repeat(spec.batch, 1)


def patch_rows(spec: ExampleSpec, grid: Tensor) -> Tensor:
    """Return one row per patch of the grids, (patches, channels * frames * patch * patch), or in the family's own shape."""
    part = spec.part("vision_config")
    patch = side_of(read(part, "patch_size", default=14))
    depth = side_of(read(part, "temporal_patch_size", "patch_temporal", default=1))
    channels = read(part, "in_channels", "num_channels", "in_chans", default=3)
    shaped = spec.config.model_type.removesuffix("_vision") in SHAPED_PATCHES
    shape = (channels, patch, patch) if shaped else (channels * depth * patch * patch,)
    return floats(1, int(grid.prod(-1).sum()), *shape)[0]


def merge_size(config: PreTrainedConfig) -> int:
    """Return the number of patches along each side that become one feature."""
    names = ("spatial_merge_size", "merge_size", "merge_kernel_size")
    return side_of(read(config, *(f"vision_config.{name}" for name in names), *names, default=1))


def merged_patches(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return merged patches (rows, side, side, channels) of all images, and the grid of each image."""
    part = spec.part("vision_config")
    side = part.patch_size * merge_size(spec.config)
    rows, columns = (max(1, size // side) for size in spec.sides)
    values = floats(1, spec.batch * rows * columns, side, side, part.num_channels)[0]
    return {"pixel_values": values, "image_grid_thw": torch.tensor([[1, rows, columns]]).repeat(spec.batch, 1)}


def naflex(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the patches of an image in SigLIP 2's format: (batch, patches, values), a mask, (rows, columns)."""
    rows, columns = grid(spec)
    patch = spec.part("vision_config").patch_size
    return {
        "pixel_values": floats(spec.batch, rows * columns, channels(spec) * patch * patch),
        "pixel_attention_mask": ones(spec.batch, rows * columns),
        "spatial_shapes": torch.tensor([[rows, columns]]).repeat(spec.batch, 1),
    }


def positioned_patches(spec: ExampleSpec, pool: int, name: str = "image_position_ids") -> dict[str, Tensor]:
    """Return patches (batch, count, values) in [0, 1) and their (column, row), (batch, count, 2)."""
    patch = spec.part("vision_config").patch_size
    rows, columns = (max(1, size // (patch * pool)) * pool for size in spec.sides)
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(-1)
    return {
        "pixel_values": floats(spec.batch, rows * columns, channels(spec) * patch * patch),
        name: places.repeat(spec.batch, 1, 1),
    }


def side_by_side(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the patches of all images in one row and each image's grid, both sides multiples of four."""
    patch = spec.part("vision_config").patch_size
    rows, columns = (max(1, size // (4 * patch)) * 4 for size in spec.sides)
    values = floats(1, channels(spec), patch, spec.batch * rows * columns * patch)
    return {"pixel_values": values, "target_sizes": torch.tensor([[rows, columns]]).repeat(spec.batch, 1)}


def cubes(spec: ExampleSpec) -> Tensor:
    """Return the patches of all images, (patches, frames, patch, patch, channels)."""
    part = spec.part("vision_config")
    rows, columns = (max(1, size // part.patch_size) for size in spec.sides)
    depth = read(part, "temporal_patch_size", default=2)
    shape = (depth, part.patch_size, part.patch_size, read(part, "num_channels", default=3))
    return floats(1, spec.batch * rows * columns, *shape)[0]


def flattened_patches(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return 2048 patches (batch, 2048, 2 + channels * patch * patch), row and column of each in front, and their mask."""
    patch = read(spec.config, "vision_config.patch_size", "patch_size", default=16)
    side = 45  # 45 x 45 of at most 2048 patches, the processors' default
    patches = floats(spec.batch, FLAT_PATCHES, 2 + 3 * patch * patch)
    place = torch.arange(FLAT_PATCHES)
    patches[..., 0] = (place // side + 1).clamp(max=side)
    patches[..., 1] = place % side + 1
    return {"flattened_patches": patches, "attention_mask": ones(spec.batch, FLAT_PATCHES)}


def side_of(value: Any) -> int:
    """Return a size that a config gives as one number or one per side, as one number."""
    return value if isinstance(value, int) else value[0]

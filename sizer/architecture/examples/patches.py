"""Images as patches, in the layouts that the encoders of different families take them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from sizer.architecture.examples import vision
from sizer.architecture.examples.example_spec import ExampleSpec, read
from sizer.architecture.examples.tensors import floats, ones

SHAPED_PATCHES = frozenset({"kimi_k25", "paddleocr_vl"})  # (channels, patch, patch) instead of one row
FLAT_PATCHES = 2048  # of Pix2Struct and Kosmos-2.5, as their processors cut a page


def grid_thw(spec: ExampleSpec) -> Tensor:
    """The grid of patches of each image, (batch, 3) int64: one frame, rows, columns, both multiples of the merge size."""
    patch = side_of(read(spec.part("vision_config"), "patch_size", default=14))
    step = merge_size(spec.config)
    rows, columns = (max(1, size // (patch * step)) * step for size in spec.sides)
    return torch.tensor([[1, rows, columns]]).repeat(spec.batch, 1)


def patch_rows(spec: ExampleSpec, grid: Tensor) -> Tensor:
    """One row per patch of the grids, (patches, channels * frames * patch * patch), or shaped as the family wants them."""
    part = spec.part("vision_config")
    patch = side_of(read(part, "patch_size", default=14))
    depth = side_of(read(part, "temporal_patch_size", "patch_temporal", default=1))
    channels = read(part, "in_channels", "num_channels", "in_chans", default=3)
    shaped = spec.config.model_type.removesuffix("_vision") in SHAPED_PATCHES
    shape = (channels, patch, patch) if shaped else (channels * depth * patch * patch,)
    return floats(1, int(grid.prod(-1).sum()), *shape)[0]


def merge_size(config: PreTrainedConfig) -> int:
    """How many patches along each side become one feature."""
    names = ("spatial_merge_size", "merge_size", "merge_kernel_size")
    return side_of(read(config, *(f"vision_config.{name}" for name in names), *names, default=1))


def merged_patches(spec: ExampleSpec) -> dict[str, Tensor]:
    """Merged patches (rows, side, side, channels) of all images, and the grid each forms."""
    part = spec.part("vision_config")
    side = part.patch_size * merge_size(spec.config)
    rows, columns = (max(1, size // side) for size in spec.sides)
    values = floats(1, spec.batch * rows * columns, side, side, part.num_channels)[0]
    return {"pixel_values": values, "image_grid_thw": torch.tensor([[1, rows, columns]]).repeat(spec.batch, 1)}


def naflex(spec: ExampleSpec) -> dict[str, Tensor]:
    """The patches of an image as SigLIP 2 takes them: (batch, patches, values), a mask, (rows, columns)."""
    rows, columns = vision.grid(spec)
    patch = spec.part("vision_config").patch_size
    return {
        "pixel_values": floats(spec.batch, rows * columns, vision.channels(spec) * patch * patch),
        "pixel_attention_mask": ones(spec.batch, rows * columns),
        "spatial_shapes": torch.tensor([[rows, columns]]).repeat(spec.batch, 1),
    }


def positioned_patches(spec: ExampleSpec, pool: int, name: str = "image_position_ids") -> dict[str, Tensor]:
    """Patches (batch, count, values) in [0, 1) and their (column, row), (batch, count, 2)."""
    patch = spec.part("vision_config").patch_size
    rows, columns = (max(1, size // (patch * pool)) * pool for size in spec.sides)
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(-1)
    return {
        "pixel_values": floats(spec.batch, rows * columns, vision.channels(spec) * patch * patch),
        name: places.repeat(spec.batch, 1, 1),
    }


def side_by_side(spec: ExampleSpec) -> dict[str, Tensor]:
    """Patches side by side in one row and the grid that each image's form, both sides multiples of four."""
    patch = spec.part("vision_config").patch_size
    rows, columns = (max(1, size // (4 * patch)) * 4 for size in spec.sides)
    values = floats(1, vision.channels(spec), patch, spec.batch * rows * columns * patch)
    return {"pixel_values": values, "target_sizes": torch.tensor([[rows, columns]]).repeat(spec.batch, 1)}


def cubes(spec: ExampleSpec) -> Tensor:
    """The patches of all images, (patches, frames, patch, patch, channels)."""
    part = spec.part("vision_config")
    rows, columns = (max(1, size // part.patch_size) for size in spec.sides)
    depth = read(part, "temporal_patch_size", default=2)
    shape = (depth, part.patch_size, part.patch_size, read(part, "num_channels", default=3))
    return floats(1, spec.batch * rows * columns, *shape)[0]


def flattened_patches(spec: ExampleSpec) -> dict[str, Tensor]:
    """2048 patches (batch, 2048, 2 + channels * patch * patch), row and column of each in front, and their mask."""
    patch = read(spec.config, "vision_config.patch_size", "patch_size", default=16)
    side = 45  # 45 x 45 of at most 2048 patches, the processors' default
    patches = floats(spec.batch, FLAT_PATCHES, 2 + 3 * patch * patch)
    place = torch.arange(FLAT_PATCHES)
    patches[..., 0] = (place // side + 1).clamp(max=side)
    patches[..., 1] = place % side + 1
    return {"flattened_patches": patches, "attention_mask": ones(spec.batch, FLAT_PATCHES)}


def side_of(value: Any) -> int:
    """A size that a config gives as one number or one per side, as one number."""
    return value if isinstance(value, int) else value[0]

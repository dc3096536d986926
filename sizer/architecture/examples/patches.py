"""Pictures as patches, in the layouts that the encoders of different families take them."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from sizer.architecture.examples import vision
from sizer.architecture.examples.setting import Setting, read
from sizer.architecture.examples.tensors import floats, ones

SHAPED_PATCHES = frozenset({"kimi_k25", "paddleocr_vl"})  # (channels, patch, patch) instead of one row
FLAT_PATCHES = 2048  # of Pix2Struct and Kosmos-2.5, as their processors cut a page


def grid_thw(setting: Setting) -> Tensor:
    """The grid of patches of each picture, (batch, 3) int64: one frame, rows, columns, both multiples of the merge size."""
    patch = side_of(read(setting.part("vision_config"), "patch_size", default=14))
    step = merge_size(setting.config)
    rows, columns = (max(1, size // (patch * step)) * step for size in setting.image_size)
    return torch.tensor([[1, rows, columns]]).repeat(setting.batch, 1)


def patch_rows(setting: Setting, grid: Tensor) -> Tensor:
    """One row per patch of the grids, (patches, channels * frames * patch * patch), or shaped as the family wants them."""
    part = setting.part("vision_config")
    patch = side_of(read(part, "patch_size", default=14))
    depth = side_of(read(part, "temporal_patch_size", "patch_temporal", default=1))
    channels = read(part, "in_channels", "num_channels", "in_chans", default=3)
    shaped = setting.config.model_type.removesuffix("_vision") in SHAPED_PATCHES
    shape = (channels, patch, patch) if shaped else (channels * depth * patch * patch,)
    return floats(1, int(grid.prod(-1).sum()), *shape)[0]


def merge_size(config: PreTrainedConfig) -> int:
    """How many patches along each side become one feature."""
    names = ("spatial_merge_size", "merge_size", "merge_kernel_size")
    return side_of(read(config, *(f"vision_config.{name}" for name in names), *names, default=1))


def merged_patches(setting: Setting) -> dict[str, Tensor]:
    """Merged patches (rows, side, side, channels) of all pictures, and the grid each forms."""
    part = setting.part("vision_config")
    side = part.patch_size * merge_size(setting.config)
    rows, columns = (max(1, size // side) for size in setting.image_size)
    values = floats(1, setting.batch * rows * columns, side, side, part.num_channels)[0]
    return {"pixel_values": values, "image_grid_thw": torch.tensor([[1, rows, columns]]).repeat(setting.batch, 1)}


def naflex(setting: Setting) -> dict[str, Tensor]:
    """The patches of a picture as SigLIP 2 takes them: (batch, patches, values), a mask, (rows, columns)."""
    rows, columns = vision.grid(setting)
    patch = setting.part("vision_config").patch_size
    return {
        "pixel_values": floats(setting.batch, rows * columns, vision.channels(setting) * patch * patch),
        "pixel_attention_mask": ones(setting.batch, rows * columns),
        "spatial_shapes": torch.tensor([[rows, columns]]).repeat(setting.batch, 1),
    }


def positioned_patches(setting: Setting, pool: int, name: str = "image_position_ids") -> dict[str, Tensor]:
    """Patches (batch, count, values) in [0, 1) and their (column, row), (batch, count, 2)."""
    patch = setting.part("vision_config").patch_size
    rows, columns = (max(1, size // (patch * pool)) * pool for size in setting.image_size)
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(-1)
    return {
        "pixel_values": floats(setting.batch, rows * columns, vision.channels(setting) * patch * patch),
        name: places.repeat(setting.batch, 1, 1),
    }


def ribbon(setting: Setting) -> dict[str, Tensor]:
    """Patches in one ribbon and the grid that each picture's form, both sides multiples of four."""
    patch = setting.part("vision_config").patch_size
    rows, columns = (max(1, size // (4 * patch)) * 4 for size in setting.image_size)
    values = floats(1, vision.channels(setting), patch, setting.batch * rows * columns * patch)
    return {"pixel_values": values, "target_sizes": torch.tensor([[rows, columns]]).repeat(setting.batch, 1)}


def cubes(setting: Setting) -> Tensor:
    """The patches of all pictures, (patches, frames, patch, patch, channels)."""
    part = setting.part("vision_config")
    rows, columns = (max(1, size // part.patch_size) for size in setting.image_size)
    depth = read(part, "temporal_patch_size", default=2)
    shape = (depth, part.patch_size, part.patch_size, read(part, "num_channels", default=3))
    return floats(1, setting.batch * rows * columns, *shape)[0]


def flattened_patches(setting: Setting) -> dict[str, Tensor]:
    """2048 patches (batch, 2048, 2 + channels * patch * patch), row and column of each in front, and their mask."""
    patch = read(setting.config, "vision_config.patch_size", "patch_size", default=16)
    side = 45  # 45 x 45 of at most 2048 patches, the processors' default
    patches = floats(setting.batch, FLAT_PATCHES, 2 + 3 * patch * patch)
    place = torch.arange(FLAT_PATCHES)
    patches[..., 0] = (place // side + 1).clamp(max=side)
    patches[..., 1] = place % side + 1
    return {"flattened_patches": patches, "attention_mask": ones(setting.batch, FLAT_PATCHES)}


def side_of(value: object) -> int:
    """A size that a config gives as one number or one per side, as one number."""
    return value if isinstance(value, int) else value[0]

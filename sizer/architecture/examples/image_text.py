"""Recipes for a picture inside a text (LLaVA, Qwen-VL, Idefics, ...): one `Medium` per way of passing it.

Each sample has one picture. Where the number of features follows from the config by a formula of the family's processor, the
formula is used; otherwise the encoder itself is asked (`count_features`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from sizer.architecture.examples import patches, tiles, vision
from sizer.architecture.examples.media import (
    Medium,
    asked_picture,
    picture_medium,
    placeholder,
    placeholder_names,
    sizes_of_pictures,
)
from sizer.architecture.examples.setting import Setting, read
from sizer.architecture.examples.tensors import floats, zeros

QUESTION_TOKENS = 16
DRAWN_SIZE = (1152, 768)  # height and width of the picture that GLM-Image is asked for, its processor's default
DRAWN_PIXELS = 32  # along each side for one of its codes


def picture(setting: Setting) -> Medium:
    """The picture of each text: by the family's own recipe, by grid of patches (Qwen-VL), else plain pixels (LLaVA)."""
    own = FAMILIES.get(setting.config.model_type)
    if own is not None:
        return own(setting)
    return grid_of_patches(setting) if setting.takes("image_grid_thw") else pixels(setting)


def kind_of(setting: Setting) -> str:
    """What the placeholders stand for: an "image", or a "video" where there is a token for nothing else."""
    has = lambda kind: any(hasattr(setting.config, name) for name in placeholder_names(kind))  # noqa: E731
    return "video" if has("video") and not has("image") else "image"


def pixels(setting: Setting, **more: Tensor) -> Medium:
    """LLaVA's way: pixels (batch, channels, height, width)."""
    if read(setting.config, "vision_config.model_type") == "pixtral":
        return pixtral(setting)
    return asked_picture(setting, {"pixel_values": vision.image(setting), **more})


def pixtral(setting: Setting) -> Medium:
    """Pixtral's tower: any size, so the picture's size goes with it; one feature per `spatial_merge_size` squared patches."""
    step = setting.config.vision_config.patch_size * read(setting.config, "spatial_merge_size", default=1)
    rows, columns = (max(1, side // step) for side in setting.image_size)
    inputs = {"pixel_values": floats(setting.batch, vision.channels(setting), rows * step, columns * step),
              "image_sizes": sizes_of_pictures(setting, rows * step, columns * step)}  # fmt: skip
    return picture_medium(setting, inputs, rows * columns)


def queried_patches(setting: Setting) -> Medium:
    """Aria: a picture of as many patches as its projector has queries for (490 pixels: 1225 patches, 128 queries)."""
    patch = setting.config.vision_config.patch_size
    counts = {int(count): queries for count, queries in setting.config.projector_patch_to_query_dict.items()}
    smallest = min(counts)
    side = patch * round(smallest**0.5)
    values = floats(setting.batch, vision.channels(setting), side, side)
    return picture_medium(setting, {"pixel_values": values}, counts[smallest])


def downsampled_patches(setting: Setting) -> Medium:
    """Step 3.7: pixels whose patches two convolutions of stride 2 (kernel 3, padding 1) fold along each side."""
    patch = setting.config.vision_config.patch_size
    rows, columns = ((size // patch + 3) // 4 for size in setting.image_size)
    return picture_medium(setting, {"pixel_values": vision.image(setting)}, rows * columns)


def with_high_resolution(setting: Setting) -> Medium:
    """DeepSeek-VL's hybrid: the same picture small for one tower and large for the other."""
    side = read(setting.config, "high_res_vision_config.image_size", default=1024)
    large = floats(setting.batch, vision.channels(setting), side, side)
    return asked_picture(setting, {"pixel_values": vision.image(setting), "high_res_pixel_values": large})


def queries(setting: Setting) -> Medium:
    """BLIP-2's way: the Q-Former's queries replace the placeholders."""
    inputs = {"pixel_values": vision.image(setting)}
    if setting.takes("qformer_input_ids"):
        words = question(setting.config.qformer_config.vocab_size, setting.batch)
        inputs |= {"qformer_input_ids": words, "qformer_attention_mask": torch.ones_like(words)}
    token = placeholder(setting.config, kind_of(setting))
    return Medium(inputs=inputs, token=token, count=setting.config.num_query_tokens)


def video_queries(setting: Setting) -> Medium:
    """InstructBLIP for videos: four frames, each read by the Q-Former's queries."""
    inputs = queries(setting).inputs | {
        "pixel_values": floats(setting.batch, 4, vision.channels(setting), *setting.image_size)
    }
    token = placeholder(setting.config, "video")
    return Medium(inputs=inputs, token=token, count=4 * setting.config.num_query_tokens)


def grid_of_patches(setting: Setting) -> Medium:
    """Qwen-VL's way: the patches of the whole batch as rows, and per picture the grid (time, height, width) they form.

    `merge` x `merge` patches become one feature; HunYuan adds a token per row and two around the picture.
    """
    grid, merge = patches.grid_thw(setting), patches.merge_size(setting.config)
    inputs = {"pixel_values": patches.patch_rows(setting, grid), "image_grid_thw": grid}
    if setting.takes("image_merge_sizes"):
        inputs["image_merge_sizes"] = torch.full((setting.batch,), merge)
    rows, columns = (int(side) // merge for side in grid[0, 1:])
    extra = rows + 2 if setting.config.model_type == "hunyuan_vl" else 0
    return picture_medium(setting, inputs, rows * columns + extra)


def source_and_target(setting: Setting) -> Medium:
    """GLM-Image: the patches of a picture to start from, one code each, and the grid of the picture that is asked for.

    The grids of a sample stand one after the other; the last is the one to be drawn (`GlmImageProcessor`).
    """
    source = patches.grid_thw(setting)[:1]
    target = torch.tensor([[1, *(side // DRAWN_PIXELS for side in DRAWN_SIZE)]])
    grids = torch.cat([source, target])
    inputs = {
        "pixel_values": patches.patch_rows(setting, source.repeat(setting.batch, 1)),
        "image_grid_thw": grids.repeat(setting.batch, 1),
        "images_per_sample": torch.full((setting.batch,), len(grids)),
    }
    marks = (setting.config.image_start_token_id, setting.config.image_end_token_id)
    return replace(picture_medium(setting, inputs, int(source.prod())), marks=marks)


def padded_patches(setting: Setting) -> Medium:
    """ColQwen2: the patches of each picture apart, (batch, patches, values), as its processor pads them."""
    medium = grid_of_patches(setting)
    rows = medium.inputs["pixel_values"].unflatten(0, (setting.batch, -1))
    return replace(medium, inputs=medium.inputs | {"pixel_values": rows})


def merged_grid(setting: Setting) -> Medium:
    """Inkling 2: rows of already merged patches (rows, side, side, channels), one feature each."""
    inputs = patches.merged_patches(setting)
    return picture_medium(setting, inputs, int(inputs["image_grid_thw"][0].prod()))


def patches_with_shape(setting: Setting) -> Medium:
    """LFM2-VL (SigLIP 2's NaFlex): patches (batch, count, channels * patch * patch), their mask and how they lie.

    `downsample_factor` squared patches become one feature, rounded up along each side.
    """
    fold = read(setting.config, "downsample_factor", default=1)
    rows, columns = vision.grid(setting)
    return picture_medium(setting, patches.naflex(setting), math.ceil(rows / fold) * math.ceil(columns / fold))


def patches_with_positions(setting: Setting) -> Medium:
    """Gemma 4: patches (batch, count, channels * patch * patch) and where each lies; `pooling_kernel_size` squared become one."""
    part = setting.part("vision_config")
    pool = read(part, "pooling_kernel_size", "num_pooled_patches", default=1)
    inputs = patches.positioned_patches(setting, pool)
    return picture_medium(setting, inputs, inputs["pixel_values"].shape[1] // pool**2)


def fuyu_patches(setting: Setting) -> Medium:
    """Fuyu: patches (batch, count, channels * patch * patch), one placeholder each."""
    patch = setting.config.patch_size
    rows, columns = (max(1, size // patch) for size in setting.image_size)
    values = floats(setting.batch, rows * columns, setting.config.num_channels * patch * patch)
    return picture_medium(setting, {"pixel_values": values}, rows * columns)


def ribbon_of_patches(setting: Setting) -> Medium:
    """MiniCPM-V: the patches of all pictures side by side, (1, channels, patch, patches * patch), and (rows, columns) of each.

    Sixteen patches become one feature, four in the "4x" mode.
    """
    inputs = patches.ribbon(setting)
    per_feature = 4 if read(setting.config, "downsample_mode") == "4x" else 16
    return picture_medium(setting, inputs, int(inputs["target_sizes"][0].prod()) // per_feature)


def patch_cubes(setting: Setting) -> Medium:
    """Inkling: each patch as a small film of itself, (patches, frames, patch, patch, channels), one feature each."""
    values = patches.cubes(setting)
    return picture_medium(setting, {"pixel_values": values}, len(values) // setting.batch)


def flat_grid(setting: Setting) -> Medium:
    """Nemotron Omni: rows of flattened patches and (rows, columns) of each picture; a pixel shuffle folds 2 x 2 into one."""
    patch = setting.part("vision_config").patch_size
    rows, columns = (max(1, size // (2 * patch)) * 2 for size in setting.image_size)
    values = floats(1, setting.batch * rows * columns, 3 * patch * patch)[0]
    inputs = {"pixel_values": values, "image_grid_hw": torch.tensor([[rows, columns]]).repeat(setting.batch, 1)}
    return picture_medium(setting, inputs, rows * columns // 4)


def lone_patches(setting: Setting) -> Medium:
    """NeoMME: rows of flattened patches, one placeholder each."""
    patch = setting.config.patch_size
    rows, columns = (max(1, size // patch) for size in setting.image_size)
    values = floats(1, setting.batch * rows * columns, 3 * patch * patch)[0]
    return picture_medium(setting, {"pixel_values": values}, rows * columns)


def marked_places(setting: Setting) -> Medium:
    """Kosmos-2: a mask says where in the text the picture's latent queries go."""
    count = setting.config.latent_query_num
    inputs = {"pixel_values": vision.image(setting), "image_embeds_position_mask": _places(setting, count)}
    return Medium(inputs=inputs, token=None, count=count)


def marked_flat_patches(setting: Setting) -> Medium:
    """Kosmos-2.5: flattened patches as Pix2Struct has them, and a mask of the places of the latent queries."""
    count = setting.config.latent_query_num
    inputs = patches.flattened_patches(setting)
    inputs.pop("attention_mask")
    return Medium(inputs=inputs | {"image_embeds_position_mask": _places(setting, count)}, token=None, count=count)


def question(vocabulary: int, batch: int) -> Tensor:
    """Token ids (batch, 16) of a question about the picture."""
    return torch.arange(QUESTION_TOKENS).remainder(max(1, vocabulary - 2)).add(1).repeat(batch, 1)


def _places(setting: Setting, count: int) -> Tensor:
    places = zeros(setting.batch, setting.length)
    places[:, 1 : 1 + count] = 1
    return places


FAMILIES: dict[str, Callable[[Setting], Medium]] = {
    **tiles.FAMILIES,
    "aria": queried_patches,
    "blip-2": queries,
    "deepseek_vl_hybrid": with_high_resolution,
    "fuyu": fuyu_patches,
    "gemma4": patches_with_positions,
    "glm_image": source_and_target,
    "inkling2": merged_grid,
    "inkling_mm_model": patch_cubes,
    "instructblip": queries,
    "instructblipvideo": video_queries,
    "kosmos-2": marked_places,
    "kosmos-2.5": marked_flat_patches,
    "lfm2_vl": patches_with_shape,
    "minicpm_ocr": ribbon_of_patches,
    "minicpmv4_6": ribbon_of_patches,
    "minicpmv4_7": ribbon_of_patches,
    "nemotron_h_omni": flat_grid,
    "neomme": lone_patches,
    "step3p7": downsampled_patches,
}

"""Recipes for an image inside a text (LLaVA, Qwen-VL, Idefics, ...): one `MultimodalInput` per way of passing it.

Each sample has one image. Where the number of features follows from the config by a formula of the family's processor, the
formula is used; otherwise the encoder itself is asked (`count_features`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from sizer.architecture.examples import patches, tiles, vision
from sizer.architecture.examples.example_spec import ExampleSpec, read
from sizer.architecture.examples.multimodal_inputs import (
    MultimodalInput,
    counted_image_input,
    image_input,
    image_sizes,
    placeholder,
    placeholder_names,
)
from sizer.architecture.examples.tensors import floats, zeros

QUESTION_TOKENS = 16
OUTPUT_SIZE = (1152, 768)  # height and width of the image that GLM-Image is asked for, its processor's default
PIXELS_PER_CODE = 32  # along each side for one of its codes


def find_image_input(spec: ExampleSpec) -> MultimodalInput:
    """The image of each text: by the family's own recipe, by grid of patches (Qwen-VL), else plain pixels (LLaVA)."""
    own = FAMILIES.get(spec.config.model_type)
    if own is not None:
        return own(spec)
    return grid_of_patches(spec) if spec.takes("image_grid_thw") else pixels(spec)


def kind_of(spec: ExampleSpec) -> str:
    """What the placeholders stand for: an "image", or a "video" where there is a token for nothing else."""
    has = lambda kind: any(hasattr(spec.config, name) for name in placeholder_names(kind))  # noqa: E731
    return "video" if has("video") and not has("image") else "image"


def pixels(spec: ExampleSpec, **more: Tensor) -> MultimodalInput:
    """LLaVA's way: pixels (batch, channels, height, width)."""
    if read(spec.config, "vision_config.model_type") == "pixtral":
        return pixtral(spec)
    return counted_image_input(spec, {"pixel_values": vision.image(spec), **more})


def pixtral(spec: ExampleSpec) -> MultimodalInput:
    """Pixtral's tower: any size, so the image's size goes with it; one feature per `spatial_merge_size` squared patches."""
    step = spec.config.vision_config.patch_size * read(spec.config, "spatial_merge_size", default=1)
    rows, columns = (max(1, side // step) for side in spec.sides)
    inputs = {"pixel_values": floats(spec.batch, vision.channels(spec), rows * step, columns * step),
              "image_sizes": image_sizes(spec, rows * step, columns * step)}  # fmt: skip
    return image_input(spec, inputs, rows * columns)


def queried_patches(spec: ExampleSpec) -> MultimodalInput:
    """Aria: an image of as many patches as its projector has queries for (490 pixels: 1225 patches, 128 queries)."""
    patch = spec.config.vision_config.patch_size
    counts = {int(count): queries for count, queries in spec.config.projector_patch_to_query_dict.items()}
    smallest = min(counts)
    side = patch * round(smallest**0.5)
    values = floats(spec.batch, vision.channels(spec), side, side)
    return image_input(spec, {"pixel_values": values}, counts[smallest])


def downsampled_patches(spec: ExampleSpec) -> MultimodalInput:
    """Step 3.7: pixels whose patches two convolutions of stride 2 (kernel 3, padding 1) fold along each side."""
    patch = spec.config.vision_config.patch_size
    rows, columns = ((size // patch + 3) // 4 for size in spec.sides)
    return image_input(spec, {"pixel_values": vision.image(spec)}, rows * columns)


def with_high_resolution(spec: ExampleSpec) -> MultimodalInput:
    """DeepSeek-VL's hybrid: the same image small for one tower and large for the other."""
    side = read(spec.config, "high_res_vision_config.image_size", default=1024)
    large = floats(spec.batch, vision.channels(spec), side, side)
    return counted_image_input(spec, {"pixel_values": vision.image(spec), "high_res_pixel_values": large})


def queries(spec: ExampleSpec) -> MultimodalInput:
    """BLIP-2's way: the Q-Former's queries replace the placeholders."""
    inputs = {"pixel_values": vision.image(spec)}
    if spec.takes("qformer_input_ids"):
        words = question(spec.config.qformer_config.vocab_size, spec.batch)
        inputs |= {"qformer_input_ids": words, "qformer_attention_mask": torch.ones_like(words)}
    token = placeholder(spec.config, kind_of(spec))
    return MultimodalInput(inputs=inputs, token=token, count=spec.config.num_query_tokens)


def video_queries(spec: ExampleSpec) -> MultimodalInput:
    """InstructBLIP for videos: four frames, each read by the Q-Former's queries."""
    inputs = queries(spec).inputs | {"pixel_values": floats(spec.batch, 4, vision.channels(spec), *spec.sides)}
    token = placeholder(spec.config, "video")
    return MultimodalInput(inputs=inputs, token=token, count=4 * spec.config.num_query_tokens)


def grid_of_patches(spec: ExampleSpec) -> MultimodalInput:
    """Qwen-VL's way: the patches of the whole batch as rows, and per image the grid (time, height, width) they form.

    `merge` x `merge` patches become one feature; HunYuan adds a token per row and two around the image.
    """
    grid, merge = patches.grid_thw(spec), patches.merge_size(spec.config)
    inputs = {"pixel_values": patches.patch_rows(spec, grid), "image_grid_thw": grid}
    if spec.takes("image_merge_sizes"):
        inputs["image_merge_sizes"] = torch.full((spec.batch,), merge)
    rows, columns = (int(side) // merge for side in grid[0, 1:])
    extra = rows + 2 if spec.config.model_type == "hunyuan_vl" else 0
    return image_input(spec, inputs, rows * columns + extra)


def source_and_target(spec: ExampleSpec) -> MultimodalInput:
    """GLM-Image: the patches of an image to start from, one code each, and the grid of the image that is asked for.

    The grids of a sample stand one after the other; the last is the one to be drawn (`GlmImageProcessor`).
    """
    source = patches.grid_thw(spec)[:1]
    target = torch.tensor([[1, *(side // PIXELS_PER_CODE for side in OUTPUT_SIZE)]])
    grids = torch.cat([source, target])
    inputs = {
        "pixel_values": patches.patch_rows(spec, source.repeat(spec.batch, 1)),
        "image_grid_thw": grids.repeat(spec.batch, 1),
        "images_per_sample": torch.full((spec.batch,), len(grids)),
    }
    marks = (spec.config.image_start_token_id, spec.config.image_end_token_id)
    return replace(image_input(spec, inputs, int(source.prod())), marks=marks)


def padded_patches(spec: ExampleSpec) -> MultimodalInput:
    """ColQwen2: the patches of each image apart, (batch, patches, values), as its processor pads them."""
    multimodal_input = grid_of_patches(spec)
    rows = multimodal_input.inputs["pixel_values"].unflatten(0, (spec.batch, -1))
    return replace(multimodal_input, inputs=multimodal_input.inputs | {"pixel_values": rows})


def merged_grid(spec: ExampleSpec) -> MultimodalInput:
    """Inkling 2: rows of already merged patches (rows, side, side, channels), one feature each."""
    inputs = patches.merged_patches(spec)
    return image_input(spec, inputs, int(inputs["image_grid_thw"][0].prod()))


def patches_with_shape(spec: ExampleSpec) -> MultimodalInput:
    """LFM2-VL (SigLIP 2's NaFlex): patches (batch, count, channels * patch * patch), their mask and how they lie.

    `downsample_factor` squared patches become one feature, rounded up along each side.
    """
    fold = read(spec.config, "downsample_factor", default=1)
    rows, columns = vision.grid(spec)
    return image_input(spec, patches.naflex(spec), math.ceil(rows / fold) * math.ceil(columns / fold))


def patches_with_positions(spec: ExampleSpec) -> MultimodalInput:
    """Gemma 4: patches (batch, count, channels * patch * patch) and where each lies; `pooling_kernel_size` squared become one."""
    part = spec.part("vision_config")
    pool = read(part, "pooling_kernel_size", "num_pooled_patches", default=1)
    inputs = patches.positioned_patches(spec, pool)
    return image_input(spec, inputs, inputs["pixel_values"].shape[1] // pool**2)


def merged_patches_with_positions(spec: ExampleSpec) -> MultimodalInput:
    """Gemma 4 without an encoder: merged patches (batch, count, channels * side * side) and their places, a placeholder each."""
    side = spec.config.vision_config.model_patch_size
    rows, columns = (max(1, size // side) for size in spec.sides)
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(-1)
    values = floats(spec.batch, rows * columns, 3 * side * side)
    inputs = {"pixel_values": values, "image_position_ids": places.repeat(spec.batch, 1, 1)}
    return image_input(spec, inputs, rows * columns)


def fuyu_patches(spec: ExampleSpec) -> MultimodalInput:
    """Fuyu: patches (batch, count, channels * patch * patch), one placeholder each."""
    patch = spec.config.patch_size
    rows, columns = (max(1, size // patch) for size in spec.sides)
    values = floats(spec.batch, rows * columns, spec.config.num_channels * patch * patch)
    return image_input(spec, {"pixel_values": values}, rows * columns)


def patches_side_by_side(spec: ExampleSpec) -> MultimodalInput:
    """MiniCPM-V: the patches of all images side by side, (1, channels, patch, patches * patch), and (rows, columns) of each.

    Sixteen patches become one feature, four in the "4x" mode.
    """
    inputs = patches.side_by_side(spec)
    per_feature = 4 if read(spec.config, "downsample_mode") == "4x" else 16
    return image_input(spec, inputs, int(inputs["target_sizes"][0].prod()) // per_feature)


def patch_cubes(spec: ExampleSpec) -> MultimodalInput:
    """Inkling: each patch as a small video of itself, (patches, frames, patch, patch, channels), one feature each."""
    values = patches.cubes(spec)
    return image_input(spec, {"pixel_values": values}, len(values) // spec.batch)


def flat_grid(spec: ExampleSpec) -> MultimodalInput:
    """Nemotron Omni: rows of flattened patches and (rows, columns) of each image; a pixel shuffle folds 2 x 2 into one."""
    patch = spec.part("vision_config").patch_size
    rows, columns = (max(1, size // (2 * patch)) * 2 for size in spec.sides)
    values = floats(1, spec.batch * rows * columns, 3 * patch * patch)[0]
    inputs = {"pixel_values": values, "image_grid_hw": torch.tensor([[rows, columns]]).repeat(spec.batch, 1)}
    return image_input(spec, inputs, rows * columns // 4)


def lone_patches(spec: ExampleSpec) -> MultimodalInput:
    """NeoMME: rows of flattened patches, one placeholder each."""
    patch = spec.config.patch_size
    rows, columns = (max(1, size // patch) for size in spec.sides)
    values = floats(1, spec.batch * rows * columns, 3 * patch * patch)[0]
    return image_input(spec, {"pixel_values": values}, rows * columns)


def marked_places(spec: ExampleSpec) -> MultimodalInput:
    """Kosmos-2: a mask says where in the text the image's latent queries go."""
    count = spec.config.latent_query_num
    inputs = {"pixel_values": vision.image(spec), "image_embeds_position_mask": _places(spec, count)}
    return MultimodalInput(inputs=inputs, token=None, count=count)


def marked_flat_patches(spec: ExampleSpec) -> MultimodalInput:
    """Kosmos-2.5: flattened patches as Pix2Struct has them, and a mask of the places of the latent queries."""
    count = spec.config.latent_query_num
    inputs = patches.flattened_patches(spec)
    inputs.pop("attention_mask")
    return MultimodalInput(
        inputs=inputs | {"image_embeds_position_mask": _places(spec, count)}, token=None, count=count
    )


def question(vocabulary: int, batch: int) -> Tensor:
    """Token ids (batch, 16) of a question about the image."""
    return torch.arange(QUESTION_TOKENS).remainder(max(1, vocabulary - 2)).add(1).repeat(batch, 1)


def _places(spec: ExampleSpec, count: int) -> Tensor:
    places = zeros(spec.batch, spec.tokens)
    places[:, 1 : 1 + count] = 1
    return places


FAMILIES: dict[str, Callable[[ExampleSpec], MultimodalInput]] = {
    **tiles.FAMILIES,
    "aria": queried_patches,
    "blip-2": queries,
    "deepseek_vl_hybrid": with_high_resolution,
    "fuyu": fuyu_patches,
    "gemma4": patches_with_positions,
    "gemma4_unified": merged_patches_with_positions,
    "glm_image": source_and_target,
    "inkling2": merged_grid,
    "inkling_mm_model": patch_cubes,
    "instructblip": queries,
    "instructblipvideo": video_queries,
    "kosmos-2": marked_places,
    "kosmos-2.5": marked_flat_patches,
    "lfm2_vl": patches_with_shape,
    "minicpm_ocr": patches_side_by_side,
    "minicpmv4_6": patches_side_by_side,
    "minicpmv4_7": patches_side_by_side,
    "nemotron_h_omni": flat_grid,
    "neomme": lone_patches,
    "step3p7": downsampled_patches,
}

"""Recipes for an image inside a text (LLaVA, Qwen-VL, Idefics, ...): one `MultimodalInput` per way of passing it.

Each sample has one image. If a formula of the family's processor gives the number of features from the config, it is used;
otherwise the encoder itself runs (`count_features`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sizer.architecture.examples import vision
from sizer.architecture.examples.example_spec import ExampleSpec, floats, ones, read, zeros
from sizer.architecture.examples.multimodal_inputs import (
    MultimodalInput,
    counted_image_input,
    image_input,
    image_sizes,
    placeholder,
    placeholder_names,
)


def tiles(spec: ExampleSpec) -> MultimodalInput:
    """Return the inputs of LLaVA-NeXT: the whole image and its tiles, (batch, 1 + tiles, channels, side, side), and the image size.
    """
    from transformers.image_processing_utils import select_best_resolution  # this module imports torchvision

    side = _square(read(spec.config, "vision_config.image_size", default=spec.sides))
    rows, columns = select_best_resolution(spec.sides, spec.config.image_grid_pinpoints)
    count = 1 + (rows // side[0]) * (columns // side[1])
    values = floats(spec.batch, count, vision.channels(spec), *side)
    return counted_image_input(spec, {"pixel_values": values, "image_sizes": image_sizes(spec, *spec.sides)})


def one_tile(spec: ExampleSpec) -> MultimodalInput:
    """Return pixels (batch, 1, channels, height, width): an image without further tiles."""
    return counted_image_input(spec, {"pixel_values": vision.image(spec).unsqueeze(1)})


def idefics(spec: ExampleSpec) -> MultimodalInput:
    """Return the inputs of Idefics2 and 3: pixels (batch, 1, channels, height, width) with their mask.

    Idefics2's perceiver yields `resampler_n_latents` features; Idefics3 and SmolVLM fold `scale_factor` squared patches into
    one.
    """
    latents = read(spec.config, "perceiver_config.resampler_n_latents")
    fold = read(spec.config, "scale_factor", "pixel_shuffle_factor", default=1)
    step = fold * spec.config.vision_config.patch_size
    rows, columns = (max(1, side // step) for side in spec.sides)
    inputs = {
        "pixel_values": floats(spec.batch, 1, vision.channels(spec), rows * step, columns * step),
        "pixel_attention_mask": ones(spec.batch, 1, rows * step, columns * step),
    }
    return image_input(spec, inputs, latents or rows * columns)


def idefics_one(spec: ExampleSpec) -> MultimodalInput:
    """Return the inputs of the first Idefics: pixels (batch, 1, channels, height, width).

    Cross-attention reads them from every token except the first.
    """
    seen = ones(spec.batch, spec.tokens, 1)
    seen[:, 0] = 0
    pixels = vision.image(spec).unsqueeze(1)
    return MultimodalInput(inputs={"pixel_values": pixels, "image_attention_mask": seen}, token=None, count=0)


def aspect_ratio_tiles(spec: ExampleSpec) -> MultimodalInput:
    """Return four tiles for Llama 3.2 Vision with one in use, read by cross-attention: one placeholder for any size."""
    inputs = aspect_ratio_inputs(spec)
    crossing = zeros(spec.batch, spec.tokens, 1, inputs["aspect_ratio_mask"].shape[-1])
    crossing[:, 1:, :, 0] = 1
    return image_input(spec, inputs | {"cross_attention_mask": crossing}, 1)


def aspect_ratio_inputs(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return tiles (batch, 1, tiles, channels, height, width), the id of their arrangement (1: a single tile), and their mask."""
    count = read(spec.config, "vision_config.max_num_tiles", "max_num_tiles", default=4)
    mask = zeros(spec.batch, 1, count)
    mask[..., 0] = 1
    pixels = floats(spec.batch, 1, count, vision.channels(spec), *spec.sides)
    return {"pixel_values": pixels, "aspect_ratio_ids": ones(spec.batch, 1), "aspect_ratio_mask": mask}


def tiles_with_mask(spec: ExampleSpec) -> MultimodalInput:
    """Return the inputs of Granite Docling: pixels (batch, 1, channels, height, width) and which tiles are real."""
    inputs = {"pixel_values": vision.image(spec).unsqueeze(1), "pixel_attention_mask": ones(spec.batch, 1).bool()}
    return counted_image_input(spec, inputs)


def pooled_crops(spec: ExampleSpec) -> MultimodalInput:
    """Return the inputs of Molmo 2: the whole image and one crop as patches, and the patches that each placeholder pools.

    Each pools 2 x 2 patches, -1 at the edge.
    """
    part = spec.config.vision_config
    side = int(part.num_position_embeddings**0.5) if hasattr(part, "num_position_embeddings") else 27
    pool = -(-side // 2)
    padded = torch.nn.functional.pad(torch.arange(side * side).view(side, side), (0, 2 * pool - side) * 2, value=-1)
    windows = padded.view(pool, 2, pool, 2).transpose(1, 2).reshape(pool * pool, 4)
    crops = torch.arange(2 * spec.batch).view(-1, 1, 1) * side * side
    pooling = torch.where(windows >= 0, windows + crops, -1).flatten(0, 1)
    inputs = {
        "pixel_values": floats(1, 2 * spec.batch, side * side, 3 * part.patch_size**2)[0],
        "image_token_pooling": pooling,
        "image_grids": torch.full((spec.batch, 4), pool),
        "image_num_crops": torch.full((spec.batch,), 2),
    }
    return MultimodalInput(inputs=inputs, token=spec.config.image_patch_id, count=2 * pool * pool)


def _square(size: Any) -> tuple[int, int]:
    rows, columns = (size, size) if isinstance(size, int) else size
    return rows, columns


TILED: dict[str, Callable[[ExampleSpec], MultimodalInput]] = {
    "granite4_vision": tiles,
    "granite_docling": tiles_with_mask,
    "idefics": idefics_one,
    "idefics2": idefics,
    "idefics3": idefics,
    "llava_next": tiles,
    "llava_next_video": tiles,
    "llava_onevision": tiles,
    "mllama": aspect_ratio_tiles,
    "modernvbert": idefics,
    "molmo2": pooled_crops,
    "perception_lm": one_tile,
    "smolvlm": idefics,
    "ultravbert": idefics,
}


# ---------------------------------------------------------------------------------------------------------- image text


QUESTION_TOKENS = 16
OUTPUT_SIZE = (1152, 768)  # height and width of the image that GLM-Image generates, its processor's default
PIXELS_PER_CODE = 32  # along each side for one of its codes


def find_image_input(spec: ExampleSpec) -> MultimodalInput:
    """Return the image of each text: by the family's own recipe, by grid of patches (Qwen-VL), else plain pixels (LLaVA)."""
    own = FAMILIES.get(spec.config.model_type)
    if own is not None:
        return own(spec)
    return grid_of_patches(spec) if spec.takes("image_grid_thw") else pixels(spec)


def kind_of(spec: ExampleSpec) -> str:
    """Return the modality of the placeholders: an "image", or a "video" if that is the only token."""
    has = lambda kind: any(hasattr(spec.config, name) for name in placeholder_names(kind))  # noqa: E731
    return "video" if has("video") and not has("image") else "image"


def pixels(spec: ExampleSpec, **more: Tensor) -> MultimodalInput:
    """Return the inputs of LLaVA: pixels (batch, channels, height, width)."""
    if read(spec.config, "vision_config.model_type") == "pixtral":
        return pixtral(spec)
    return counted_image_input(spec, {"pixel_values": vision.image(spec), **more})


def pixtral(spec: ExampleSpec) -> MultimodalInput:
    """Return the inputs of Pixtral's tower: images of any size, and their sizes.

    One feature per `spatial_merge_size` squared patches.
    """
    step = spec.config.vision_config.patch_size * read(spec.config, "spatial_merge_size", default=1)
    rows, columns = (max(1, side // step) for side in spec.sides)
    inputs = {"pixel_values": floats(spec.batch, vision.channels(spec), rows * step, columns * step),
              "image_sizes": image_sizes(spec, rows * step, columns * step)}  # fmt: skip
    return image_input(spec, inputs, rows * columns)


def queried_patches(spec: ExampleSpec) -> MultimodalInput:
    """Return the inputs of Aria: an image with a number of patches that its projector has queries for.

    490 pixels are 1225 patches and use 128 queries.
    """
    patch = spec.config.vision_config.patch_size
    counts = {int(count): queries for count, queries in spec.config.projector_patch_to_query_dict.items()}
    smallest = min(counts)
    side = patch * round(smallest**0.5)
    values = floats(spec.batch, vision.channels(spec), side, side)
    return image_input(spec, {"pixel_values": values}, counts[smallest])


def downsampled_patches(spec: ExampleSpec) -> MultimodalInput:
    """Return pixels for Step 3.7: two convolutions of stride 2 (kernel 3, padding 1) reduce its patches along each side."""
    patch = spec.config.vision_config.patch_size
    rows, columns = ((size // patch + 3) // 4 for size in spec.sides)
    return image_input(spec, {"pixel_values": vision.image(spec)}, rows * columns)


def with_high_resolution(spec: ExampleSpec) -> MultimodalInput:
    """Return an image for DeepSeek-VL's hybrid, small for one tower and large for the other."""
    side = read(spec.config, "high_res_vision_config.image_size", default=1024)
    large = floats(spec.batch, vision.channels(spec), side, side)
    return counted_image_input(spec, {"pixel_values": vision.image(spec), "high_res_pixel_values": large})


def queries(spec: ExampleSpec) -> MultimodalInput:
    """Return the inputs of BLIP-2: the Q-Former's queries replace the placeholders."""
    inputs = {"pixel_values": vision.image(spec)}
    if spec.takes("qformer_input_ids"):
        words = question(spec.config.qformer_config.vocab_size, spec.batch)
        inputs |= {"qformer_input_ids": words, "qformer_attention_mask": torch.ones_like(words)}
    token = placeholder(spec.config, kind_of(spec))
    return MultimodalInput(inputs=inputs, token=token, count=spec.config.num_query_tokens)


def video_queries(spec: ExampleSpec) -> MultimodalInput:
    """Return the inputs of InstructBLIP for videos: four frames, each read by the Q-Former's queries."""
    inputs = queries(spec).inputs | {"pixel_values": floats(spec.batch, 4, vision.channels(spec), *spec.sides)}
    token = placeholder(spec.config, "video")
    return MultimodalInput(inputs=inputs, token=token, count=4 * spec.config.num_query_tokens)


def grid_of_patches(spec: ExampleSpec) -> MultimodalInput:
    """Return the inputs of Qwen-VL: the patches of the whole batch as rows, and per image the grid (time, height, width).

    `merge` x `merge` patches become one feature; HunYuan adds a token per row and two around the image.
    """
    grid, merge = vision.grid_thw(spec), vision.merge_size(spec.config)
    inputs = {"pixel_values": vision.patch_rows(spec, grid), "image_grid_thw": grid}
    if spec.takes("image_merge_sizes"):
        inputs["image_merge_sizes"] = torch.full((spec.batch,), merge)
    rows, columns = (int(side) // merge for side in grid[0, 1:])
    extra = rows + 2 if spec.config.model_type == "hunyuan_vl" else 0
    return image_input(spec, inputs, rows * columns + extra)


def source_and_target(spec: ExampleSpec) -> MultimodalInput:
    """Return the inputs of GLM-Image: the patches of a source image, one code each, and the grid of the generated image.

    The grids of a sample are concatenated; the last one is the image to generate (`GlmImageProcessor`).
    """
    source = vision.grid_thw(spec)[:1]
    target = torch.tensor([[1, *(side // PIXELS_PER_CODE for side in OUTPUT_SIZE)]])
    grids = torch.cat([source, target])
    inputs = {
        "pixel_values": vision.patch_rows(spec, source.repeat(spec.batch, 1)),
        "image_grid_thw": grids.repeat(spec.batch, 1),
        "images_per_sample": torch.full((spec.batch,), len(grids)),
    }
    marks = (spec.config.image_start_token_id, spec.config.image_end_token_id)
    return replace(image_input(spec, inputs, int(source.prod())), marks=marks)


def padded_patches(spec: ExampleSpec) -> MultimodalInput:
    """Return the inputs of ColQwen2: the patches of each image apart, (batch, patches, values), as its processor pads them."""
    multimodal_input = grid_of_patches(spec)
    rows = multimodal_input.inputs["pixel_values"].unflatten(0, (spec.batch, -1))
    return replace(multimodal_input, inputs=multimodal_input.inputs | {"pixel_values": rows})


def merged_grid(spec: ExampleSpec) -> MultimodalInput:
    """Return the inputs of Inkling 2: rows of already merged patches (rows, side, side, channels), one feature each."""
    inputs = vision.merged_patches(spec)
    return image_input(spec, inputs, int(inputs["image_grid_thw"][0].prod()))


def patches_with_shape(spec: ExampleSpec) -> MultimodalInput:
    """Return the inputs of LFM2-VL (SigLIP 2's NaFlex).

    These are patches (batch, count, channels * patch * patch), their mask, and the rows and columns of their grid.

    `downsample_factor` squared patches become one feature, rounded up along each side.
    """
    fold = read(spec.config, "downsample_factor", default=1)
    rows, columns = vision.grid(spec)
    return image_input(spec, vision.naflex(spec), math.ceil(rows / fold) * math.ceil(columns / fold))


def patches_with_positions(spec: ExampleSpec) -> MultimodalInput:
    """Return the inputs of Gemma 4: patches (batch, count, channels * patch * patch) and their positions.

    `pooling_kernel_size` squared patches become one feature.
    """
    part = spec.part("vision_config")
    pool = read(part, "pooling_kernel_size", "num_pooled_patches", default=1)
    inputs = vision.positioned_patches(spec, pool)
    return image_input(spec, inputs, inputs["pixel_values"].shape[1] // pool**2)


def merged_patches_with_positions(spec: ExampleSpec) -> MultimodalInput:
    """Return the inputs of Gemma 4 without an encoder.

    These are merged patches (batch, count, channels * side * side) and their positions, with one placeholder each.
    """
    side = spec.config.vision_config.model_patch_size
    rows, columns = (max(1, size // side) for size in spec.sides)
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(-1)
    values = floats(spec.batch, rows * columns, 3 * side * side)
    inputs = {"pixel_values": values, "image_position_ids": places.repeat(spec.batch, 1, 1)}
    return image_input(spec, inputs, rows * columns)


def fuyu_patches(spec: ExampleSpec) -> MultimodalInput:
    """Return the inputs of Fuyu: patches (batch, count, channels * patch * patch), one placeholder each."""
    patch = spec.config.patch_size
    rows, columns = (max(1, size // patch) for size in spec.sides)
    values = floats(spec.batch, rows * columns, spec.config.num_channels * patch * patch)
    return image_input(spec, {"pixel_values": values}, rows * columns)


def patches_side_by_side(spec: ExampleSpec) -> MultimodalInput:
    """Return the inputs of MiniCPM-V: the patches of all images in one row, and (rows, columns) of each image.

    The patches have the shape (1, channels, patch, patches * patch).

    Sixteen patches become one feature, four in the "4x" mode.
    """
    inputs = vision.side_by_side(spec)
    per_feature = 4 if read(spec.config, "downsample_mode") == "4x" else 16
    return image_input(spec, inputs, int(inputs["target_sizes"][0].prod()) // per_feature)


def patch_cubes(spec: ExampleSpec) -> MultimodalInput:
    """Return the inputs of Inkling: each patch as a small video, with one feature each.

    The shape is (patches, frames, patch, patch, channels).
    """
    values = vision.cubes(spec)
    return image_input(spec, {"pixel_values": values}, len(values) // spec.batch)


def flat_grid(spec: ExampleSpec) -> MultimodalInput:
    """Return the inputs of Nemotron Omni: rows of flattened patches and (rows, columns) of each image.

    A pixel shuffle folds 2 x 2 into one.
    """
    patch = spec.part("vision_config").patch_size
    rows, columns = (max(1, size // (2 * patch)) * 2 for size in spec.sides)
    values = floats(1, spec.batch * rows * columns, 3 * patch * patch)[0]
    inputs = {"pixel_values": values, "image_grid_hw": torch.tensor([[rows, columns]]).repeat(spec.batch, 1)}
    return image_input(spec, inputs, rows * columns // 4)


def lone_patches(spec: ExampleSpec) -> MultimodalInput:
    """Return the inputs of NeoMME: rows of flattened patches, one placeholder each."""
    patch = spec.config.patch_size
    rows, columns = (max(1, size // patch) for size in spec.sides)
    values = floats(1, spec.batch * rows * columns, 3 * patch * patch)[0]
    return image_input(spec, {"pixel_values": values}, rows * columns)


def marked_places(spec: ExampleSpec) -> MultimodalInput:
    """Return the inputs of Kosmos-2: a mask marks the positions of the image's latent queries in the text."""
    count = spec.config.latent_query_num
    inputs = {"pixel_values": vision.image(spec), "image_embeds_position_mask": _places(spec, count)}
    return MultimodalInput(inputs=inputs, token=None, count=count)


def marked_flat_patches(spec: ExampleSpec) -> MultimodalInput:
    """Return the inputs of Kosmos-2.5: flattened patches as in Pix2Struct, and a mask of the positions of the latent queries."""
    count = spec.config.latent_query_num
    inputs = vision.flattened_patches(spec)
    inputs.pop("attention_mask")
    return MultimodalInput(
        inputs=inputs | {"image_embeds_position_mask": _places(spec, count)}, token=None, count=count
    )


def question(vocabulary: int, batch: int) -> Tensor:
    """Return token ids (batch, 16) of a question about the image."""
    return torch.arange(QUESTION_TOKENS).remainder(max(1, vocabulary - 2)).add(1).repeat(batch, 1)


def _places(spec: ExampleSpec, count: int) -> Tensor:
    places = zeros(spec.batch, spec.tokens)
    places[:, 1 : 1 + count] = 1
    return places


FAMILIES: dict[str, Callable[[ExampleSpec], MultimodalInput]] = {
    **TILED,
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

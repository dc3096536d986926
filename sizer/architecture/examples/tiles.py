"""Recipes for an image inside a text that is cut into tiles or crops (LLaVA-NeXT, Idefics, Llama 3.2, Molmo 2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.image_processing_utils import select_best_resolution

from sizer.architecture.examples import vision
from sizer.architecture.examples.example_spec import ExampleSpec, read
from sizer.architecture.examples.multimodal_inputs import MultimodalInput, counted_image_input, image_input, image_sizes
from sizer.architecture.examples.tensors import floats, ones, zeros


def tiles(spec: ExampleSpec) -> MultimodalInput:
    """LLaVA-NeXT's way: the whole image and its tiles, (batch, 1 + tiles, channels, side, side), and its true size."""
    side = _square(read(spec.config, "vision_config.image_size", default=spec.sides))
    rows, columns = select_best_resolution(spec.sides, spec.config.image_grid_pinpoints)
    count = 1 + (rows // side[0]) * (columns // side[1])
    values = floats(spec.batch, count, vision.channels(spec), *side)
    return counted_image_input(spec, {"pixel_values": values, "image_sizes": image_sizes(spec, *spec.sides)})


def one_tile(spec: ExampleSpec) -> MultimodalInput:
    """Pixels (batch, 1, channels, height, width): an image that needs no tiles beside it."""
    return counted_image_input(spec, {"pixel_values": vision.image(spec).unsqueeze(1)})


def idefics(spec: ExampleSpec) -> MultimodalInput:
    """Idefics2 and 3: pixels (batch, 1, channels, height, width) with their mask.

    Idefics2's perceiver yields `resampler_n_latents` features; Idefics3 and SmolVLM fold `scale_factor` squared patches into one.
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
    """Idefics (the first): pixels (batch, 1, channels, height, width) read by cross-attention from every token but the first."""
    seen = ones(spec.batch, spec.tokens, 1)
    seen[:, 0] = 0
    pixels = vision.image(spec).unsqueeze(1)
    return MultimodalInput(inputs={"pixel_values": pixels, "image_attention_mask": seen}, token=None, count=0)


def aspect_ratio_tiles(spec: ExampleSpec) -> MultimodalInput:
    """Llama 3.2 Vision: four tiles of which one is used, read by cross-attention: one placeholder, whatever the size."""
    inputs = aspect_ratio_inputs(spec)
    crossing = zeros(spec.batch, spec.tokens, 1, inputs["aspect_ratio_mask"].shape[-1])
    crossing[:, 1:, :, 0] = 1
    return image_input(spec, inputs | {"cross_attention_mask": crossing}, 1)


def aspect_ratio_inputs(spec: ExampleSpec) -> dict[str, Tensor]:
    """Tiles (batch, 1, tiles, channels, height, width), the id of their arrangement (1: a single tile), which are used."""
    count = read(spec.config, "vision_config.max_num_tiles", "max_num_tiles", default=4)
    mask = zeros(spec.batch, 1, count)
    mask[..., 0] = 1
    pixels = floats(spec.batch, 1, count, vision.channels(spec), *spec.sides)
    return {"pixel_values": pixels, "aspect_ratio_ids": ones(spec.batch, 1), "aspect_ratio_mask": mask}


def tiles_with_mask(spec: ExampleSpec) -> MultimodalInput:
    """Granite Docling: pixels (batch, 1, channels, height, width) and which tiles are real."""
    inputs = {"pixel_values": vision.image(spec).unsqueeze(1), "pixel_attention_mask": ones(spec.batch, 1).bool()}
    return counted_image_input(spec, inputs)


def pooled_crops(spec: ExampleSpec) -> MultimodalInput:
    """Molmo 2: the whole image and one crop as patches, and which patches each placeholder pools (2 x 2, -1 at the edge)."""
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


FAMILIES: dict[str, Callable[[ExampleSpec], MultimodalInput]] = {
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

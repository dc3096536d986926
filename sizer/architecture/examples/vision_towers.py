"""Recipes for the seeing parts of larger models on their own: vision towers, Q-Formers, adapters."""

from __future__ import annotations

import torch
from torch import Tensor

from sizer.architecture.examples import image_text, vision
from sizer.architecture.examples.example_spec import ExampleSpec, Recipe, floats, ones, read

STACKED_PATCHES = frozenset({"paddleocr_vl_vision"})  # one more dimension in front of the rows


def patch_grid_tower(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the patches of all images as rows for a Qwen-VL tower, under the name in its forward, and their grids."""
    grid = vision.grid_thw(spec)
    name = "hidden_states" if spec.takes("hidden_states") else "pixel_values"
    inputs = {name: vision.patch_rows(spec, grid), "grid_thw": grid}
    if spec.config.model_type in STACKED_PATCHES:
        inputs[name] = inputs[name].unsqueeze(0)
    if spec.takes("merge_sizes"):
        inputs["merge_sizes"] = torch.full((spec.batch,), vision.merge_size(spec.config))
    return inputs


def cube_tower(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Inkling's tower: patches as small videos."""
    return {"pixel_values": vision.cubes(spec)}


def positioned_tower(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Gemma 4's tower: patches and their positions."""
    pool = read(spec.config, "pooling_kernel_size", default=1)
    return vision.positioned_patches(spec, pool, name="pixel_position_ids")


def sized_tower(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Pixtral's tower: pixels, each image's size with them."""
    sizes = torch.tensor([spec.sides]).repeat(spec.batch, 1)
    return {"pixel_values": vision.image(spec), "image_sizes": sizes}


def tiled_tower(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return four tiles for Llama 3.2's tower, with one in use."""
    inputs = image_text.aspect_ratio_inputs(spec)
    return {name: value for name, value in inputs.items() if spec.takes(name)}


def queries(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return 32 queries for a Q-Former, and an image's 257 features."""
    config = spec.config
    width = read(config, "encoder_hidden_size", "hidden_size")
    inputs = {
        "query_embeds": floats(spec.batch, 32, config.hidden_size),
        "encoder_hidden_states": floats(spec.batch, 257, width),
    }
    if spec.takes("input_ids"):
        words = image_text.question(config.vocab_size, spec.batch)
        inputs |= {"input_ids": words, "attention_mask": ones(spec.batch, 32 + words.shape[1])}
    return inputs


def hidden_tokens(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return hidden states (batch, length, hidden size) for an encoder."""
    return {"hidden_states": floats(spec.batch, spec.length or 256, spec.config.hidden_size)}


def hidden_pixels(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Florence-2's tower: pixels under the name `hidden_states`."""
    return {"hidden_states": floats(spec.batch, 3, 768, 768)}


def quantized_image(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Janus' VQ-VAE: an image with as many patches along each side as its codes have places."""
    side = spec.config.num_patches * 2 ** (len(spec.config.channel_multiplier) - 1)
    return {"pixel_values": floats(spec.batch, spec.config.in_channels, side, side)}


def pooled_patches(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Molmo 2's adapter: features of 729 patches and which four of them each token pools."""
    config = spec.config
    width = config.hidden_size * len(config.vision_feature_layer)
    windows = torch.arange(spec.batch * 182 * 4).view(-1, 4)
    return {"image_features": floats(spec.batch, 729, width), "pooled_patches_idx": windows}


def rows_of_patches(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return patches for Molmo 2's tower (images, patches, channels * patch * patch), one per position."""
    config = spec.config
    count = read(config, "num_position_embeddings", default=729)
    return {"pixel_values": floats(spec.batch, count, 3 * config.patch_size**2)}


def frames_as_images(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of X-CLIP's tower: the frames of all videos as images, (batch * frames, channels, height, width)."""
    return {"pixel_values": vision.video(spec).flatten(0, 1)}


FAMILIES: dict[str, Recipe] = {
    "blip_2_qformer": queries,
    "flava_multimodal_model": hidden_tokens,
    "florence_vision": hidden_pixels,
    "gemma4_vision": positioned_tower,
    "inkling2_vision": vision.merged_patches,
    "inkling_vision": cube_tower,
    "instructblip_qformer": queries,
    "instructblipvideo_qformer": queries,
    "janus_vqgan": quantized_image,
    "minicpm_ocr_vision": vision.side_by_side,
    "minicpmv4_6_vision": vision.side_by_side,
    "minicpmv4_7_vision": vision.side_by_side,
    "mllama_vision_model": tiled_tower,
    "molmo2_adapter": pooled_patches,
    "molmo2_vision": rows_of_patches,
    "pix2struct": vision.flattened_patches,
    "pix2struct_vision_model": vision.flattened_patches,
    "pixtral": sized_tower,
    "siglip2_vision_model": vision.naflex,
    "xclip_vision_model": frames_as_images,
}

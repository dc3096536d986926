"""Recipes for the seeing parts of larger models on their own: vision towers, Q-Formers, adapters."""

from __future__ import annotations

import torch
from torch import Tensor

from sizer.architecture.examples import image_text, patches, tiles, vision
from sizer.architecture.examples.setting import Recipe, Setting, read
from sizer.architecture.examples.tensors import floats, ones

STACKED_PATCHES = frozenset(
    {"paddleocr_vl_vision"}
)  # one more dimension in front of the rows  # one more dimension in front of the rows


def patch_grid_tower(setting: Setting) -> dict[str, Tensor]:
    """A Qwen-VL tower: the patches of all pictures as rows, under the name its forward uses, and their grids."""
    grid = patches.grid_thw(setting)
    name = "hidden_states" if setting.takes("hidden_states") else "pixel_values"
    inputs = {name: patches.patch_rows(setting, grid), "grid_thw": grid}
    if setting.config.model_type in STACKED_PATCHES:
        inputs[name] = inputs[name].unsqueeze(0)
    if setting.takes("merge_sizes"):
        inputs["merge_sizes"] = torch.full((setting.batch,), patches.merge_size(setting.config))
    return inputs


def merged_grid_tower(setting: Setting) -> dict[str, Tensor]:
    """Inkling 2's tower: rows of merged patches."""
    return patches.merged_patches(setting)


def cube_tower(setting: Setting) -> dict[str, Tensor]:
    """Inkling's tower: patches as small films."""
    return {"pixel_values": patches.cubes(setting)}


def positioned_tower(setting: Setting) -> dict[str, Tensor]:
    """Gemma 4's tower: patches and their positions."""
    pool = read(setting.config, "pooling_kernel_size", default=1)
    return patches.positioned_patches(setting, pool, name="pixel_position_ids")


def sized_tower(setting: Setting) -> dict[str, Tensor]:
    """Pixtral's tower: pixels, each picture's size with them."""
    sizes = torch.tensor([setting.image_size]).repeat(setting.batch, 1)
    return {"pixel_values": vision.image(setting), "image_sizes": sizes}


def tiled_tower(setting: Setting) -> dict[str, Tensor]:
    """Llama 3.2's tower: four tiles of which one is used."""
    inputs = tiles.aspect_ratio_inputs(setting)
    return {name: value for name, value in inputs.items() if setting.takes(name)}


def queries(setting: Setting) -> dict[str, Tensor]:
    """A Q-Former: 32 queries that read a picture's 257 features."""
    config = setting.config
    width = read(config, "encoder_hidden_size", "hidden_size")
    inputs = {
        "query_embeds": floats(setting.batch, 32, config.hidden_size),
        "encoder_hidden_states": floats(setting.batch, 257, width),
    }
    if setting.takes("input_ids"):
        words = image_text.question(config.vocab_size, setting.batch)
        inputs |= {"input_ids": words, "attention_mask": ones(setting.batch, 32 + words.shape[1])}
    return inputs


def hidden_tokens(setting: Setting) -> dict[str, Tensor]:
    """An encoder of hidden states (batch, length, hidden size)."""
    return {"hidden_states": floats(setting.batch, setting.length or 256, setting.config.hidden_size)}


def hidden_pixels(setting: Setting) -> dict[str, Tensor]:
    """Florence-2's tower: pixels under the name `hidden_states`."""
    return {"hidden_states": floats(setting.batch, 3, 768, 768)}


def quantised_picture(setting: Setting) -> dict[str, Tensor]:
    """Janus' VQ-VAE: a picture with as many patches along each side as its codes have places."""
    side = setting.config.num_patches * 2 ** (len(setting.config.channel_multiplier) - 1)
    return {"pixel_values": floats(setting.batch, setting.config.in_channels, side, side)}


def pooled_patches(setting: Setting) -> dict[str, Tensor]:
    """Molmo 2's adapter: features of 729 patches and which four of them each token pools."""
    config = setting.config
    width = config.hidden_size * len(config.vision_feature_layer)
    windows = torch.arange(setting.batch * 182 * 4).view(-1, 4)
    return {"image_features": floats(setting.batch, 729, width), "pooled_patches_idx": windows}


def rows_of_patches(setting: Setting) -> dict[str, Tensor]:
    """Molmo 2's tower: patches (pictures, patches, channels * patch * patch), as many as it has positions."""
    config = setting.config
    count = read(config, "num_position_embeddings", default=729)
    return {"pixel_values": floats(setting.batch, count, 3 * config.patch_size**2)}


def frames_as_pictures(setting: Setting) -> dict[str, Tensor]:
    """X-CLIP's tower: the frames of all videos as pictures, (batch * frames, channels, height, width)."""
    return {"pixel_values": vision.video(setting).flatten(0, 1)}


FAMILIES: dict[str, Recipe] = {
    "blip_2_qformer": queries,
    "flava_multimodal_model": hidden_tokens,
    "florence_vision": hidden_pixels,
    "gemma4_vision": positioned_tower,
    "inkling2_vision": merged_grid_tower,
    "inkling_vision": cube_tower,
    "instructblip_qformer": queries,
    "instructblipvideo_qformer": queries,
    "janus_vqgan": quantised_picture,
    "minicpm_ocr_vision": patches.ribbon,
    "minicpmv4_6_vision": patches.ribbon,
    "minicpmv4_7_vision": patches.ribbon,
    "mllama_vision_model": tiled_tower,
    "molmo2_adapter": pooled_patches,
    "molmo2_vision": rows_of_patches,
    "pix2struct": patches.flattened_patches,
    "pix2struct_vision_model": patches.flattened_patches,
    "pixtral": sized_tower,
    "siglip2_vision_model": patches.naflex,
    "xclip_vision_model": frames_as_pictures,
}

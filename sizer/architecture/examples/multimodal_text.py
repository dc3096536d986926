"""Recipes for a text with an image or audio inside: placeholders in the text, as many as the encoder yields features."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from sizer.architecture.examples import audio_text, image_text
from sizer.architecture.examples.example_spec import ExampleSpec, ones, read
from sizer.architecture.examples.multimodal_inputs import MultimodalInput
from sizer.architecture.examples.token_inputs import sentence
from sizer.architecture.heads import choose_head
from sizer.base.errors import RequestError

TEXT_BESIDE = 256  # tokens of text in addition to the placeholders if the length of the text is not given


def multimodal_input_of(spec: ExampleSpec) -> MultimodalInput | None:
    """Return the image of a model that reads images within its text, else its audio; None for other models.

    None, too, if the config has no image encoder, or if the model's way to read audio is not known.
    """
    if not spec.takes("input_ids"):
        return None
    wrapped, spec = read(spec.config, "vlm_config") is not None, inner(spec)
    if reads_images(spec) and has_vision_tower(spec):
        return (
            image_text.padded_patches(spec)
            if wrapped and spec.takes("image_grid_thw")
            else image_text.find_image_input(spec)
        )
    return audio_text.find_audio_input(spec) if spec.config.model_type in audio_text.FAMILIES else None


def kind_of(spec: ExampleSpec) -> str | None:
    """Return the modality of the placeholder tokens in the model's texts: "image", "video" or "audio".

    None without such tokens.
    """
    if not spec.takes("input_ids"):
        return None
    spec = inner(spec)
    if reads_images(spec) and has_vision_tower(spec):
        return image_text.kind_of(spec)
    return "audio" if spec.config.model_type in audio_text.FAMILIES else None


def left_out(spec: ExampleSpec) -> tuple[str, ...]:
    """Return the image and audio parameters that a text-only example leaves out: no encoder, or no known way to pass them."""
    images_out = ("pixel_values",) if reads_images(spec) and not has_vision_tower(spec) else ()
    audio_out = ("input_features", "input_values") if _names_token(spec, "audio") else ()
    return images_out + audio_out if spec.takes("input_ids") else ()


def reads_images(spec: ExampleSpec) -> bool:
    """Return True if images replace a token of the text."""
    known = spec.config.model_type in image_text.FAMILIES
    return spec.takes("pixel_values", "image_pixel_values") and (known or _names_token(spec, "image"))


def has_vision_tower(spec: ExampleSpec) -> bool:
    """Return False if the config has a key for an image encoder, and it is empty."""
    return not hasattr(spec.config, "vision_config") or spec.config.vision_config is not None


def inner(spec: ExampleSpec) -> ExampleSpec:
    """Return the spec of the vision-language model that a retrieval model (ColPali) wraps, else the spec itself."""
    config = read(spec.config, "vlm_config")
    return spec if config is None else replace(spec, config=config, cls=choose_head(config, None)[0])


def _names_token(spec: ExampleSpec, kind: str) -> bool:
    return any(hasattr(spec.config, f"{kind}_token_{end}") for end in ("id", "index"))


def text_alone(spec: ExampleSpec) -> dict[str, Any]:
    """Return a text (batch, length) without images or audio, and a mask as processors return it."""
    ids = sentence(inner(spec))
    types = {name: torch.zeros_like(ids) for name in ("mm_token_type_ids", "token_type_ids") if spec.takes(name)}
    return {"input_ids": ids, "attention_mask": ones(spec.batch, spec.tokens), **types}


def text_with_placeholders(spec: ExampleSpec, multimodal_input: MultimodalInput) -> dict[str, Any]:
    """Return a text (batch, length) with placeholders after its first token, a mask as from processors, and the input itself.

    Raises RequestError if the text is too short for the placeholders.
    """
    needed = multimodal_input.count + 2
    if spec.tokens < needed:
        raise RequestError(
            f"seq: one {multimodal_input.kind} takes {multimodal_input.count} tokens of the text of {spec.class_name}",
            given=f"{spec.tokens} tokens",
            allowed=f"at least {needed}",
            todo="use a longer seq, or only text with inputs=text",
        )
    ids = sentence(inner(spec))
    if multimodal_input.token is not None:
        ids[:, 1 : 1 + multimodal_input.count] = multimodal_input.token
    if multimodal_input.marks is not None:
        ids[:, 0], ids[:, 1 + multimodal_input.count] = multimodal_input.marks
    inputs = {"input_ids": ids, "attention_mask": ones(spec.batch, spec.tokens), **multimodal_input.inputs}
    marked = (ids == multimodal_input.token).long() if multimodal_input.token is not None else torch.zeros_like(ids)
    if spec.takes("mm_token_type_ids"):
        inputs["mm_token_type_ids"] = marked
    if spec.takes("token_type_ids"):
        inputs["token_type_ids"] = marked
    return inputs

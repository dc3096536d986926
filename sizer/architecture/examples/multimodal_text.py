"""Recipes for a text with a picture or a sound inside: placeholders in the text, as many as the encoder yields features."""

from __future__ import annotations

from dataclasses import replace

import torch

from sizer.architecture.examples import audio_text, image_text
from sizer.architecture.examples.media import Medium
from sizer.architecture.examples.setting import Setting, read
from sizer.architecture.examples.tensors import ones
from sizer.architecture.examples.text import sentence
from sizer.architecture.heads import choose_head
from sizer.errors import RequestError

TEXT_BESIDE = 256  # tokens of text beside the placeholders where nobody says how long the text is


def medium_of(setting: Setting) -> Medium | None:
    """The picture of a model that reads pictures within its text, else its sound; None for a model that reads neither so.

    None, too, where the config leaves the encoder of the pictures out, or where the model's way to read sound is not known.
    """
    if not setting.takes("input_ids"):
        return None
    wrapped, setting = read(setting.config, "vlm_config") is not None, inner(setting)
    if reads_pictures(setting) and has_tower(setting):
        return (
            image_text.padded_patches(setting)
            if wrapped and setting.takes("image_grid_thw")
            else image_text.picture(setting)
        )
    return audio_text.sound(setting) if setting.config.model_type in audio_text.FAMILIES else None


def kind_of(setting: Setting) -> str | None:
    """What a placeholder token stands for in the model's texts: "image", "video" or "audio"; None where there is no such token."""
    if not setting.takes("input_ids"):
        return None
    setting = inner(setting)
    if reads_pictures(setting) and has_tower(setting):
        return image_text.kind_of(setting)
    return "audio" if setting.config.model_type in audio_text.FAMILIES else None


def left_out(setting: Setting) -> tuple[str, ...]:
    """The parameters of pictures and sounds that a text without them leaves out: no encoder, or no known way to pass them."""
    pictures_out = ("pixel_values",) if reads_pictures(setting) and not has_tower(setting) else ()
    sounds_out = ("input_features", "input_values") if _names_token(setting, "audio") else ()
    return pictures_out + sounds_out if setting.takes("input_ids") else ()


def reads_pictures(setting: Setting) -> bool:
    """True where pictures go into the text in place of a token."""
    known = setting.config.model_type in image_text.FAMILIES
    return setting.takes("pixel_values", "image_pixel_values") and (known or _names_token(setting, "image"))


def has_tower(setting: Setting) -> bool:
    """False where the config has a place for an encoder of pictures and leaves it empty."""
    return not hasattr(setting.config, "vision_config") or setting.config.vision_config is not None


def inner(setting: Setting) -> Setting:
    """The setting of the vision-language model that a retrieval model (ColPali) wraps, else the setting itself."""
    config = read(setting.config, "vlm_config")
    return setting if config is None else replace(setting, config=config, cls=choose_head(config, None)[0])


def _names_token(setting: Setting, kind: str) -> bool:
    return any(hasattr(setting.config, f"{kind}_token_{end}") for end in ("id", "index"))


def story(setting: Setting, medium: Medium) -> dict[str, object]:
    """A text (batch, length) with the medium's placeholders after its first token, a mask as processors return it, the medium.

    Raises RequestError where the text is too short for the placeholders.
    """
    needed = medium.count + 2
    if setting.length < needed:
        raise RequestError(
            f"seq: one {medium.kind} takes {medium.count} tokens of the text of {setting.class_name}",
            given=f"{setting.length} tokens",
            allowed=f"at least {needed}",
        )
    ids = sentence(inner(setting))
    if medium.token is not None:
        ids[:, 1 : 1 + medium.count] = medium.token
    if medium.marks is not None:
        ids[:, 0], ids[:, 1 + medium.count] = medium.marks
    inputs = {"input_ids": ids, "attention_mask": ones(setting.batch, setting.length), **medium.inputs}
    marked = (ids == medium.token).long() if medium.token is not None else torch.zeros_like(ids)
    if setting.takes("mm_token_type_ids"):
        inputs["mm_token_type_ids"] = marked
    if setting.takes("token_type_ids"):
        inputs["token_type_ids"] = marked
    return inputs
